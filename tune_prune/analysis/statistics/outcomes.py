"""What item outcomes say of the ranking: which configurations cannot be told from the best, and the best's unbiased score.

K configurations, T tasks of n_t items; acc_mean is the mean over tasks of the mean over items. Items are a random sample of
what a task asks for, tasks and configurations are fixed. Configurations on the same items share its luck, so differences
are taken item by item. All of it is computed on arrays, whatever files they came from.

Where a configuration has no items, or other ones, its error is an independent normal one of its own standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tune_prune.analysis.input.load import read_items
from tune_prune.analysis.statistics.findings import CrossFit, Remark
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import seed_for

DRAWS = 4000  # of the bootstrap
FOLDS, REPEATS = 5, 20  # of cross-fitting
_BOOTSTRAP_DRAWS, _BOOTSTRAP_REPEATS = 100, 5  # for its standard error, which is then known to 7%
_CHUNK = 2_000_000  # item draws held in memory at a time
_ROUNDING = 1e-12  # of a variance: what is left of one that is 0
_TIE = 1e-5  # standard errors: statistics of few items take few values, which single precision splits


@dataclass(frozen=True)
class Outcomes:
    """Scores on the same items: an array [n_t, columns] per task. `rows`: the position of each column's row."""

    scores: dict[str, np.ndarray]
    rows: np.ndarray

    @property
    def accuracies(self) -> np.ndarray:
        """acc_mean of each column."""
        return np.mean([scores.mean(axis=0) for scores in self.scores.values()], axis=0)

    def covariance(self) -> np.ndarray:
        """Of the acc_mean of the columns: sum_t cov_t / n_t / T^2 with the n_t - 1 covariance; NaN for a task of one item."""
        total = np.zeros((len(self.rows), len(self.rows)))
        for scores in self.scores.values():
            n, sums = len(scores), scores.sum(axis=0)
            if n < 2:
                return np.full_like(total, np.nan)
            total += (scores.T @ scores - np.outer(sums, sums) / n) / (n - 1) / n
        return total / len(self.scores) ** 2


def read_outcomes(
    competing: pd.DataFrame, items: Callable[[str], pd.Series | None] = read_items
) -> tuple[Outcomes | None, Remark | None]:
    """The items of the rows, and a remark if not every row has the same ones.

    Of several sets of items the one of most rows counts, of equally many that of the first row (`competing`: best first).
    None if fewer than two rows share their items. UserError naming the trial if its items contradict its acc_mean.
    """
    series = [items(folder) for folder in competing["output_dir"]]
    groups: list[tuple[pd.Index, list[int]]] = []  # the rows of each set of items
    for position, scores in enumerate(series):
        if scores is None:
            continue
        index = scores.index
        same = next((rows for seen, rows in groups if seen.equals(index)), None)
        if same is None:
            groups.append((index, [position]))
        else:
            same.append(position)
    if not groups:
        return None, Remark("no_items")
    index, rows = max(groups, key=lambda group: len(group[1]))  # the first of equally large ones
    if len(rows) < 2:
        return None, Remark("unpaired") if len(competing) > 1 else None
    table = np.column_stack([scores for scores in series if scores is not None and scores.index.equals(index)])
    tasks = index.get_level_values("task")
    outcomes = Outcomes({str(task): table[tasks == task] for task in tasks.unique()}, np.array(rows))
    for position, measured in zip(rows, outcomes.accuracies, strict=True):
        row = competing.iloc[position]
        if not abs(measured - row["acc_mean"]) < 1e-6:
            raise UserError(
                f"the items of trial {row['output_dir']} have acc_mean {measured:.6f}, but its record says "
                f"{row['acc_mean']:.6f}; delete its items.parquet, or restore it from a copy"
            )
    if len(rows) == len(competing):
        return outcomes, None
    left_out = [name for position, name in enumerate(competing["name"]) if position not in set(rows)]
    return outcomes, Remark("partly_unpaired", {"names": left_out})


def compare_rows(
    competing: pd.DataFrame, label: str, items: Callable[[str], pd.Series | None] = read_items, seed: int = 0
) -> tuple[Comparison, Outcomes | None, Remark | None]:
    """`compare` for the rows of the model `label`, and what `read_outcomes` gives; each model has its own random stream."""
    outcomes, remark = read_outcomes(competing, items)
    accuracies, stderrs = (competing[name].to_numpy(dtype=np.float64) for name in ("acc_mean", "acc_mean_stderr"))
    generator = np.random.default_rng(seed_for(seed, f"bootstrap of {label}"))
    return compare(accuracies, stderrs, outcomes, generator), outcomes, remark


