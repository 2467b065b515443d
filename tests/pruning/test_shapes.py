"""Shapes: what layers look like after selection, how exactly the budget is met, and the choice itself, each against every
possibility written out; and that a model of uniform shape is a plain model of its family."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from tests.conftest import VARIANTS, attends, whole
from tests.pruning.test_selection import cost_of, geometry, removing, scores
from tests.trials import BLOCKWISE, open_context
from tune_prune.core.errors import UserError
from tune_prune.core.kinds import Shape
from tune_prune.core.store import FolderStore
from tune_prune.models.families import FAMILIES
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.pruning import shapes
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.selection import budget, select
from tune_prune.pruning.surgery import prune
from tune_prune.trial.trial import run_trial

SHAPES = ("aligned-1", "aligned-3", "aligned-3-tp2", "uniform", "uniform-4", "uniform-tp2")


def numbers(shape: str) -> tuple[str, int, int]:
    """Return the kind of a shape, what its MLP widths are multiples of, and what its KV groups are."""
    kind, align, gpus = Shape.read(shape)
    return kind, math.lcm(align or 1, gpus), gpus


def random_case(seed: int, tiny: bool = False, gpus: int = 1) -> tuple[Geometry, GroupScores]:
    """Layers of different widths and costs, as biases and pruning before would make them; few or many ties. Every layer has KV
    groups for that many GPUs and at least 4 channels, or 6 for two."""
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(1, 4 if tiny else 7))
    kv = (gpus * draw.integers(1, 4 if tiny else 9, layers)).tolist()
    mlp = (draw.integers(4, 9 if tiny else 60, layers) + 2 * (gpus - 1)).tolist()
    if draw.random() < 0.5:  # as dense models are
        kv, mlp = [kv[0]] * layers, [mlp[0]] * layers
    g = geometry(kv, mlp, extra=int(draw.choice([0, 12])), other=int(draw.integers(0, 3000)))
    group, channel = int(draw.integers(5, 400)), int(draw.integers(3, 40))
    biased = draw.integers(0, 3, layers).tolist() if draw.random() < 0.5 else [0] * layers
    heads = [k for k in range(1, min(kv) + 1) if k == gpus or draw.random() < 0.8]
    g = replace(
        g,
        group_cost=tuple(group + more for more in biased),
        channel_cost=tuple(channel + more for more in biased),
        uniform_kv_heads=tuple(heads),
    )
    everything = PruningPlan(((),) * layers, ((),) * layers, 0, 0, 0)
    g = replace(g, total_params=cost_of(everything, g) + int(draw.integers(0, 3000)))
    levels = draw.choice([2, 10**6])
    s = scores([draw.integers(0, levels, k) for k in kv], [draw.integers(0, levels, m) for m in mlp])
    return g, s


def ratios_within(g: Geometry, shape: str, seed: int) -> Iterator[float]:
    """Ratios whose budgets are the smallest and largest that the shape can reach, and some between."""
    bounds = shapes.removal_bounds(g, shape)
    for target in (bounds.least, bounds.most, *np.random.default_rng(seed).integers(bounds.least, bounds.most + 1, 3)):
        yield removing(int(target), g)


def widths(g: Geometry, shape: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every (KV groups per layer, channels per layer) of the shape, by its definition."""
    kind, n, gpus = numbers(shape)
    if kind == "uniform":
        for k, m in itertools.product(g.uniform_kv_heads, range(n, min(g.mlp_width) + 1, n)):
            if k % gpus == 0:
                yield (k,) * g.num_layers, (m,) * g.num_layers
        return
    groups = itertools.product(*(range(gpus, k + 1, gpus) for k in g.kv_heads))
    channels = list(itertools.product(*(range(n, m + 1, n) for m in g.mlp_width)))
    for one in groups:
        for other in channels:
            yield one, other


