"""The items of trials: their outcomes, log-probabilities of right choices, KL by block, and what guessing would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

from tune_prune.analysis.input.study import Model
from tune_prune.core.config import TASK_ITEMS, ZERO_SHOT_TASKS
from tune_prune.core.errors import UserError
from tune_prune.core.files import number, parse_json
from tune_prune.core.ledger import trial_file
from tune_prune.core.measures import chance, is_certain, wilson_errors
from tune_prune.core.store import ITEMS, KL, LEDGER, TRIALS, location, open_store

GOLD, TEXTS = "gold_logprob_mean", ("kl_text", "kl_tasks")

_TWO_CHOICES = ("boolq", "piqa", "winogrande")  # of the seven tasks; the others have four
# Tasks whose items all have the same choices, so that always giving the more frequent answer needs no model: its part of the
# evaluation split, where the items do not tell. In other tasks the place of the right choice is random.
_MAJORITY = {"boolq": 2033 / 3270}
_ROUNDED = 0.02  # what four digits of a standard error leave open of the number of items, at most


class ItemReader:
    """`read_items` that remembers what it has read. Trials whose items stand in the same order, as those of a search do, share
    one index: most of the time and memory that they take."""

    def __init__(self) -> None:
        self._scores: dict[str, pd.Series | None] = {}  # by folder
        self._rows: pyarrow.Table | None = None  # task and doc_id, as the last file has them
        self._layout: tuple[np.ndarray, pd.MultiIndex] | None = None  # of these rows
        self._indexes: list[pd.MultiIndex] = []  # of different items

    def __call__(self, output_dir: str) -> pd.Series | None:
        if output_dir not in self._scores:
            table = columns_of(output_dir, ["task", "doc_id", "score"])
            self._scores[output_dir] = None if table is None else self._read(table)
        return self._scores[output_dir]

    def _read(self, table: pyarrow.Table) -> pd.Series:
        rows = table.select(["task", "doc_id"])
        if self._layout is None or not rows.equals(self._rows):
            order, index = _layout(rows)
            self._indexes.append(next((known for known in self._indexes if known.equals(index)), index))
            self._rows, self._layout = rows, (order, self._indexes[-1])
        order, index = self._layout
        scores = table["score"].to_numpy()[order]
        return pd.Series(scores.astype(np.int8 if np.isin(scores, (0, 1)).all() else np.float64), index, name="score")


def _layout(table: pyarrow.Table) -> tuple[np.ndarray, pd.MultiIndex]:
    """Return the positions of the rows by (task, doc_id), and that index."""
    rows = table.select(["task", "doc_id"]).to_pandas()
    ordered = pd.Series(np.arange(len(rows)), pd.MultiIndex.from_frame(rows)).sort_index()
    return ordered.to_numpy(), ordered.index


def read_items(output_dir: str) -> pd.Series | None:
    """Return the score of every zero-shot item of a trial (int8 where all are 0 or 1), indexed by (task, doc_id), in order; None
    if none were kept."""
    return ItemReader()(output_dir)


def check_items(folder: str, recorded: float, measured: float) -> None:
    """Raise UserError where a trial's items do not have the accuracy of its row: either may be wrong, and a trial makes both."""
    if abs(measured - recorded) < 1e-6:
        return
    trial = Path(folder)
    record = trial.parent.parent / LEDGER / f"{trial.name}.json"
    both = f"delete {record} to have that trial run again, or restore both from a copy"
    alone = "restore its items.parquet from a copy, or move it away"
    raise UserError(
        f"the answers of trial {trial} in items.parquet have acc_mean {measured:.6f}, but its record says {recorded:.6f}; "
        f"{both if record.is_file() else alone}"
    )


