"""Standard errors of accuracies of exactly 0 or 1 in tables of trials (`measures.wilson_errors`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.rows import TASK_ITEMS
from tune_prune.analysis.input.study import Model
from tune_prune.core.measures import is_certain, wilson_errors

_ROUNDED = 0.02  # what four digits of a standard error leave open of the number of items, at most


def with_wilson_errors(model: Model, sizes: Mapping[str, float]) -> Model:
    """The same with `wilson_errors` in its rows and its baseline. Every other standard error stays as it is. `sizes`:
    `certain_sizes`."""
    baseline = {**model.baseline, **wilson_errors(model.baseline, sizes)}
    return replace(model, rows=rows_with_wilson_errors(model.rows, sizes), baseline=baseline)


def certain_sizes(model: Model) -> Mapping[str, float]:
    """How many items each task has of which a complete trial, or the dense model, has an accuracy of 0 or 1 without an error.

    The number of a task's items is that of the trials' or, where these were not kept, what the standard errors of other accuracies
    of that task tell; a task of which it is not known is left out. UserError for items that cannot be read.
    """
    complete = model.rows[model.rows["success"]]
    rows = [*complete.filter(regex="^acc_").to_dict("records"), model.baseline]
    return sizes_of(complete, [task for task in model.tasks if any(is_certain(row, task) for row in rows)])


def rows_with_wilson_errors(rows: pd.DataFrame, sizes: Mapping[str, float]) -> pd.DataFrame:
    """Rows of trials, or of configurations, with `wilson_errors` where they are complete. `sizes`: `certain_sizes`."""
    complete = rows.loc[rows["success"] if sizes else [], :].filter(regex="^acc_")
    found = {i: wilson_errors(row, sizes) for i, row in zip(complete.index, complete.to_dict("records"), strict=True)}
    changed = pd.DataFrame.from_dict({i: errors for i, errors in found.items() if errors}, orient="index")
    rows = rows.copy()
    rows.update(changed)
    return rows


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
