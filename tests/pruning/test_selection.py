"""Selection: exact budgets, order, ties, what must stay; on small hand-made cases and on seeded random ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tune_prune.core.errors import UserError
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.selection import select


def geometry(kv=(2, 2), mlp=(3, 3), group=100, channel=10, extra=0, other=500, cache_layers=(0,)) -> Geometry:
    """A made-up decoder: `other` parameters (embeddings, norms) that are never removed."""
    layers = len(kv)
    prunable = sum(kv) * group + sum(mlp) * channel + layers * extra
    return Geometry(
        total_params=prunable + other,
        hidden_size=8,
        head_dim=4,
        queries_per_kv=1,
        kv_heads=tuple(kv),
        mlp_width=tuple(mlp),
        group_cost=(group,) * layers,
        channel_cost=(channel,) * layers,
        last_group_extra=(extra,) * layers,
        cache_layers=cache_layers,
    )


def scores(attention, mlp) -> GroupScores:
    return GroupScores(tuple(np.array(a, dtype=float) for a in attention), tuple(np.array(m, dtype=float) for m in mlp))


def removing(params: int, g: Geometry) -> float:
    """A ratio whose budget is exactly `params`."""
    return (params + 0.5) / g.total_params


def cost_of(plan: PruningPlan, g: Geometry) -> int:
    total = 0
    for layer, (groups, channels) in enumerate(zip(plan.kept_groups, plan.kept_channels, strict=True)):
        total += (g.kv_heads[layer] - len(groups)) * g.group_cost[layer]
        total += (g.mlp_width[layer] - len(channels)) * g.channel_cost[layer]
        total += 0 if groups else g.last_group_extra[layer]
    return total


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text and not text.endswith(".") and ". " not in text
    return text


def test_lowest_scores_go_first():
    g = geometry()
    plan = select(scores([[9, 1], [8, 7]], [[2, 3, 4], [5, 6, 0]]), g, removing(120, g))
    assert plan.kept_groups == ((0,), (0, 1)) and plan.kept_channels == ((1, 2), (0, 1))
    assert plan.removed_params == plan.target_params == 120 and plan.total_params == g.total_params


def test_selection_goes_on_past_a_group_that_does_not_fit():
    g = geometry()
    plan = select(scores([[1, 2], [3, 4]], [[5, 6, 7], [8, 9, 10]]), g, removing(130, g))
    assert plan.kept_groups == ((1,), (0, 1))  # the second group costs 100 and 30 are left
    assert plan.kept_channels == ((), (0, 1, 2)) and plan.removed_params == 130


def test_ties_go_by_layer_then_attention_then_index():
    g = geometry(channel=100)
    ties = scores([[1, 1], [1, 1]], [[1, 1, 1], [1, 1, 1]])
    order = []
    for count in range(1, 9):
        plan = select(ties, g, removing(100 * count, g))
        assert plan.removed_params == 100 * count
        order.append((tuple(map(len, plan.kept_groups)), plan.kept_channels))
    assert order[0] == ((1, 2), ((0, 1, 2), (0, 1, 2)))  # then layer 0 keeps its last group
    assert [kept for _, kept in order[1:4]] == [((1, 2), (0, 1, 2)), ((2,), (0, 1, 2)), ((), (0, 1, 2))]
    assert [groups for groups, _ in order[4:6]] == [(1, 1), (1, 0)]
    assert [kept for _, kept in order[6:]] == [((), (1, 2)), ((), (2,))]


def test_the_first_layer_of_each_attention_type_keeps_a_group():
    g = geometry(kv=(1, 1, 1), mlp=(1, 1, 1), cache_layers=(0, 2))
    plan = select(scores([[1], [2], [3]], [[100], [100], [100]]), g, removing(100, g))
    assert plan.kept_groups == ((0,), (), (0,))


def test_the_last_group_of_a_layer_takes_its_head_norms_along():
    g = geometry(kv=(1, 2), mlp=(3, 3), extra=12, channel=10)
    low_groups = scores([[50], [1, 2]], [[10, 11, 12], [13, 14, 15]])
    plan = select(low_groups, g, removing(212, g))
    assert plan.kept_groups == ((0,), ()) and plan.removed_params == 212
    plan = select(low_groups, g, removing(211, g))  # one short: the last group does not fit, channels do
    assert plan.kept_groups == ((0,), (1,)) and plan.removed_params == 160
    assert plan.kept_channels == ((), ())


def test_channels_come_back_where_all_are_gone_and_a_group_is_too_much():
    g = geometry(mlp=(6, 6))
    low_channels = scores([[21, 22], [23, 24]], [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    plan = select(low_channels, g, removing(195, g))  # all 12 channels would leave 75 unremoved, and a group costs 100
    assert plan.removed_params == 190
    assert plan.kept_groups == ((1,), (0, 1))
    assert plan.kept_channels == ((), (3, 4, 5))  # the three best
    g = geometry(mlp=(1, 1))
    plan = select(scores([[21, 22], [23, 24]], [[1], [2]]), g, removing(75, g))  # two channels cannot pay for a group
    assert plan.removed_params == 20 and plan.kept_groups == ((0, 1),) * 2


def test_nothing_comes_back_while_a_channel_stays_that_costs_too_much():
    g = replace(geometry(mlp=(1, 1), group=60), channel_cost=(10, 50))
    plan = select(scores([[21, 22], [23, 24]], [[2], [1]]), g, removing(45, g))
    assert plan.kept_groups == ((0, 1),) * 2 and plan.kept_channels == ((), (0,))
    assert plan.removed_params == cost_of(plan, g) == 10


def random_case(seed: int) -> tuple[Geometry, GroupScores, float]:
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(1, 6))
    g = geometry(
        kv=tuple(draw.integers(1, 5, layers).tolist()),
        mlp=tuple(draw.integers(1, 41, layers).tolist()),
        group=int(draw.integers(50, 400)),
        channel=int(draw.integers(3, 40)),
        extra=int(draw.choice([0, 12])),
        other=int(draw.integers(0, 3000)),
        cache_layers=(0, layers - 1) if layers > 1 and draw.random() < 0.3 else (0,),
    )
    levels = draw.choice([2, 1000])  # many ties, or few
    s = scores([draw.integers(0, levels, k) for k in g.kv_heads], [draw.integers(0, levels, m) for m in g.mlp_width])
    return g, s, float(draw.uniform(0, g.prunable_params / g.total_params))


def test_random_cases_keep_every_promise():
    for seed in range(1000):
        g, s, ratio = random_case(seed)
        plan = select(s, g, ratio)
        assert plan.target_params == int(ratio * g.total_params)
        assert plan.removed_params == cost_of(plan, g) <= plan.target_params, seed
        left = plan.target_params - plan.removed_params
        if any(plan.kept_channels) or sum(g.mlp_width) * g.channel_cost[0] >= g.group_cost[0] + g.last_group_extra[0]:
            assert left < g.channel_cost[0], seed
        for layer, groups in enumerate(plan.kept_groups):
            last = len(groups) == 1
            if groups and not (last and layer in g.cache_layers):
                assert left < g.group_cost[layer] + last * g.last_group_extra[layer], seed
        assert all(plan.kept_groups[layer] for layer in g.cache_layers), seed
        # within one block of equal costs, nothing that stays scores lower than something that went
        for values, kept in zip(s.mlp, plan.kept_channels, strict=True):
            gone = sorted(set(range(len(values))) - set(kept))
            if gone and kept:
                assert values[gone].max() <= values[list(kept)].min(), seed
        assert plan == select(s, g, ratio)
        assert PruningPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_scores_that_are_no_numbers_are_refused(bad):
    g = geometry()
    with pytest.raises(UserError, match="2 of 10 group scores are not finite") as error:
        select(scores([[1, bad]] * 2, [[1, 2, 3]] * 2), g, 0.1)
    assert "seq_len" in one_sentence(error)