@dataclass(frozen=True)
class Comparison:
    """Every configuration against the others; arrays are in the order of the rows, accuracies fractions."""

    basis: str  # "paired" (all on the same items), "unpaired", "unknown" (no standard errors)
    stderr: np.ndarray  # [K, K] of the difference of two acc_mean; NaN where unknown
    p_best: np.ndarray  # [K] see `compare`; NaN where unknown

    @property
    def in_confidence_set(self) -> np.ndarray:
        """Which cannot be told from the best, at 95% for all together; one of unknown error never can."""
        return ~(self.p_best <= 0.05)


def compare(
    accuracies: np.ndarray,
    stderrs: np.ndarray,
    outcomes: Outcomes | None,
    generator: np.random.Generator,
    draws: int = DRAWS,
) -> Comparison:
    """Tests for each configuration k that none is better, by the largest studentised difference max_j (acc_j - acc_k) / se_jk.

    p_best[k] is the chance of one at least as large if all were equal, over bootstrap draws of the items within tasks (paired)
    or of normal errors, (1 + draws that reach it) / (1 + draws). Those above 0.05 are a confidence set that contains the truly
    best with 95%, however many configurations there are: comparisons with the best (Hsu, Annals of Statistics 1984) in the
    studentised-maximum form of Mogstad, Romano, Shaikh and Wilhelm (Review of Economic Studies 2024). Where se_jk is 0 two
    configurations of the same accuracy are equal and others are told apart. `accuracies`, `stderrs`: [K]; a NaN is unknown.

    The 95% are for many items: in simulated grids of 45 equal configurations, the hardest case, the set holds a given one in 92%
    with 100 items in all, 93 to 95% with 200 and 95% with 1,700. It speaks of the rows it is given, not of trials stopped early.
    """
    covariance = np.diag(np.square(stderrs))
    if outcomes is not None:
        shared = outcomes.covariance()
        if np.isnan(shared).any():  # a task of one item: no spread to go by
            outcomes = None
        else:
            covariance[np.ix_(outcomes.rows, outcomes.rows)] = shared
    own = np.diag(covariance)
    variance = own[:, None] + own[None, :] - 2 * np.where(np.eye(len(own), dtype=bool), own[:, None], covariance)
    variance[variance < _ROUNDING * (own[:, None] + own[None, :])] = 0.0
    stderr = np.sqrt(variance)
    known = np.flatnonzero(np.isfinite(own))
    errors = generator.standard_normal((draws, len(own))) * np.sqrt(own)
    if outcomes is not None:
        errors[:, outcomes.rows] = _bootstrap(outcomes, generator, draws)
    p_best = np.full(len(own), np.nan)
    p_best[known] = _p_best(accuracies[known], errors[:, known], stderr[np.ix_(known, known)])
    all_paired = outcomes is not None and len(outcomes.rows) == len(own)
    return Comparison("paired" if all_paired else "unpaired" if len(known) else "unknown", stderr, p_best)


def _bootstrap(outcomes: Outcomes, generator: np.random.Generator, draws: int) -> np.ndarray:
    """Errors [draws, columns] of acc_mean: items drawn with replacement within each task, the same for all columns."""
    errors = np.zeros((draws, len(outcomes.rows)))
    for scores in outcomes.scores.values():
        n = len(scores)
        centred = (scores - scores.mean(axis=0)).astype(np.float32)
        size = max(1, _CHUNK // n)
        for start in range(0, draws, size):
            count = min(size, draws - start)
            drawn = generator.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n).astype(np.float32)
            # A bootstrap variance is (n - 1) / n of the unbiased one
            errors[start : start + count] += counts @ centred / n * math.sqrt(n / (n - 1))
    return errors / len(outcomes.scores)


