"""Pruning in several steps: against plain loops, in every shape and way to hold the model, with a refit, and interrupted."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

import tune_prune
from tests.trials import RUN, open_context, with_empty_cache
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.records import TrialRecord
from tune_prune.models.geometry import read_geometry
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.compensation import refit
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.methods import load_method, method_names
from tune_prune.pruning.selection import budget, geometry_of, select
from tune_prune.pruning.statistics.taylor import Taylor, taylor
from tune_prune.pruning.surgery import prune
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import Trial

ONE = PruningConfig("taylor", seq_len=16, num_samples=8, pruning_ratio=0.3)
WITH_STATISTICS = [
    method.name for method in map(load_method, method_names()) if method.statistics and not method.only_experts
]


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


def made(config: PruningConfig, context: TrialContext) -> tuple[PruningPlan, list[tuple[str, int]], Trial]:
    """The plan of a trial that only prunes, stage and tokens of each of its reports, and the trial."""
    trial = Trial(config, context, record=TrialRecord.begun("", "tiny-llama", config))
    reports = [(report.stage, report.tokens) for report in trial.recipe(config)]
    assert trial.made is not None
    return trial.made.plan, reports, trial


def lowest_out(scores, kept, geometry, left: int, keep_one: bool):
    """Return what stays of `kept` when groups and channels go in ascending order of score while `left` parameters suffice."""
    groups, channels = ([list(part) for part in kept[kind]] for kind in (0, 1))
    order = []
    for layer in range(geometry.num_layers):
        for index, score in enumerate(scores.attention[layer]):
            order.append((score, layer, 0, kept[0][layer][index]))
        for index, score in enumerate(scores.mlp[layer]):
            order.append((score, layer, 1, kept[1][layer][index]))
    for _, layer, kind, member in sorted(order):
        own, cost = (channels, geometry.channel_cost) if kind else (groups, geometry.group_cost)
        needed = keep_one or (kind == 0 and layer in geometry.cache_layers)
        if cost[layer] <= left and not (needed and len(own[layer]) == 1):
            own[layer].remove(member)
            left -= cost[layer]
    return tuple(map(tuple, groups)), tuple(map(tuple, channels))


def test_two_steps_are_those_of_plain_loops(context):
    dense, geometry = context.loaded, context.loaded.geometry
    windows = context.windows(ONE.samples, 8)
    target = int(0.3 * geometry.total_params)
    every = tuple(tuple(range(k)) for k in geometry.kv_heads), tuple(tuple(range(m)) for m in geometry.mlp_width)
    scores = taylor(dense.model, dense.family, windows, [8])[8].groups.per_parameter(geometry)
    first = lowest_out(scores, every, geometry, target // 2, keep_one=True)
    removed = sum(
        (k - len(a)) * group + (m - len(b)) * channel
        for k, m, a, b, group, channel in zip(
            *(geometry.kv_heads, geometry.mlp_width, *first, geometry.group_cost, geometry.channel_cost), strict=True
        )
    )
    between = PruningPlan(*first, target // 2, removed, geometry.total_params)
    copy = prune(dense.model, dense.family, between)
    assert read_geometry(copy, dense.family) == geometry_of(between, geometry)
    scores = taylor(copy, dense.family, windows, [8])[8].groups.per_parameter(read_geometry(copy, dense.family))
    expected = lowest_out(scores, first, geometry, target - removed, keep_one=False)

    plan, reports, _ = made(replace(ONE, steps=2), context)
    assert (plan.kept_groups, plan.kept_channels) == expected
    assert plan.target_params == target and 0 <= target - plan.removed_params < geometry.channel_cost[0]
    assert [stage for stage, _ in reports] == ["importance", "steps", "pruning"]
    assert plan != made(ONE, context)[0]


@pytest.mark.parametrize("shape", ["free", "uniform", "aligned-8"])
def test_one_step_is_what_select_gives(context, shape):
    dense, geometry = context.loaded, context.loaded.geometry
    found = taylor(dense.model, dense.family, context.windows(ONE.samples, 8), [8])[8].groups
    plan, reports, _ = made(replace(ONE, shape=shape), context)
    assert plan == select(found.per_parameter(geometry), geometry, 0.3, shape)
    assert [stage for stage, _ in reports] == ["importance", "pruning"]


@pytest.mark.parametrize(
    ("method", "shape"), [*zip(WITH_STATISTICS, cycle(["free", "uniform", "aligned-8", "aligned-8-tp2"]))]
)
def test_every_method_meets_the_budget_in_every_shape(context, method, shape):
    geometry = context.loaded.geometry
    target = budget(geometry, 0.3, shape)
    plan, _, _ = made(replace(ONE, method=method, shape=shape, steps=3), context)
    widths = [len(kept) for kept in plan.kept_channels]
    channel, every = geometry.channel_cost[0], sum(geometry.channel_cost)
    step = {"free": channel, "uniform": every}.get(shape, 8 * channel)
    assert 0 <= target - plan.removed_params < step
    params = sum(p.numel() for p in prune(context.loaded.model, context.loaded.family, plan).parameters())
    assert params == geometry.total_params - plan.removed_params
    if shape == "uniform":
        assert len(set(widths)) == len({len(kept) for kept in plan.kept_groups}) == 1
    if shape.startswith("aligned-8"):
        assert all(width % 8 == 0 for width in widths)
    if shape.endswith("tp2"):
        assert all(len(kept) in (2, 4) for kept in plan.kept_groups)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (replace(ONE, method="fisher", shape="uniform", layer_cap=0.5), 2),
        (replace(ONE, pruning_ratio=0.6, shape="uniform"), 4),
        (replace(ONE, pruning_ratio=0.2, layer_cap=0.3), 4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_steps_meet_a_budget_for_which_the_channels_alone_do_not_suffice(context, config, steps):
    """Without channels to spare for it the last step would find no KV group small enough for what is left to remove."""
    geometry = context.loaded.geometry
    channels = sum(cost * width for cost, width in zip(geometry.channel_cost, geometry.mlp_width, strict=True))
    target = budget(geometry, config.pruning_ratio, config.shape, config.layer_cap)
    assert channels * config.layer_cap < target
    plan, _, _ = made(replace(config, steps=steps), context)
    step = sum(geometry.channel_cost) if config.shape == "uniform" else geometry.channel_cost[0]
    assert 0 <= target - plan.removed_params < step


@pytest.mark.parametrize("method", ["random", "magnitude"])
def test_what_reads_no_samples_has_one_step(context, method):
    plan, reports, _ = made(replace(ONE, method=method, steps=3), context)
    assert plan == made(replace(ONE, method=method), context)[0] and reports == [("pruning", 0)]
    with pytest.raises(UserError, match=f"steps is 3, but {method} reads no calibration text, .* leave it out"):
        tune_prune.open("tiny-llama", device="cpu").prune(method, steps=3)


def test_what_a_step_has_found_is_not_computed_again(context, tmp_path, monkeypatch):
    config = replace(ONE, steps=4)
    expected, reports, _ = made(config, with_empty_cache(context, tmp_path / "whole"))
    assert reports == [("importance", 128), *[("steps", 128)] * 3, ("pruning", 0)]
    collect, passes = Taylor.collect, []

    def dies_in_the_third(self, *arguments, **keywords):
        passes.append(arguments)
        if len(passes) == 3:
            raise KeyboardInterrupt
        return collect(self, *arguments, **keywords)

    monkeypatch.setattr(Taylor, "collect", dies_in_the_third)
    killed = with_empty_cache(context, tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        made(config, killed)
    plan, reports, _ = made(config, with_empty_cache(context, tmp_path / "killed"))
    assert plan == expected
    assert reports == [("importance", 0), ("steps", 0), ("steps", 128), ("steps", 128), ("pruning", 0)]
    half = made(replace(ONE, pruning_ratio=0.15, steps=2), killed)[1]  # its first step is a quarter of 0.3, too
    assert half == [("importance", 0), ("steps", 0), ("pruning", 0)]


@pytest.mark.parametrize("pruned_whole", [True, False])
def test_weights_that_stay_in_their_files_give_the_same_plan(context, pruned_whole, tmp_path):
    way = Residency(from_files=True, pruned_whole=pruned_whole, states="file")
    streamed = TrialContext.open(RUN, tmp_path / "artifacts", "cpu", way)
    for method in ("blockwise", "flap"):
        config = replace(ONE, method=method, steps=2)
        plan, _, trial = made(config, streamed)
        assert plan == made(config, context)[0]
        (report,) = (report for report in trial.record.stages if report.stage == "steps")
        assert report.way.startswith("streamed")


def test_a_refit_is_of_the_whole_plan(context):
    config = replace(ONE, steps=2, compensation="least_squares", refit_tokens=2048)
    plan, reports, trial = made(config, context)
    assert plan == made(replace(ONE, steps=2), context)[0]
    assert [stage for stage, _ in reports] == ["importance", "steps", "pruning", "refit"]
    length, count = refit.windows_of(2048, context.loaded.max_length)
    windows = context.windows(replace(config.samples, seq_len=length), count)
    found = refit.least_squares(context.loaded.model, context.loaded.family, plan, windows, config.damping)
    assert found.weights.keys() == trial.made.changes.refitted.keys() and found.weights
    for name, weight in found.weights.items():
        assert np.array_equal(weight, trial.made.changes.refitted[name])