def guessing(
    tasks: list[str], output_dir: str, source: Mapping[str, Any] | None, sizes: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Return what picking answers without a model gives on the items of the trial in `output_dir`.

    Index: the tasks, then "mean" over them; columns: chance (`measures.chance`), majority (part of the more
    frequent answer, where all items have the same choices), items, threshold (the larger of both plus two standard errors of an
    accuracy that is truly that: one below it may come from guessing). Without the trial's items, what holds of the seven tasks, of
    as many items as `source` (a `ModelRun` as a dict) allows or, of a results file, has (`sizes`). NaN what is not known.
    """
    read = columns_of(output_dir, ["task", "gold", "loglikelihoods"])
    by_task = {} if read is None else dict(list(read.to_pandas().groupby("task")))
    limit = ((source or {}).get("protocol") or {}).get("limit") or math.inf
    usual = {task: min(TASK_ITEMS.get(task, math.nan), limit) for task in tasks}
    counts = pd.Series(usual if sizes is None else sizes, tasks, dtype="float64")
    rows: dict[str, tuple[float, float, float]] = {}
    for task in tasks:
        rows[task] = (math.nan, math.nan, math.nan)
        if (items := by_task.get(task)) is not None:
            majority = float(items["gold"].value_counts(normalize=True).max()) if task in _MAJORITY else math.nan
            blind = float(np.mean([*map(chance, items["loglikelihoods"].map(len), items["gold"])]))
            rows[task] = (blind, majority, len(items))
        elif task in ZERO_SHOT_TASKS:
            rows[task] = (1 / 2 if task in _TWO_CHOICES else 1 / 4, _MAJORITY.get(task, math.nan), math.nan)
    columns = ["chance", "majority", "items"]
    table = pd.DataFrame.from_dict(rows, "index", "float64", columns).rename_axis("task")
    if sizes is not None:
        table["items"] = table["items"].fillna(counts)
    level = table[["chance", "majority"]].max(axis="columns")
    variance = level * (1 - level) / table["items"].fillna(counts)
    table["threshold"] = level + 2 * np.sqrt(variance)
    mean = math.sqrt(variance.sum(skipna=False)) / len(tasks) if tasks else math.nan
    table.loc["mean"] = {
        "chance": table["chance"].mean(skipna=False),
        "majority": level.mean(skipna=False) if table["majority"].notna().any() else math.nan,
        "items": table["items"].sum(skipna=False),
        "threshold": level.mean(skipna=False) + 2 * mean,
    }
    return table


def columns_of(output_dir: str, columns: list[str]) -> pyarrow.Table | None:
    """Return columns of a trial's items.parquet; None if there is none. Raises UserError for a file that cannot be read."""
    path = location(output_dir) / ITEMS
    content = trial_file(path.parent, ITEMS) if output_dir else None
    if content is None:
        return None
    try:
        # A third of the time that pandas takes.
        with pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)) as file:
            return file.read(columns, use_threads=False).select(columns)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); restore it from a copy, or move it away to compare that trial by its standard error"
        ) from error


def gold_logprobs(output_dir: str) -> pd.Series | None:
    """Return the log-probability of the right choice (nats, summed over its tokens) of every item of a trial that has a single
    one, indexed by (task, doc_id), in order; None if no items were kept."""
    table = columns_of(output_dir, ["task", "doc_id", "gold", "loglikelihoods"])
    if table is None:
        return None
    order, index = _layout(table)
    gold, choices = table["gold"].to_numpy(), table["loglikelihoods"].combine_chunks()
    values = choices.flatten().to_numpy()[choices.offsets.to_numpy()[:-1] + np.maximum(gold, 0)]
    known = gold[order] >= 0
    return pd.Series(values[order], index, name=GOLD)[known]


def kl_blocks(output_dir: str) -> dict[str, pd.Series]:
    """Return by `kl_text` and `kl_tasks` the KL (nats per token) of every block of a trial, indexed by (block, tokens); empty if
    none were kept. Raises UserError for a file that cannot be read."""
    path = location(output_dir) / KL
    content = trial_file(path.parent, KL) if output_dir else None
    if content is None:
        return {}
    try:
        series = {}
        for name, blocks in parse_json(path, content).items():
            index = pd.MultiIndex.from_arrays([range(len(blocks["tokens"])), [int(n) for n in blocks["tokens"]]])
            series[f"kl_{name}"] = pd.Series([float(number(value)) for value in blocks["nats"]], index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it from a copy, or move it away") from error
    return series


def dense_folder(model: Model) -> str:
    """Return the folder with the items of the dense model; "" where there is none."""
    for origin in model.origins if model.measured else ():
        folder = origin / TRIALS / str(model.measured)
        if open_store(folder).has(ITEMS):
            return folder.as_posix()
    return ""


def with_wilson_errors(model: Model, sizes: Mapping[str, float]) -> Model:
    """Return the model with `wilson_errors` in its rows and its baseline. Every other standard error stays as it is. `sizes`:
    `certain_sizes`."""
    baseline = {**model.baseline, **wilson_errors(model.baseline, sizes)}
    return replace(model, rows=rows_with_wilson_errors(model.rows, sizes), baseline=baseline)


def certain_sizes(model: Model) -> Mapping[str, float]:
    """Return how many items each task has (`sizes_of`) of which a complete trial, or the dense model, has an accuracy of 0 or 1
    without an error."""
    complete = model.rows[model.rows["success"]]
    rows = [*complete.filter(regex="^acc_").to_dict("records"), model.baseline]
    return sizes_of(complete, [task for task in model.tasks if any(is_certain(row, task) for row in rows)])


def rows_with_wilson_errors(rows: pd.DataFrame, sizes: Mapping[str, float]) -> pd.DataFrame:
    """Return rows of trials, or of configurations, with `wilson_errors` where they are complete. `sizes`: `certain_sizes`."""
    complete = rows.loc[rows["success"] if sizes else [], :].filter(regex="^acc_").to_dict("index")
    errors = {index: wilson_errors(row, sizes) for index, row in complete.items()}
    rows = rows.copy()
    rows.update(pd.DataFrame.from_dict({index: row for index, row in errors.items() if row}, orient="index"))
    return rows


def sizes_of(complete: pd.DataFrame, tasks: Sequence[str]) -> Mapping[str, float]:
    """Return how many items each of `tasks` has, as far as that is known: by the items of a trial or, where these were not kept,
    by what the standard errors say: the published number, where it is as near as errors of four digits tell. Raises UserError for
    items that cannot be read."""
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
