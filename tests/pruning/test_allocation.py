"""Settings that say how much each layer gives: a cap on its part that goes, the divisor of scores before all are sorted, the power
of the removal losses; against plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

import numpy as np
import pytest

import tune_prune
from tests.pruning.test_methods_of_pruning import dense, flat
from tests.pruning.test_selection import cost_of, geometry, one_sentence, removing, scores
from tests.pruning.test_shapes import random_case, removal, widths
from tests.trial.test_iteration import ONE, lowest_out, made
from tests.trials import open_context
from tune_prune.core.errors import UserError
from tune_prune.pruning import shapes
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.selection import budget, select
from tune_prune.pruning.shapes import Floors
from tune_prune.trial.context import TrialContext

CAPS = (0.3, 0.75)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


def least(count: int, cap: float) -> int:
    """How many of so many stay at least, in decimal arithmetic."""
    return int((count * (1 - Decimal(str(cap)))).to_integral_value(ROUND_CEILING))


def below(counts: Sequence[Sequence[int]], floors: Sequence[Sequence[int]]) -> bool:
    return any(n < m for own, least in zip(counts, floors, strict=True) for n, m in zip(own, least, strict=True))


@pytest.mark.parametrize("cap", CAPS)
def test_free_removes_the_lowest_of_what_no_layer_has_to_keep(cap: float) -> None:
    for seed in range(80):
        g, s = random_case(seed, tiny=True)
        most = shapes.removal_bounds(g, "free", Floors.of(g, cap)).most
        floors = [(least(k, cap), least(m, cap)) for k, m in zip(g.kv_heads, g.mlp_width, strict=True)]
        floors = [(max(k, layer in g.cache_layers), m) for layer, (k, m) in enumerate(floors)]
        assert most == removal(g, *(tuple(part) for part in zip(*floors, strict=True)))
        for target in (most, most // 2, most // 3):
            plan = select(s, g, removing(target, g), cap=cap)
            assert plan.removed_params == cost_of(plan, g) <= plan.target_params == target
            kept = list(zip(plan.kept_groups, plan.kept_channels, strict=True))
            for layer, ((groups, channels), floor) in enumerate(zip(kept, floors, strict=True)):
                assert len(groups) >= floor[0] and len(channels) >= floor[1], (seed, layer)
                for values, mine in ((s.attention[layer], groups), (s.mlp[layer], channels)):  # each its best ones
                    gone = sorted(set(range(len(values))) - set(mine))
                    assert not gone or not mine or values[gone].max() <= values[list(mine)].min()
            left = target - plan.removed_params
            may_go = [g.channel_cost[i] for i, (_, own) in enumerate(kept) if len(own) > floors[i][1]]
            assert not may_go or left < min(may_go), seed


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("shape", ["uniform", "aligned-1", "aligned-3"])
def test_the_bounds_of_other_shapes_are_those_of_all_widths_that_the_cap_allows(shape: str, cap: float) -> None:
    refused = 0
    for seed in range(60):
        g, s = random_case(seed, tiny=True)
        n = int(shape.removeprefix("aligned-")) if shape != "uniform" else 1

        # Channels beyond multiples of n go in any case.
        floors = [least(k, cap) for k in g.kv_heads], [min(least(m, cap), m // n * n) for m in g.mlp_width]
        removals = [removal(g, *one) for one in widths(g, shape) if not below(one, floors)]
        if not removals:  # layers differ by more than the cap lets go: the shape goes before it
            refused += 1
            continue
        bounds = shapes.removal_bounds(g, shape, Floors.of(g, cap))
        assert (bounds.least, bounds.most) == (min(removals), max(removals)), seed
        for target in (bounds.least, (bounds.least + bounds.most) // 2, bounds.most):
            plan = select(s, g, removing(target, g), shape, cap)
            assert plan.removed_params == cost_of(plan, g) <= target
            counts = [tuple(map(len, part)) for part in (plan.kept_groups, plan.kept_channels)]
            assert not below(counts, floors), (seed, target)
    assert refused < 40


def test_a_budget_beyond_the_cap_is_refused_with_what_can_be_had() -> None:
    g = geometry()  # 2 KV groups of 100 and 3 channels of 10 in each of 2 layers, 960 parameters in all
    with pytest.raises(UserError) as error:
        budget(g, 0.3, cap=0.5)
    assert one_sentence(error) == (
        "pruning_ratio 0.3 asks for 288 of 960 parameters, but with layer_cap 0.5 only 220 can be removed; ask for at most 0.229, "
        "or for a higher layer_cap"
    )
    with pytest.raises(UserError, match="only 0 can be removed; ask for a higher layer_cap"):
        budget(g, 0.3, cap=0.0001)
    assert budget(g, 0.229, cap=0.5) == 219
    assert select(scores([[1, 2], [3, 4]], [[5, 6, 7]] * 2), g, 0.229, cap=0.5).kept_groups == ((1,), (1,))
    assert Floors.of(geometry(kv=(5,), mlp=(10,)), 0.4) == Floors((3,), (6,))  # 0.6 of 5, which binary fractions miss


def test_scores_are_divided_by_root_mean_squares_of_their_kind_or_layer() -> None:
    s = scores([[3, 4], [0, 5]], [[1, 2, 2], [4, 4, 4]])
    assert s.normalized("none") is s
    kind, layer = s.normalized("kind"), s.normalized("layer")
    attention, mlp = math.sqrt((9 + 16 + 25) / 4), math.sqrt((1 + 4 + 4 + 48) / 6)
    np.testing.assert_allclose(np.concatenate(kind.attention), np.array([3, 4, 0, 5]) / attention)
    np.testing.assert_allclose(np.concatenate(kind.mlp), np.array([1, 2, 2, 4, 4, 4]) / mlp)
    first, second = math.sqrt((9 + 16 + 9) / 5), math.sqrt((25 + 48) / 5)
    np.testing.assert_allclose(np.concatenate(layer.attention), [3 / first, 4 / first, 0, 5 / second])
    np.testing.assert_allclose(np.concatenate(layer.mlp), [1 / first, 2 / first, 2 / first, *[4 / second] * 3])
    tiny = GroupScores(*(tuple(part * 1e-200 for part in parts) for parts in (s.attention, s.mlp)))
    np.testing.assert_allclose(np.concatenate(tiny.normalized("kind").mlp), np.concatenate(kind.mlp))
    nothing = scores([[0, 0], []], [[0, 0, 0], [1]])
    assert flat(nothing.normalized("layer")) == [0, 0, 0, 0, 0, 1] and flat(nothing.normalized("kind"))[:2] == [0, 0]


@pytest.mark.parametrize("by", ["kind", "layer"])
def test_what_goes_first_is_below_all_others_and_changes_none_of_them(by: str) -> None:
    first = scores([[-math.inf, -math.inf], [-3, 2]], [[-math.inf] * 3, [1, -1, 2]]).normalized(by)
    others = scores([[], [-3, 2]], [[], [1, -1, 2]]).normalized(by)
    lowest = min(flat(others)) - 1
    assert flat(first.with_a_lowest()) == [lowest, lowest, *flat(others)[:2], *[lowest] * 3, *flat(others)[2:]]
    assert flat(others.with_a_lowest()) == flat(others)
    with pytest.raises(UserError, match="1 of 10 group scores are not finite"):
        select(scores([[-math.inf, 1], [3, math.nan]], [[1, 2, 3]] * 2).with_a_lowest(), geometry(), 0.2)


@pytest.mark.parametrize("name", ["layerwise", "blockwise"])
def test_the_power_is_that_of_the_logarithm_of_removal_losses(name: str) -> None:
    method = load_method(name)
    assert "removal_power" in method.reads and "removal_power" not in load_method("taylor").reads
    increase = {kind: [0.5, 3.0] for kind in ("layer", "attention", "mlp")}
    one, half, none = (method.scores(replace(dense(increase), removal_power=power)) for power in (1.0, 0.5, 1e-12))
    assert flat(one) == flat(method.scores(dense(increase)))
    first, second = math.log(1.5), math.log(4.0)
    factors = [first, first, second, first, first, first, second, second]  # 2 + 1 groups, 3 + 2 channels
    np.testing.assert_allclose(np.array(flat(one)) / flat(half), np.sqrt(factors))
    np.testing.assert_allclose(flat(none), flat(load_method("taylor").scores(dense(increase))))


def test_a_trial_is_pruned_within_the_cap_by_scores_that_were_divided(context: TrialContext) -> None:
    g, one = context.loaded.geometry, replace(ONE, pruning_ratio=0.2)
    settings = {}, {"layer_cap": 0.4}, {"normalization": "layer", "layer_cap": 0.4, "steps": 3}
    plain, capped, both = (made(replace(one, **parts), context)[0] for parts in settings)
    assert len({plan.structure for plan in (plain, capped, both)}) == 3
    gone = [1 - len(kept) / m for kept, m in zip(plain.kept_channels, g.mlp_width, strict=True)]
    assert max(gone) > 0.4
    for plan in (capped, both):
        for parts, sizes in ((plan.kept_groups, g.kv_heads), (plan.kept_channels, g.mlp_width)):
            assert all(1 - len(kept) / size <= 0.4 for kept, size in zip(parts, sizes, strict=True))
        assert 0 <= plan.target_params - plan.removed_params < max(g.channel_cost)
    found = load_method("taylor").needs(ONE)["taylor"]
    arrays = context.cache.get(ONE.samples, found)
    assert arrays is not None
    importance = GroupScores.from_arrays({n: a for n, a in arrays.items() if n.startswith(("attention_", "mlp_"))})
    everything = tuple(tuple(range(k)) for k in g.kv_heads), tuple(tuple(range(m)) for m in g.mlp_width)
    plans = {by: made(replace(ONE, normalization=by), context)[0] for by in ("none", "kind", "layer")}
    assert plans["layer"] != plans["none"]
    for by, plan in plans.items():
        divided = importance.per_parameter(g).normalized(by)
        assert lowest_out(divided, everything, g, plan.target_params, False) == (plan.kept_groups, plan.kept_channels)


def test_prune_takes_them_and_says_what_is_not_read() -> None:
    model = tune_prune.open("tiny-llama", device="cpu")
    options = {"removal_power": 0.5, "normalization": "layer", "layer_cap": 0.6}
    config = model.prune("blockwise", seq_len=16, num_samples=8, **options).config
    assert config.name == "blockwise-s16-n8-p0.5-by_layer-x0.6"
    with pytest.raises(UserError, match=r"removal_power is 0\.5, but taylor has no removal losses; leave it out"):
        model.prune("taylor", seq_len=16, num_samples=8, removal_power=0.5)
    with pytest.raises(UserError, match=r"layer_cap is 1\.5; it must be a number above 0, at most 1"):
        model.prune("taylor", seq_len=16, num_samples=8, layer_cap=1.5)
    with pytest.raises(UserError, match=r"with layer_cap 0\.1 only [\d,]+ can be removed; ask for at most 0\.\d+"):
        model.prune("taylor", seq_len=16, num_samples=8, layer_cap=0.1)
    for name in ("layerwise", "block_influence"):
        with pytest.raises(
            UserError, match=rf"{name} .* normalization layer divides out again; use normalization none or kind"
        ):
            model.prune(name, seq_len=16, num_samples=8, normalization="layer")
