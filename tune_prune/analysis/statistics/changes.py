"""What a refit or a training changes: each configuration beside the same one without it, judged on text and on questions that it
was not fitted to.

Both are kept only where they are better on held-out samples of their own calibration text. That says nothing of other text, where a
model that was fitted to little text, or to text of one kind, may have become worse. So it is said where KL(dense || pruned) has
risen, on the perplexity text or on the tasks' questions, and where right choices have become less likely that are likelier to the
dense model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.measures import GOLD, TEXTS, gold_logprobs
from tune_prune.analysis.input.rows import configuration_of
from tune_prune.analysis.statistics.differences import (
    Items,
    mean_observed,
    mean_series,
    paired_difference,
    paired_freedom,
    paired_gap,
)
from tune_prune.analysis.statistics.draws import mean_of_draws
from tune_prune.core.config import PruningConfig

# By the hyperparameter that switches it on: what it is called, and the metric of a trial that says how much of the error is left
# on held-out samples of its own text.
KINDS = {"compensation": ("refit", "refit_error"), "recovery": ("training", "recovery_error")}
LEVEL = 0.05
MEASURES = (*TEXTS, GOLD)
_OF_RUN = -1  # a draw whose seed is that of the run


@dataclass(frozen=True)
class Shift:
    """Of one measure, in nats: means over the draws that both have, their difference, its standard error, and the chance of one as
    bad as this where there is no difference."""

    before: float
    after: float
    change: float
    stderr: float
    p: float


@dataclass(frozen=True, eq=False)
class Change:
    """`before`, `after`: rows of eligible configurations, with acc_mean, its error and ppl over the `draws` that both have.
    `worse`: the measures that are significantly so."""

    kind: str  # "refit" or "training"
    before: pd.Series
    after: pd.Series
    draws: int
    gain: float  # in acc_mean, percentage points
    gain_stderr: float
    shifts: Mapping[str, Shift]  # by measure: of MEASURES those that all its trials have
    own_text: float  # what is left of the error on held-out samples of its own text; NaN where it is not recorded
    worse: tuple[str, ...] = ()


Rows = tuple[
    pd.DataFrame, Mapping[int, pd.DataFrame]
]  # eligible configurations; of several draws, their trials, by index


def changes(
    own: Rows, untrained: Rows, dense_gold: float = math.nan, gold: Items = gold_logprobs
) -> tuple[Change, ...]:
    """Of configurations in `own` with a refit and no training, or with a training, beside the same ones without it in `untrained`,
    which are `own` themselves where nothing is trained; the order is that of `own`. `dense_gold`: GOLD of the dense model;
    `gold`: `gold_logprobs`, or a GoldReader."""
    return judged(list(_pairs(own, untrained, dense_gold, gold)))


def judged(found: Sequence[Change]) -> tuple[Change, ...]:
    """The same with what is `worse`: at a family-wise 5% (Holm 1979) over all measures of all of them."""
    tests = [(shift.p, i, name) for i, c in enumerate(found) for name, shift in c.shifts.items()]
    tests = sorted(test for test in tests if math.isfinite(test[0]))
    worse: dict[int, list[str]] = {}
    for rank, (p, index, name) in enumerate(tests):
        if p * (len(tests) - rank) > LEVEL:
            break
        worse.setdefault(index, []).append(name)
    return tuple(replace(c, worse=tuple(n for n in MEASURES if n in worse.get(i, ()))) for i, c in enumerate(found))


def _pairs(own: Rows, untrained: Rows, dense_gold: float, gold: Items) -> Iterator[Change]:
    without = {configuration_of(row): place for place, row in untrained[0][::-1].iterrows()}
    for place, row in own[0].iterrows():
        config = configuration_of(row)
        switch = "recovery" if config.recovery != PruningConfig.recovery else "compensation"
        other = without.get(replace(config, **{switch: getattr(PruningConfig, switch)}).canonical())
        if other is None or getattr(config, switch) == getattr(PruningConfig, switch):
            continue
        first, second = (
            part.set_index(part["seed"].fillna(_OF_RUN))
            for part in (draws.get(at, rows.loc[[at]]) for (rows, draws), at in ((untrained, other), (own, place)))
        )
        if untrained[0].loc[other, "draw_share"] == 0:  # of no draw: it is what each of them is without
            first = first.loc[[_OF_RUN] * len(second)].set_index(second.index)
        both = first.index.intersection(second.index)
        if len(both):
            kind, metric = KINDS[switch]
            before, after = first.loc[both], second.loc[both]
            shifts = {name: shift for name in MEASURES if (shift := _shift(before, after, name, gold)) is not None}
            if GOLD in shifts and shifts[GOLD].after >= dense_gold:  # nearer to the dense model, not worse
                shifts[GOLD] = replace(shifts[GOLD], p=1.0)
            own_text = float(after[metric].mean()) if metric in after else math.nan
            pair = _over(untrained[0].loc[other], first, before), _over(row, second, after)
            yield Change(kind, *pair, len(both), *_gain(before, after), shifts, own_text)


def _over(configuration: pd.Series, draws: pd.DataFrame, some: pd.DataFrame) -> pd.Series:
    """The row of a configuration with such draws, with what the table shows of it over `some` of them."""
    if len(some) == len(draws):
        return configuration
    shown = {name: mean_of_draws(some[name]) for name in ("acc_mean", "acc_mean_stderr", "ppl")}
    return pd.concat([configuration.drop(list(shown)), pd.Series(shown)])


def _gain(before: pd.DataFrame, after: pd.DataFrame) -> tuple[float, float]:
    """In acc_mean, in points, of trials of the same draws, and its error, which is made as that of `_shift`."""
    gaps = after["acc_mean"].to_numpy(np.float64) - before["acc_mean"].to_numpy(np.float64)
    first, second = (mean_series([read_items(folder) for folder in part["output_dir"]]) for part in (before, after))
    paired = None if first is None or second is None else paired_difference(second, first)
    if paired is not None and math.isfinite(paired[1]):
        of_items = paired[1] ** 2
    else:
        of_items = sum(float(part["acc_mean_stderr"].mean()) ** 2 for part in (before, after))
    of_draws = float(gaps.var(ddof=1)) / len(gaps) if len(gaps) > 1 else 0.0
    return 100 * float(gaps.mean()), 100 * math.sqrt(of_items + of_draws)


def _shift(before: pd.DataFrame, after: pd.DataFrame, measure: str, gold: Items) -> Shift | None:
    """Of trials of the same draws, in their order. The error is that of the same items or blocks, averaged over draws, and, of
    several draws, of what their differences differ by; its degrees of freedom are those of both (Satterthwaite 1946)."""
    from scipy.stats import t

    if measure not in before or measure not in after:
        return None
    gaps = after[measure].to_numpy(np.float64) - before[measure].to_numpy(np.float64)
    if not np.isfinite(gaps).all():
        return None
    change, count = float(gaps.mean()), len(gaps)
    of_items, items_freedom = _items_variance(before, after, measure, gold)
    of_draws = float(gaps.var(ddof=1)) / count if count > 1 else 0.0
    stderr = math.sqrt(of_items + of_draws)
    squares = of_items**2 / items_freedom + of_draws**2 / max(1, count - 1)
    freedom = stderr**4 / squares if squares else math.inf
    worse = -change if measure == GOLD else change
    p = float(t.sf(worse / stderr, freedom)) if stderr > 0 else 1.0 if worse <= 0 else math.nan
    return Shift(float(before[measure].mean()), float(after[measure].mean()), change, stderr, p)


def _items_variance(before: pd.DataFrame, after: pd.DataFrame, measure: str, gold: Items) -> tuple[float, float]:
    """Of the mean difference over draws, which share their items, and its degrees of freedom; those of an error that is known by
    its size alone, of other items or blocks, are taken for many."""
    first, second = (mean_observed(part["output_dir"], measure, gold) for part in (before, after))
    paired = None if first is None or second is None else paired_gap(second, first)
    if paired is not None:
        return paired[1] ** 2, paired_freedom(second, first)
    stderr = f"{measure}_stderr"
    return float(sum(part[stderr].mean() ** 2 if stderr in part else math.nan for part in (before, after))), math.inf
