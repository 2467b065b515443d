"""What item outcomes say of the ranking: which configurations are statistically tied with the best.

K configurations, T tasks of n_t items; acc_mean is the mean over tasks of the mean over items. Items are a random sample of
what a task asks for, tasks and configurations are fixed. Configurations on the same items share its luck, so differences
are taken item by item. All of it is computed on arrays, whatever files they came from.

Where a configuration has no items, or other ones, its error is an independent normal one of its own standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from tune_prune.analysis.statistics.differences import Items
from tune_prune.analysis.statistics.message import Message
from tune_prune.core.errors import UserError
from tune_prune.core.store import LEDGER

DRAWS = 4000  # of the bootstrap
_CHUNK = 2_000_000  # item draws held in memory at a time
_ROUNDING = 1e-12  # of a variance: what is left of one that is 0
_TIE = 1e-5  # standard errors: statistics of few items take few values, which single precision splits


@dataclass(frozen=True)
class PairedScores:
    """Scores of configurations on the same items."""

    by_task: dict[str, np.ndarray]  # [n_t, columns]
    rows: np.ndarray  # the position of each column's row

    @property
    def accuracies(self) -> np.ndarray:
        """acc_mean of each column."""
        return np.mean([scores.mean(axis=0) for scores in self.by_task.values()], axis=0)

    def covariance(self) -> np.ndarray:
        """Of the acc_mean of the columns: sum_t cov_t / n_t / T^2 with the n_t - 1 covariance; NaN for a task of one item."""
        total = np.zeros((len(self.rows), len(self.rows)))
        for scores in self.by_task.values():
            n, sums = len(scores), scores.sum(axis=0)
            if n < 2:
                return np.full_like(total, np.nan)
            total += (scores.T @ scores - np.outer(sums, sums) / n) / (n - 1) / n
        return total / len(self.by_task) ** 2


def paired_scores(eligible: pd.DataFrame, items: Items) -> tuple[PairedScores | None, Message | None]:
    """The items of the rows, and a message if not every row has the same ones.

    Of several sets of items the one of most rows counts, of equally many that of the first row (`eligible`: best first).
    None if fewer than two rows share their items. UserError naming the trial if its items contradict its acc_mean.
    """
    series = {row: scores for row, name in enumerate(eligible["output_dir"]) if (scores := items(name)) is not None}
    groups: list[list[int]] = []  # the rows of each set of items
    for row, scores in series.items():
        same = next((rows for rows in groups if series[rows[0]].index.equals(scores.index)), None)
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
    for (_, row), measured in zip(eligible.iloc[rows].iterrows(), paired.accuracies, strict=True):
        if not abs(measured - row["acc_mean"]) < 1e-6:
            raise UserError(_contradiction(row, measured))
    left_out = eligible["name"].drop(eligible.index[rows]).tolist()
    return paired, Message("partly_unpaired", {"names": left_out}) if left_out else None


def _contradiction(row: pd.Series, measured: float) -> str:
    """What to do where a trial's items do not have the accuracy of its row: either may be wrong, and a trial makes both."""
    trial = Path(row["output_dir"])
    record = trial.parent.parent / LEDGER / f"{trial.name}.json"
    both = f"delete {record} to have that trial run again, or restore both from a copy"
    alone = "restore its items.parquet from a copy, or move it away"
    return (
        f"the items of trial {trial} have acc_mean {measured:.6f}, but its record says {row['acc_mean']:.6f}; "
        f"{both if record.is_file() else alone}"
    )


@dataclass(frozen=True)
class Comparison:
    """Every configuration against the others; arrays are in the order of the rows, accuracies fractions."""

    basis: str  # "paired" (all on the same items), "unpaired", "unknown" (no standard errors)
    stderr: np.ndarray  # [K, K] of the difference of two acc_mean; NaN where unknown
    p_value: np.ndarray  # [K] see `compare`; NaN where unknown
    covariance: np.ndarray  # [K, K] of the acc_mean; NaN where unknown
    errors: np.ndarray  # [draws, K] of the acc_mean: what other items would add

    @property
    def in_confidence_set(self) -> np.ndarray:
        """Which are statistically tied with the best, at 95% for all together; one of unknown error always is."""
        return ~(self.p_value <= 0.05)


def compare(
    accuracies: np.ndarray,
    stderrs: np.ndarray,
    outcomes: PairedScores | None,
    generator: np.random.Generator,
    draws: int = DRAWS,
) -> Comparison:
    """Tests for each configuration k that none is better, by the largest studentised difference max_j (acc_j - acc_k) / se_jk.

    p_value[k] is the chance of one at least as large if all were equal, over bootstrap draws of the items within tasks (paired)
    or of normal errors, (1 + draws that reach it) / (1 + draws). Those above 0.05 are a confidence set that contains the truly
    best with 95%, however many configurations there are: comparisons with the best (Hsu, Annals of Statistics 1984) in the
    studentised-maximum form of Mogstad, Romano, Shaikh and Wilhelm (Review of Economic Studies 2024). Where se_jk is 0 two
    configurations of the same accuracy are equal and others differ. `accuracies`, `stderrs`: [K]; a NaN is unknown.

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
    finite = np.flatnonzero(np.isfinite(own))
    errors = generator.standard_normal((draws, len(own))) * np.sqrt(own)
    if outcomes is not None:
        errors[:, outcomes.rows] = _bootstrap(outcomes, generator, draws)
    p_value = np.full(len(own), np.nan)
    p_value[finite] = _p_values(accuracies[finite], errors[:, finite], stderr[np.ix_(finite, finite)])
    all_paired = outcomes is not None and len(outcomes.rows) == len(own)
    basis = "paired" if all_paired else "unpaired" if len(finite) else "unknown"
    return Comparison(basis, stderr, p_value, covariance, errors)


def _bootstrap(outcomes: PairedScores, generator: np.random.Generator, draws: int) -> np.ndarray:
    """Errors [draws, columns] of acc_mean: items drawn with replacement within each task, the same for all columns."""
    errors = np.zeros((draws, len(outcomes.rows)))
    for scores in outcomes.by_task.values():
        n = len(scores)
        centred = (scores - scores.mean(axis=0)).astype(np.float32)
        size = max(1, _CHUNK // n)
        for start in range(0, draws, size):
            count = min(size, draws - start)
            drawn = generator.integers(0, n, size=(count, n)) + n * np.arange(count)[:, None]
            counts = np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n).astype(np.float32)
            # A bootstrap variance is (n - 1) / n of the unbiased one
            errors[start : start + count] += counts @ centred / n * math.sqrt(n / (n - 1))
    return errors / len(outcomes.by_task)


def _p_values(accuracies: np.ndarray, errors: np.ndarray, stderr: np.ndarray) -> np.ndarray:
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
