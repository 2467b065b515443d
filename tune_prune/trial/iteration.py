"""Pruning in steps: part of the budget, then scores of what is left, and so on (GISP, arXiv:2510.18030; Molchanov et al. 2019,
arXiv:1906.10771).

The budget grows evenly: after step k of n, floor(budget * k / n) parameters are gone; the last step meets it as one step would.
Until then every layer keeps a KV group and an MLP channel, or more where the shape says so, and all layers together enough channels
for the last step to meet it with; what goes at once and is larger than a step's part of the budget is waited for. A later step's
statistics are taken of the pruned copy by the same code as the dense model's, on the same samples; they are kept under the
structure of that copy, so that a trial which was interrupted goes on, and one that comes by the same copy need not take them again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tune_prune.core.config import PruningConfig
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.methods import Dense, load_method
from tune_prune.pruning.selection import budget, further, geometry_of, in_two, on_the_way
from tune_prune.pruning.statistics import Arrays, Need, PassWork, by_statistic, load_statistic
from tune_prune.trial.recipe import Recipe

if TYPE_CHECKING:  # plans count the passes of steps without what measures a trial
    from tune_prune.trial.context import TrialContext


@dataclass(frozen=True)
class Step:
    """A plan after some steps, and the scores of what it leaves."""

    plan: PruningPlan
    scores: GroupScores

    def next(self, context: TrialContext, config: PruningConfig, number: int) -> PruningPlan:
        """Return the plan after step `number` of `config`."""
        geometry = context.loaded.geometry
        cap, last = config.layer_cap, steps_of(config)
        whole = budget(geometry, config.pruning_ratio, config.shape, cap, config.whole_experts)
        scores = self.scores.normalized(config.normalization).with_a_lowest()
        if config.whole_experts != 1:
            return in_two(scores, geometry, whole, config.whole_experts, config.shape, cap)
        if number == last:
            return further(self.plan, scores, geometry, whole, config.shape, cap)
        between = "aligned-1" if config.shape == "free" else config.shape  # no block is gone as a whole
        return on_the_way(self.plan, scores, geometry, whole, number, last, between, cap)


def steps_of(config: PruningConfig) -> int:
    """Return in how many steps a configuration is pruned: one where nothing is to be taken again."""
    return config.steps if load_method(config.method).statistics else 1


def first_step(context: TrialContext, config: PruningConfig, arrays: dict[Need, Arrays]) -> Step:
    """Return the scores of the dense model, by the arrays of its statistics."""
    loaded = context.loaded
    dense = Dense(loaded.model, loaded.family, loaded.geometry, context.run.of(config).seed, {}, loaded.residency)
    return Step(PruningPlan.keep_all(loaded.geometry), _scores(dense, config, arrays))


def _scores(model: Dense, config: PruningConfig, arrays: dict[Need, Arrays]) -> GroupScores:
    method = load_method(config.method)
    needs = method.needs(config).items()
    values = {name: load_statistic(need.statistic).value(arrays[need], need) for name, need in needs}
    model = replace(model, statistics=values, removal_power=config.removal_power)
    return method.scores(model)


def next_step(context: TrialContext, config: PruningConfig, plan: PruningPlan) -> tuple[Step, int]:
    """Return the scores of what `plan` keeps, by statistics of the pruned copy; and the tokens forwarded for them (0: they
    were kept)."""
    samples, needs = config.samples, load_method(config.method).needs(config)
    cache = replace(context.cache, structure=plan.structure)

    def make(halvings: int) -> tuple[Step, int]:
        context.drop_copy()
        dense = context.loaded
        model, way = Recipe(plan).to_train(dense)
        collected: dict[Need, Arrays] = {}
        forwarded = 0
        for name, wanted in by_statistic(needs.values()).items():
            statistic = load_statistic(name)
            collected |= {need: arrays for need in wanted if (arrays := cache.get(samples, need)) is not None}
            if missing := [need for need in wanted if need not in collected]:
                windows = context.windows(samples, max(need.num_samples for need in missing))
                held = way if statistic.backward else replace(way.forward_only, halvings=halvings)
                made, tokens = cache.collect(samples, missing, windows, replace(dense, model=model), held)
                forwarded += tokens
                collected |= made
        left = geometry_of(plan, dense.geometry)
        copy = Dense(model, dense.family, left, context.run.of(config).seed, {}, way)
        return Step(plan, _scores(copy, config, collected)), forwarded

    def most() -> int:
        """Return it for the statistic that is taken next, as those before it are kept."""
        missing = by_statistic(cache.missing(samples, needs.values()))
        return next((context.most_halvings(*one, samples.seq_len) for one in missing.items()), 0)

    return context.fitted("steps", "train", make, most)


def works_of(config: PruningConfig, num_layers: int, device: str) -> list[PassWork]:
    """Return the passes of all steps but the first, for the cost model: as if the copies were as large as the dense model."""
    needs = by_statistic(load_method(config.method).needs(config).values())
    works = [load_statistic(name).work(wanted, config.seq_len, num_layers, device) for name, wanted in needs.items()]
    return [replace(work, of_copy=True) for work in works] * (steps_of(config) - 1)