def _p_best(accuracies: np.ndarray, errors: np.ndarray, stderr: np.ndarray) -> np.ndarray:
    draws = len(errors)
    values = np.empty(len(accuracies))
    for k in range(len(accuracies)):
        gaps = accuracies - accuracies[k]
        apart = stderr[:, k] > 0
        if (gaps[~apart] > _ROUNDING).any():
            values[k] = 1 / (1 + draws)
            continue
        scale = 1 / stderr[apart, k]
        observed = (gaps[apart] * scale).max(initial=0.0)
        drawn = ((errors[:, apart] - errors[:, [k]]) * scale).max(axis=1, initial=0.0)
        values[k] = (1 + np.count_nonzero(drawn >= observed - _TIE)) / (1 + draws)
    return values


def cross_fit(
    outcomes: Outcomes,
    names: list[str],
    pick: Callable[[np.ndarray], int],
    generator: np.random.Generator,
    folds: int = FOLDS,
    repeats: int = REPEATS,
) -> CrossFit | None:
    """What `pick` (accuracies [columns] -> column) chooses on all folds but one, scored on that one; None if a task has one item.

    Each repeat deals every task's items into `folds` parts anew; its score is the mean over tasks of the mean over items, each
    item scored by the configuration chosen without it, and `corrected` is the mean over repeats. Since fewer items choose,
    it is the accuracy to expect of the rule, a little below that of the configuration it chooses on all.

    `stderr` is of a bootstrap over items within tasks with all copies of an item in one fold: apart they would bring the bias
    back. The plain item variance of the scores leaves out that other items would have led to other choices: two of its standard
    errors cover 90 to 92% in simulated grids of 45 equal or close configurations. The bootstrap's cover 98 to 99%.
    """
    tasks = list(outcomes.scores.values())
    if min(map(len, tasks)) < 2:
        return None
    members = [_deal(len(scores), folds, repeats, generator) for scores in tasks]
    corrected, chosen = _held_out(tasks, members, [np.ones(len(scores)) for scores in tasks], pick)
    tasks = [scores.astype(np.float32) for scores in tasks]
    members = [member[: folds * _BOOTSTRAP_REPEATS].astype(np.float32) for member in members]
    again = []
    for _ in range(_BOOTSTRAP_DRAWS):
        weights = [
            np.bincount(generator.integers(0, len(s), len(s)), minlength=len(s)).astype(np.float32) for s in tasks
        ]
        again.append(_held_out(tasks, members, weights, pick)[0])
    columns, counts = np.unique(chosen, return_counts=True)
    by_share = sorted(zip(columns, counts, strict=True), key=lambda pair: (-pair[1], pair[0]))
    full = outcomes.accuracies
    return CrossFit(
        naive=float(full[pick(full)]),
        corrected=corrected,
        stderr=float(np.std(again, ddof=1)),
        folds=folds,
        repeats=repeats,
        chosen={names[column]: float(count / len(chosen)) for column, count in by_share},
    )


def _deal(n: int, folds: int, repeats: int, generator: np.random.Generator) -> np.ndarray:
    """Which of n items are in which fold, 0 or 1 [repeats * folds, n]; the folds of a repeat differ by one item at most."""
    fold = generator.permuted(np.tile(np.arange(n) % folds, (repeats, 1)), axis=1)
    return (fold[:, None, :] == np.arange(folds)[:, None]).reshape(-1, n).astype(np.float64)


def _held_out(
    tasks: list[np.ndarray], members: list[np.ndarray], weights: list[np.ndarray], pick: Callable[[np.ndarray], int]
) -> tuple[float, np.ndarray]:
    """The score of every item under what is chosen without its fold, averaged over items, tasks and repeats; the choices.

    Per task: scores [n, columns], folds [splits, n], and how often each item counts [n].
    """
    held_sums, train = [], np.zeros((len(members[0]), tasks[0].shape[1]))
    for scores, member, weight in zip(tasks, members, weights, strict=True):
        weighted = member * weight
        held = weighted @ scores
        held_sums.append(held)
        left = weight.sum() - weighted.sum(axis=1)  # 0 where a draw has copies of few items only: no say in the choice
        train += (weight @ scores - held) / np.maximum(left, 1)[:, None] / len(tasks)
    chosen = np.array([pick(accuracies) for accuracies in train])
    splits = np.arange(len(chosen))
    repeats = members[0].sum() / tasks[0].shape[0]  # every item is in one fold of each
    scored = [float(held[splits, chosen].sum() / weight.sum()) for held, weight in zip(held_sums, weights, strict=True)]
    return float(np.mean(scored) / repeats), chosen
