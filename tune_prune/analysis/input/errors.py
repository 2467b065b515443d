"""Standard errors of accuracies of exactly 0 or 1, of which sqrt(p (1 - p) / (n - 1)) says that they are certain.

Of n items that were all answered right, or all wrong, Wilson's 95% interval (1927) is z^2 / (n + z^2) wide. Half of that over z,
z / (2 (n + z^2)), is the standard error that has an interval of this width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.rows import TASK_ITEMS
from tune_prune.analysis.input.study import Model, tasks_of

_Z = 1.959964  # of the normal distribution, for 95%
_ROUNDED = 0.02  # what four digits of a standard error leave open of the number of items, at most


def wilson_interval(accuracy: float, items: float) -> tuple[float, float]:
    """Wilson's 95% interval of an accuracy of 0 or 1 over so many items."""
    width = _Z * _Z / (items + _Z * _Z)
    return (0.0, width) if accuracy == 0 else (1 - width, 1.0)


def wilson_stderr(items: float) -> float:
    """The standard error of an accuracy of 0 or 1 over so many items."""
    return _Z / (2 * (items + _Z * _Z))


def with_wilson_errors(model: Model) -> Model:
    """The same, where a task's accuracy of 0 or 1 has a standard error of 0 with that of Wilson's interval instead, and with
    what it adds to that of acc_mean: of k tasks its square over k^2. Every other standard error stays as it is.

    The number of a task's items is that of the trials' or, where these were not kept, what the standard errors of other accuracies
    of that task tell; where it is not known nothing is changed. UserError for items that cannot be read.
    """
    complete, dense = model.rows[model.rows["success"]], pd.DataFrame([dict(model.baseline)])
    certain = [task for task in model.tasks if any(_certain(rows, task).any() for rows in (complete, dense))]
    if not (sizes := sizes_of(complete, certain)):
        return model
    rows, changed = model.rows.copy(), _changed(complete, sizes)
    rows.loc[complete.index, changed.columns] = changed
    return replace(model, rows=rows, baseline={**model.baseline, **_changed(dense, sizes).iloc[0].to_dict()})


def _certain(rows: pd.DataFrame, task: str) -> pd.Series:
    """Which rows have an accuracy of 0 or 1 with a standard error of 0."""
    if f"acc_{task}_stderr" not in rows:
        return pd.Series(False, rows.index)
    return rows[f"acc_{task}"].isin([0, 1]) & (rows[f"acc_{task}_stderr"] == 0)


def _changed(rows: pd.DataFrame, sizes: Mapping[str, float]) -> pd.DataFrame:
    """The columns of standard errors that change."""
    errors, added = {}, pd.Series(0.0, rows.index)
    for task, items in sizes.items():
        if (certain := _certain(rows, task)).any():
            errors[f"acc_{task}_stderr"] = rows[f"acc_{task}_stderr"].mask(certain, wilson_stderr(items))
            added += certain * wilson_stderr(items) ** 2
    if errors and "acc_mean_stderr" in rows:
        accuracies = rows[[f"acc_{task}" for task in tasks_of(rows)]]
        old, count = rows["acc_mean_stderr"], accuracies.notna().sum(axis="columns")
        errors["acc_mean_stderr"] = old.mask(added > 0, np.sqrt(old**2 + added / count**2))
    return pd.DataFrame(errors, rows.index)


def sizes_of(complete: pd.DataFrame, tasks: Sequence[str]) -> Mapping[str, float]:
    """How many items each of `tasks` has, as far as that is known: by the items of a trial or, where these were not kept, by what
    the standard errors say: the published number, where it is as near as errors of four digits tell."""
    if not tasks:
        return {}
    for folder in complete["output_dir"]:
        if (items := read_items(folder)) is not None:
            counts = items.groupby(level="task").size()
            return {task: int(counts[task]) for task in tasks if task in counts}
    sizes = {}
    for task in tasks:
        if f"acc_{task}_stderr" not in complete:
            continue
        accuracy, error = complete[f"acc_{task}"], complete[f"acc_{task}_stderr"]
        known = accuracy.between(0, 1, inclusive="neither") & (error > 0)
        implied = (accuracy * (1 - accuracy) / error**2)[known].median() + 1
        if math.isfinite(implied):
            published = TASK_ITEMS.get(task, math.nan)
            sizes[task] = published if abs(implied / published - 1) < _ROUNDED else round(implied)
    return sizes