def removal(g: Geometry, groups: tuple[int, ...], channels: tuple[int, ...]) -> int:
    return cost_of(
        PruningPlan(tuple(map(tuple, map(range, groups))), tuple(map(tuple, map(range, channels))), 0, 0, 0), g
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_random_cases_keep_every_promise(shape: str) -> None:
    kind, n, gpus = numbers(shape)
    for seed in range(120):
        g, s = random_case(seed, gpus=gpus)
        for ratio in ratios_within(g, shape, seed):
            plan = select(s, g, ratio, shape)
            assert plan.target_params == int(ratio * g.total_params) == budget(g, ratio, shape)
            assert plan.removed_params == cost_of(plan, g) <= plan.target_params, (seed, ratio)
            left = plan.target_params - plan.removed_params
            counts = [(len(a), len(b)) for a, b in zip(plan.kept_groups, plan.kept_channels, strict=True)]
            assert all(k >= 1 and m >= 1 for k, m in counts), (seed, ratio)
            assert all(k % gpus == 0 and m % n == 0 for k, m in counts), (seed, ratio)
            if kind == "uniform":
                assert len(set(counts)) == 1 and counts[0][0] in g.uniform_kv_heads, (seed, ratio)
            else:
                for layer, (k, m) in enumerate(
                    counts
                ):  # nothing that may go would still fit, but where a group paid for it
                    group = gpus * g.group_cost[layer]
                    assert k == gpus or left < group or left < n * max(g.channel_cost), (seed, ratio)
                    assert m == n or left < n * max(g.channel_cost), (seed, ratio)
            for part, kept in ((s.attention, plan.kept_groups), (s.mlp, plan.kept_channels)):
                for values, mine in zip(part, kept, strict=True):
                    assert list(mine) == sorted(set(mine))
                    gone = sorted(set(range(len(values))) - set(mine))
                    assert not gone or values[gone].max() <= values[list(mine)].min(), (seed, ratio)
            assert plan == select(s, g, ratio, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_reach_is_that_of_all_widths_of_the_shape(shape: str) -> None:
    for seed in range(60):
        g, _ = random_case(seed, tiny=True, gpus=Shape.read(shape).gpus)
        removals = [removal(g, *one) for one in widths(g, shape)]
        bounds = shapes.removal_bounds(g, shape)
        assert (bounds.least, bounds.most) == (min(removals), max(removals)), seed
        if bounds.most:
            assert bounds.smallest == min(params for params in removals if params), seed


@pytest.mark.parametrize("shape", ["uniform", "uniform-3", "uniform-tp2"])
def test_uniform_is_the_most_important_of_all_pairs_that_meet_the_budget(shape: str) -> None:
    """Every pair of widths, and in each layer every choice of that many, by exact sums."""
    clipped, (_, n, gpus) = 0, numbers(shape)
    for seed in range(150 // gpus):
        g, s = random_case(seed, tiny=True, gpus=gpus)
        generator = np.random.default_rng(seed)
        s = scores([generator.random(k) for k in g.kv_heads], [generator.random(m) for m in g.mlp_width])

        def most(values: np.ndarray, cost: int, count: int) -> Fraction:
            return max(sum(Fraction(float(v)) * cost for v in some) for some in itertools.combinations(values, count))

        for ratio in ratios_within(g, shape, seed):
            target = int(ratio * g.total_params)
            best_of: dict[int, tuple[int, int]] = {}  # K -> (missing, M): as near as this K comes
            for (k, *_), (m, *_) in widths(g, shape):
                missing = target - removal(g, (k,) * g.num_layers, (m,) * g.num_layers)
                if missing >= 0:
                    best_of[k] = min((missing, m), best_of.get(k, (missing, m)))
            nearest, step = min(missing for missing, _ in best_of.values()), n * sum(g.channel_cost)
            near = {k: m for k, (missing, m) in best_of.items() if missing < step or (missing == nearest >= step)}
            clipped += nearest >= step
            totals = {
                (k, m): sum(most(v, c, k) for v, c in zip(s.attention, g.group_cost, strict=True))
                + sum(most(v, c, m) for v, c in zip(s.mlp, g.channel_cost, strict=True))
                for k, m in near.items()
            }
            plan = select(s, g, ratio, shape)
            pair = len(plan.kept_groups[0]), len(plan.kept_channels[0])
            assert totals[pair] == max(totals.values()), (seed, ratio)
            assert plan.target_params - plan.removed_params < step or nearest >= step
    assert clipped > 0  # a KV group of every layer that costs more than all of the MLPs


def plain_aligned(s: GroupScores, g: Geometry, target: int, n: int, gpus: int) -> tuple[list[set[int]], list[set[int]]]:
    """The documented walk, a channel at a time and with exact means."""
    groups = [set(range(k)) for k in g.kv_heads]
    channels = [set(range(m)) for m in g.mlp_width]
    candidates: list[tuple[Fraction, int, int, int, list[int]]] = []  # score, layer, attention or MLP, place, members
    parts = [(layer, 0, values, gpus) for layer, values in enumerate(s.attention)]
    for layer, is_mlp, scored, size in parts + [(layer, 1, values, n) for layer, values in enumerate(s.mlp)]:
        ascending = sorted(range(len(scored)), key=lambda i, scored=scored: (scored[i], i))
        while len(ascending) % size:  # channels alone
            channels[layer].remove(ascending.pop(0))
            target -= g.channel_cost[layer]
        for start in range(0, len(ascending) - size, size):  # the best block stays
            members = ascending[start : start + size]
            mean = sum(Fraction(float(scored[i])) for i in members) / size
            candidates.append((mean, layer, is_mlp, start // size, members))
    for _, layer, is_mlp, _, members in sorted(candidates):
        cost = n * g.channel_cost[layer] if is_mlp else gpus * g.group_cost[layer]
        if cost <= target:
            (channels if is_mlp else groups)[layer] -= set(members)
            target -= cost
    return groups, channels


@pytest.mark.parametrize("shape", ["aligned-1", "aligned-4", "aligned-3-tp2"])
def test_aligned_walks_as_documented(shape: str) -> None:
    _, n, gpus = numbers(shape)
    for seed in range(150):
        g, s = random_case(seed, gpus=gpus)
        bounds = shapes.removal_bounds(g, shape)
        for ratio in (
            removing((bounds.least + bounds.most) // 2, g),
            removing((3 * bounds.least + bounds.most) // 4, g),
        ):
            plan = select(s, g, ratio, shape)
            groups, channels = plain_aligned(s, g, plan.target_params, n, gpus)
            if all(len(kept) == n for kept in channels):
                continue  # a group may have paid for blocks that came back: the next test
            assert [set(kept) for kept in plan.kept_groups] == groups, seed
            assert [set(kept) for kept in plan.kept_channels] == channels, seed


def test_aligned_brings_the_best_blocks_back_where_a_group_is_too_much() -> None:
    g = geometry(kv=(2, 2), mlp=(5, 6), group=100, channel=10)
    low = scores([[21, 22], [23, 24]], [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]])
    plan = select(low, g, removing(70 + 95, g), "aligned-2")  # without all that may go of the MLPs, 95 are left
    assert plan.kept_groups == ((1,), (0, 1)) and plan.removed_params == 150
    assert plan.kept_channels == ((3, 4), (2, 3, 4, 5))
    plan = select(low, g, removing(10, g), "aligned-2")
    assert plan.kept_channels == ((1, 2, 3, 4), (0, 1, 2, 3, 4, 5))  # what makes 5 a multiple, and nothing else


def test_layers_that_cannot_take_a_shape_are_named() -> None:
    g = geometry(kv=(2, 2), mlp=(60, 30))
    with pytest.raises(UserError, match=r"layer 1 has 30 channels, fewer than the 64 .*aligned-64.* e\.g\. --align 8"):
        budget(g, 0.2, "aligned-64")
    assert budget(g, removing(600, g), "aligned-8") == 600
    for gone in (geometry(kv=(2, 0)), geometry(mlp=(3, 0))):
        for shape in ("aligned-1", "uniform"):
            with pytest.raises(UserError, match=r"layer 1 has no .*--shape free"):
                budget(gone, 0.1, shape)
    with pytest.raises(UserError, match="shape is 'square'"):
        budget(g, 0.2, "square")


def test_heads_that_cannot_be_shared_by_gpus_are_refused_and_fewer_than_gpus_all_stay() -> None:
    g = replace(geometry(kv=(6, 6), mlp=(24, 24)), queries_per_kv=2, uniform_kv_heads=(1, 2, 3, 4, 5, 6))
    with pytest.raises(UserError, match=r"12 query heads and 6 KV heads, .* over 4 GPUs.*; use --tensor-parallel 3"):
        budget(g, 0.2, "aligned-4-tp4")
    s = scores([[1, 2, 3, 4, 5, 6]] * 2, [range(24)] * 2)
    for shape in ("aligned-4-tp12", "uniform-tp12"):  # every KV head is on two GPUs
        bounds = shapes.removal_bounds(g, shape)
        assert (bounds.least, bounds.most) == (0, 2 * 12 * 10)
        plan = select(s, g, removing(240, g), shape)
        assert plan.kept_groups == (tuple(range(6)),) * 2 and plan.kept_channels == (tuple(range(12, 24)),) * 2
    with pytest.raises(UserError, match=r"24 channels, fewer than the 30 .*; use a smaller --align, e\.g\. --align 4"):
        budget(g, 0.2, "aligned-10-tp3")


@pytest.mark.parametrize(
    ("shape", "align", "params", "expected"),
    [
        ("uniform", None, 10**9 - 1, "uniform"),
        ("uniform", None, 10**9, "uniform-256"),
        (shapes.BY_SIZE, None, 10**9 - 1, "free"),
        (shapes.BY_SIZE, None, 10**9, "aligned-256"),
        ("aligned", None, 10**9 - 1, "aligned-64"),
        ("aligned", 32, 10**10, "aligned-32"),
        ("aligned-tp2", None, 10**9, "aligned-256-tp2"),
        ("uniform-tp2", None, 10**9 - 1, "uniform-tp2"),
    ],
)
def test_a_shape_gets_what_suits_the_model(shape: str, align: int | None, params: int, expected: str) -> None:
    assert shapes.resolve(shape, align, params) == expected


def stock_config(model: torch.nn.Module, g: Geometry, k: int, m: int) -> object:
    """A plain config of the family with other widths."""
    config = copy.deepcopy(model.config)
    values = config.to_dict() | {FAMILIES[config.model_type].width: m}
    if k:
        values |= {"num_key_value_heads": k, "num_attention_heads": k * g.queries_per_kv, "head_dim": g.head_dim}
    values |= dict.fromkeys(values.keys() & {"block_auto_adjust_ff_dim", "use_double_wide_mlp"}, False)
    return type(config)(**values)


@pytest.mark.parametrize("variant", [*filter(attends, VARIANTS)])
def test_uniform_kv_heads_are_those_that_a_plain_config_can_state(tiny, variant) -> None:
    model = tiny(variant)
    g = read_geometry(model, FAMILIES[model.config.model_type])
    for k in range(1, 5):
        if k in g.uniform_kv_heads:
            stock_config(model, g, k, 8)
        else:
            with pytest.raises((ValueError, StrictDataclassError), match=r"number of attention heads|short_factor"):
                stock_config(model, g, k, 8)
    # Of 8 heads of 6 on 32, in groups of 2; with longrope Phi-3's config takes what is left of 48 by the heads for their size.
    assert ({3, 4} if "longrope" in variant else {1, 2, 4}) <= set(g.uniform_kv_heads)


def test_a_model_of_uniform_shape_is_a_plain_model_of_its_family(tiny, variant) -> None:
    """Its weights go into a stock model of these widths, every one of them, and the logits are equal."""
    model = tiny(variant)
    family = FAMILIES[model.config.model_type]
    g = read_geometry(model, family)
    draw = np.random.default_rng(1)
    least = shapes.removal_bounds(g, "uniform").least  # where layers of the model differ
    for ratio in (max(0.15, removing(least, g)), 0.4 if attends(variant) else 0.2):
        s = scores([draw.random(k) for k in g.kv_heads], [draw.random(m) for m in g.mlp_width])
        plan = select(s, g, ratio, "uniform")
        pruned = prune(model, family, plan)
        config = stock_config(model, g, len(plan.kept_groups[0]), len(plan.kept_channels[0]))
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        assert type(plain) is type(model)
        plain.load_state_dict(whole(pruned).state_dict(), strict=True)
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(plain(tokens).logits, pruned(tokens).logits, rtol=0, atol=1e-12)
        assert plan.removed_params == g.total_params - sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("shape", ["aligned-16", "uniform"])
def test_a_trial_prunes_to_its_shape_and_records_it(shape: str, tmp_path: Path) -> None:
    context = open_context(tmp_path / "artifacts")
    config = replace(BLOCKWISE, method="taylor", shape=shape)
    record = run_trial(config, context, FolderStore(tmp_path / "trial"))
    assert record.status == "complete" and record.config == config
    assert record.config.shape == shape and record.key == context.key(config) != context.key(
        replace(config, shape="free")
    )
    assert_shape(tmp_path / "trial", shape, 64)
    g = context.loaded.geometry
    step = 16 * g.channel_cost[0] if shape == "aligned-16" else sum(g.channel_cost)
    assert 0 <= 0.2 - record.metrics["removed_fraction"] < step / g.total_params


def assert_shape(trial: Path, shape: str, dense_width: int) -> None:
    layers = json.loads((trial / "pruning_comparison.json").read_text())["layers"]
    groups, channels = ([layer[f"{part}_kept"] for layer in layers] for part in ("kv_groups", "mlp_channels"))
    assert min(groups) >= 1 and sum(channels) < dense_width * len(layers)
    if shape == "uniform":
        assert len(set(groups)) == len(set(channels)) == 1
    else:
        assert all(width and width % int(shape.removeprefix("aligned-")) == 0 for width in channels)
