"""How far apart two trials are: item by item where both answered the same items, else by their standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import config_of
from tune_prune.core.errors import UserError
from tune_prune.core.store import ITEMS

Items = Callable[[str], "pd.Series | None"]  # `read_items`, or one that remembers


def read_items(output_dir: str) -> pd.Series | None:
    """The score of every zero-shot item of a trial, indexed by (task, doc_id); None if none were kept."""
    path = Path(output_dir) / ITEMS
    if not output_dir or not path.is_file():
        return None
    try:
        items = pd.read_parquet(path, columns=["task", "doc_id", "score"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); delete it to compare that trial without its items"
        ) from error
    return items.set_index(["task", "doc_id"])["score"].astype("float64").sort_index()


def paired_difference(first: pd.Series, second: pd.Series) -> tuple[float, float] | None:
    """Difference in acc_mean of two trials on the same items and its standard error; None if the items differ.

    With d_i the difference of item i's scores and n_t the items of task t, of T tasks: mean_t mean_i d_i, and
    sqrt(sum_t var(d) / n_t) / T with the n_t - 1 variance, tasks being independent samples. NaN for a task of one item.
    """
    if not first.index.equals(second.index):
        return None
    by_task = (first - second).groupby(level="task")
    variances = by_task.var(ddof=1) / by_task.count()
    return float(by_task.mean().mean()), math.sqrt(variances.sum(skipna=False)) / len(variances)


@dataclass(frozen=True)
class Difference:
    """acc_mean of one trial minus that of another, in percentage points."""

    points: float
    stderr_points: float
    basis: str  # "paired": same items; "unpaired": each trial's own standard error; "unknown": there is none


def difference(first: Mapping[str, Any], second: Mapping[str, Any], items: Items = read_items) -> Difference:
    """How far the trial of row `first` is above that of row `second`, which must be of the same model."""
    folder = first["output_dir"]
    # The same trial. Not by its folder alone: a foreign file may name one folder for all.
    if folder and folder == second["output_dir"] and config_of(first) == config_of(second):
        return Difference(0.0, 0.0, "paired")
    first_items, second_items = items(first["output_dir"]), items(second["output_dir"])
    if first_items is not None and second_items is not None:
        paired = paired_difference(first_items, second_items)
        if paired is not None and math.isfinite(paired[1]):
            return Difference(100 * paired[0], 100 * paired[1], "paired")
    stderr = math.hypot(first["acc_mean_stderr"], second["acc_mean_stderr"])
    basis = "unpaired" if math.isfinite(stderr) else "unknown"
    return Difference(100 * (first["acc_mean"] - second["acc_mean"]), 100 * stderr, basis)
