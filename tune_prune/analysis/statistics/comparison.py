"""The ranking by the outcomes of items: which configurations are statistically tied with the best.

K configurations, T tasks of n_t items; acc_mean is the mean over tasks of the mean over items. Items are a random sample of
what a task asks for, tasks and configurations are fixed. Configurations on the same items share its luck, so differences
are taken item by item. All of it is computed on arrays, whatever files they came from.

Where a configuration has no items, or other ones, its error is an independent normal one of its own standard error. Where
configurations were measured on several draws of calibration samples, each one's error has a part of its own for them (`draws`).

Nothing of K x K numbers is held at once, and no draw of the bootstrap is compared with all configurations where a bound says
that it need not be (`_reaching`): 5,000 configurations take seconds (docs/studies/scale.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import check_items
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.statistics.differences import Items, few_items_variance
from tune_prune.analysis.statistics.draws import DrawVariance

DRAWS = 4000  # of the bootstrap
_CHUNK = 2_000_000  # item draws, and errors of them, computed at a time
_ROWS = 512  # of a covariance matrix that are held at a time
_LEADERS = (8, 64)  # of a draw: its largest errors, which are looked at first
_COLUMNS = 64  # looked at together
_EXACT = 2**24  # whole numbers below it are exact in single precision
_ROUNDING = 1e-12  # of a variance: what is left of one that is 0
_TIE = 1e-5  # standard errors: statistics of few items take few values, which single precision splits


Positions = slice | np.ndarray  # of rows


@dataclass(frozen=True)
class PairedScores:
    """Scores of configurations on the same items."""

    by_task: dict[str, np.ndarray]  # [n_t, columns]; int8 where all are 0 or 1
    rows: np.ndarray  # the position of each column's row

    @property
    def accuracies(self) -> np.ndarray:
        """acc_mean of each column."""
        return np.mean([scores.mean(axis=0) for scores in self.by_task.values()], axis=0)

    @cached_property
    def variances(self) -> np.ndarray:
        """Return the variance of the acc_mean of each column: the diagonal of `covariance`."""
        return self._summed(lambda scores: np.square(scores).sum(axis=0) - np.square(scores.sum(axis=0)) / len(scores))

    def covariance(self, columns: Positions = slice(None)) -> np.ndarray:
        """Return the covariance of the acc_mean of these columns with that of all: sum_t cov_t / n_t / T^2 with the n_t - 1
        covariance."""

        def products(scores: np.ndarray) -> np.ndarray:
            sums = scores.sum(axis=0)
            # Of zeros and ones every sum is a whole number: the same in single precision, in half of the time
            exact = scores.dtype == np.int8 and len(scores) < _EXACT
            scores = scores.astype(np.float32 if exact else np.float64, copy=False)
            return (scores[:, columns].T @ scores).astype(np.float64) - np.outer(sums[columns], sums) / len(scores)

        return self._summed(products)

    def _summed(self, of_task: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total: np.ndarray | float = 0.0
        for scores in self.by_task.values():
            n = len(scores)
            total = total + of_task(scores) / (n - 1) / n
        return np.asarray(total) / len(self.by_task) ** 2


def paired_scores(eligible: pd.DataFrame, items: Items) -> tuple[PairedScores | None, Message | None]:
    """Return the items of the rows, and a message if not every row has the same ones.

    Of several sets of items the one of most rows counts, of equally many that of the first row (`eligible`: best first).
    None if fewer than two rows share their items. UserError naming the trial if its items contradict its acc_mean.
    """
    series = {row: scores for row, name in enumerate(eligible["output_dir"]) if (scores := items(name)) is not None}
    groups: list[list[int]] = []  # the rows of each set of items
    for row, scores in series.items():
        same = next((rows for rows in groups if _same_items(series[rows[0]], scores)), None)
        if same is None:
            groups.append([row])
        else:
            same.append(row)
    if not groups:
        return None, Message("no_items")
    rows = max(groups, key=len)  # the first of equally large ones
    if len(rows) < 2:
        return None, Message("unpaired") if len(eligible) > 1 else None
    table = np.column_stack([series[row] for row in rows])
    tasks = series[rows[0]].index.get_level_values("task")
    paired = PairedScores({str(task): table[tasks == task] for task in tasks.unique()}, np.array(rows))
    named = eligible.iloc[rows]
    for trial, recorded, measured in zip(named["output_dir"], named["acc_mean"], paired.accuracies, strict=True):
        check_items(trial, recorded, measured)
    left_out = eligible["name"].drop(eligible.index[rows]).tolist()
    return paired, Message("partly_unpaired", {"names": left_out}) if left_out else None


def _same_items(first: pd.Series, second: pd.Series) -> bool:
    return first.index is second.index or first.index.equals(second.index)


@dataclass(frozen=True)
class Comparison:
    """Every configuration against the others; arrays are in the order of the rows, accuracies fractions."""

    basis: str  # "paired" (all on the same items), "unpaired", "unknown" (no standard errors)
    p_value: np.ndarray  # [K] see `compare`; NaN where unknown
    variances: np.ndarray  # [K] of the acc_mean; NaN where unknown
    errors: np.ndarray  # [draws, K] of the acc_mean: what other items, and other calibration samples, would add
    outcomes: PairedScores | None  # of the rows that have the same items
    # [K] the part of `variances` that draws of calibration samples make; 0 where it is unknown
    draw_variances: np.ndarray
    accuracies: np.ndarray  # [K] acc_mean
    few: np.ndarray  # [K] what tasks of few items add to the variance of a difference (`compare`)

    @property
    def in_confidence_set(self) -> np.ndarray:
        """Which may still be the best, at 95% for all together; one of unknown error always may."""
        return ~(self.p_value <= 0.05)

    def half_width(self, row: int, other: int | None = None) -> float:
        """Return half the width of the 95% interval around the acc_mean of a row, or around its difference to that of another."""
        errors = self.errors[:, row] - (0.0 if other is None else self.errors[:, other])
        return float(np.quantile(np.abs(errors), 0.95))

    def covariance(self, rows: Positions = slice(None)) -> np.ndarray:
        """[rows, K] of the acc_mean; NaN where unknown."""
        return _covariance(self.variances, self.outcomes, rows)

    def stderr(self, rows: Positions = slice(None)) -> np.ndarray:
        """[rows, K] of the difference of two acc_mean, as `p_value` goes by it; 0 where both answered alike, NaN where unknown."""
        errors = _stderr(self.variances, self.outcomes, rows)
        if self.few.any():
            alike = (errors == 0) & (np.abs(self.accuracies[rows][:, None] - self.accuracies) <= _ROUNDING)
            errors = np.where(alike, 0.0, np.sqrt(np.square(errors) + self.few[rows][:, None] + self.few))
        return errors

    def variances_of(self, weights: list[np.ndarray]) -> list[float]:
        """Return the variance of each weighted sum of the acc_mean; `weights`: [K] each."""
        totals = [0.0] * len(weights)
        for rows in _blocks(len(self.variances)):
            covariance = self.covariance(rows)
            totals = [
                total + float(weight[rows] @ covariance @ weight) for total, weight in zip(totals, weights, strict=True)
            ]
        return totals


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _ROWS, count)) for start in range(0, count, _ROWS))


def _covariance(variances: np.ndarray, outcomes: PairedScores | None, rows: Positions) -> np.ndarray:
    positions = np.arange(len(variances))[rows]
    covariance = np.zeros((len(positions), len(variances)))
    if outcomes is not None:
        columns = np.full(len(variances), -1)
        columns[outcomes.rows] = np.arange(len(outcomes.rows))
        shared = np.flatnonzero(columns[positions] >= 0)
        covariance[np.ix_(shared, outcomes.rows)] = outcomes.covariance(columns[positions[shared]])
    covariance[np.arange(len(positions)), positions] = variances[positions]
    return covariance


def _stderr(variances: np.ndarray, outcomes: PairedScores | None, rows: Positions) -> np.ndarray:
    both = variances[rows][:, None] + variances
    variance = both - 2 * _covariance(variances, outcomes, rows)
    variance[variance < _ROUNDING * both] = 0.0
    return np.sqrt(variance)


def compare(
    accuracies: np.ndarray,
    stderrs: np.ndarray,
    outcomes: PairedScores | None,
    generator: np.random.Generator,
    draws: int = DRAWS,
    spreads: Sequence[tuple[DrawVariance, Any]] = (),
) -> Comparison:
    """Tests for each configuration k that none is better, by the largest studentised difference max_j (acc_j - acc_k) / se_jk.

    p_value[k] is the chance of one at least as large if all were equal, over bootstrap draws of the items within tasks (paired)
    or of normal errors, (1 + draws that reach it) / (1 + draws). Those above 0.05 are a confidence set that contains the truly
    best with 95%, however many configurations there are: comparisons with the best (Hsu, Annals of Statistics 1984) in the
    studentised-maximum form of Mogstad, Romano, Shaikh and Wilhelm (Review of Economic Studies 2024). Where se_jk is 0 two
    configurations of the same accuracy are equal and others differ. `accuracies`, `stderrs`: [K], over items; a NaN is unknown.
    `spreads`: how far draws of calibration samples lie apart, and which part of their variance each accuracy has ([K]: 1 over how
    many it is the mean of, 0 where there are none); each has an independent normal error for them, of a variance that is drawn
    anew with every bootstrap draw. Where draws of several populations are compared, a pair of each.

    The 95% are for many items: in simulated grids of 45 equal configurations, the hardest case, the set holds a given one in 92%
    with 100 items in all, 93 to 95% with 200 and 95% with 1,700. For a task of five items or fewer every configuration has an
    independent error more, of the greatest variance that the mean of so many scores can have: without it a task whose differences
    are all 1 counts as certain (82% with one task of two items beside two of 500). It speaks of the rows it is given, not of
    trials stopped early.
    """
    variances = np.square(stderrs)
    if outcomes is not None:
        if min(map(len, outcomes.by_task.values())) < 2:  # a task of one item: no spread to go by
            outcomes = None
        else:
            variances[outcomes.rows] = outcomes.variances
    finite = np.flatnonzero(np.isfinite(variances))
    errors = np.empty((draws, len(variances)))
    for part in _parts(draws, len(variances)):
        errors[part] = generator.standard_normal((part.stop - part.start, len(variances))) * np.sqrt(variances)
    if outcomes is not None:
        _bootstrap(errors, outcomes, generator)
    draw_variances = np.zeros(len(variances))
    for between, share in spreads:
        shares = np.broadcast_to(np.asarray(share, np.float64), variances.shape)
        draw_variances = draw_variances + between.variance * shares
        sampled = np.sqrt(between.sampled(generator, draws))
        for part in _parts(draws, len(variances)):
            noise = generator.standard_normal((part.stop - part.start, len(variances)))
            errors[part] += sampled[part, None] * noise * np.sqrt(shares)
    variances = variances + draw_variances
    p_value, tested, of_tested = np.full(len(variances), np.nan), errors, variances
    few = np.zeros(len(variances))
    if outcomes is not None and (added := few_items_variance(map(len, outcomes.by_task.values()))):
        few[outcomes.rows] = added  # for differences alone: an accuracy on its own has the error that its items show
        tested, of_tested = errors.copy(), variances + few
        for part in _parts(draws, len(variances)):
            noise = generator.standard_normal((part.stop - part.start, len(outcomes.rows)))
            tested[part][:, outcomes.rows] += math.sqrt(added) * noise
    p_value[finite] = _p_values(
        accuracies[finite],
        tested if len(finite) == len(variances) else tested[:, finite],
        lambda rows: _stderr(of_tested, outcomes, finite[rows])[:, finite],
    )
    all_paired = outcomes is not None and len(outcomes.rows) == len(variances)
    basis = "paired" if all_paired else "unpaired" if len(finite) else "unknown"
    return Comparison(basis, p_value, variances, errors, outcomes, draw_variances, accuracies, few)


def _parts(draws: int, *sizes: int) -> Iterator[slice]:
    """Give the draws a part at a time, of which none of the `sizes` of a draw makes more than _CHUNK numbers."""
    size = max(1, min(_CHUNK // max(1, size) for size in sizes))
    return (slice(start, min(start + size, draws)) for start in range(0, draws, size))


def _bootstrap(errors: np.ndarray, outcomes: PairedScores, generator: np.random.Generator) -> None:
    """Fills the columns of `errors` [draws, K] that have items: items drawn with replacement within each task, the same for all."""
    every = np.array_equal(outcomes.rows, np.arange(errors.shape[1]))  # then `errors` itself is filled
    filled = errors if every else np.empty((len(errors), len(outcomes.rows)))
    filled[:] = 0.0
    for scores in outcomes.by_task.values():
        n = len(scores)
        centred = (scores - scores.mean(axis=0)).astype(np.float32)
        for part in _parts(len(errors), n, len(outcomes.rows)):
            count = part.stop - part.start
            drawn = generator.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n).astype(np.float32)
            # A bootstrap variance is (n - 1) / n of the unbiased one
            filled[part] += counts @ centred / n * math.sqrt(n / (n - 1))
    filled /= len(outcomes.by_task)
    if not every:
        errors[:, outcomes.rows] = filled


def _p_values(accuracies: np.ndarray, errors: np.ndarray, stderr: Callable[[slice], np.ndarray]) -> np.ndarray:
    """`stderr` gives the rows of a slice: [rows, K]."""
    draws, count = errors.shape
    values = np.empty(count)
    leaders = _leaders(errors)
    for rows in _blocks(count):
        for k, row in enumerate(stderr(rows), rows.start):
            gaps = accuracies - accuracies[k]
            apart = row > 0
            if (gaps[~apart] > _ROUNDING).any():
                values[k] = 1 / (1 + draws)
                continue
            scale = np.divide(1, row, out=np.zeros_like(row), where=apart)
            observed = (gaps * scale).max(initial=0.0)
            values[k] = (1 + _reaching(errors, k, scale, observed - _TIE, leaders)) / (1 + draws)
    return values


def _leaders(errors: np.ndarray) -> np.ndarray:
    """Return the columns of the largest errors of each draw, the largest first."""
    count = min(_LEADERS[-1], errors.shape[1])
    largest = [np.argpartition(errors[part], -count, axis=1)[:, -count:] for part in _parts(*errors.shape)]
    columns = np.concatenate(largest)
    order = np.argsort(-np.take_along_axis(errors, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)


def _reaching(errors: np.ndarray, k: int, scale: np.ndarray, bound: float, leaders: np.ndarray) -> int:
    """Count the draws in which the largest (errors[draw, j] - errors[draw, k]) * scale[j] over j is at least `bound`.

    One j that reaches it settles a draw, so those with the largest errors come first. All others of a draw lie below the last
    of these, errors[draw, j] <= e: with (e - errors[draw, k]) * scale[j] < bound none of this scale, or of a smaller one, can
    reach it. Rounding keeps the order of differences and of products, so this is exact and needs no margin.
    """
    if bound <= 0:
        return len(errors)
    reached, left, errors_k = 0, np.arange(len(errors)), errors[:, k]

    def look(columns: np.ndarray) -> None:
        """At `columns` [left or 1, some] of the draws that are left; those that reach the bound are left no longer."""
        nonlocal reached, left
        reaching = ((errors[left[:, None], columns] - errors_k[left, None]) * scale[columns] >= bound).any(axis=1)
        reached += int(np.count_nonzero(reaching))
        left = left[~reaching]

    def possible(of_draw: np.ndarray, scale: float) -> np.ndarray:
        return left[(errors[left, of_draw[left]] - errors_k[left]) * scale >= bound]

    start = 0
    for stop in _LEADERS:
        left = possible(leaders[:, start], scale.max()) if start < leaders.shape[1] else left[:0]
        look(leaders[left, start:stop])
        start = stop
    others = leaders[:, -1]
    near = np.argsort(-scale, kind="stable") if len(scale) > leaders.shape[1] and left.size else leaders[0, :0]
    for start in range(0, len(near), _COLUMNS):
        columns = near[start : start + _COLUMNS]
        left = possible(others, scale[columns[0]])
        if not left.size:
            break
        look(columns[None, :])
    return reached
