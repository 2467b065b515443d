"""The zero-shot items of a trial: their outcomes, and what guessing their answers would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

from tune_prune.analysis.input.rows import TASK_ITEMS
from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import trial_file
from tune_prune.core.measures import chance
from tune_prune.core.store import ITEMS, LEDGER, location

_TWO_CHOICES = ("boolq", "piqa", "winogrande")  # of the seven tasks; the others have four
# Tasks whose items all have the same choices, so that always giving the more frequent answer needs no model: its part of the
# evaluation split, where the items do not tell. In other tasks the place of the right choice is random.
_MAJORITY = {"boolq": 2033 / 3270}


_LAYOUTS = 4  # orders of the same items that are remembered: a search writes one


class Layouts:
    """The order of a file's items. Trials on the same items share one index: most of the time and memory that they take."""

    def __init__(self) -> None:
        self._layouts: list[tuple[pyarrow.Table, np.ndarray, pd.MultiIndex]] = []  # rows of a file, their order, sorted
        self._indexes: list[pd.MultiIndex] = []  # of different items

    def __call__(self, table: pyarrow.Table) -> tuple[np.ndarray, pd.MultiIndex]:
        """The positions of the rows by (task, doc_id), and that index."""
        rows = table.select(["task", "doc_id"])
        for known, order, index in self._layouts:
            if known.equals(rows):
                return order, index
        ordered = pd.Series(np.arange(len(rows)), pd.MultiIndex.from_frame(rows.to_pandas())).sort_index()
        index = next((known for known in self._indexes if known.equals(ordered.index)), ordered.index)
        if index is ordered.index:
            self._indexes.append(index)
        self._layouts = [*self._layouts[1 - _LAYOUTS :], (rows, ordered.to_numpy(), index)]
        return ordered.to_numpy(), index


class ItemReader:
    """`read_items` that remembers."""

    def __init__(self) -> None:
        self._read: dict[str, pd.Series | None] = {}  # by folder
        self._layout = Layouts()

    def __call__(self, output_dir: str) -> pd.Series | None:
        if output_dir not in self._read:
            table = columns_of(output_dir, ["task", "doc_id", "score"])
            self._read[output_dir] = None if table is None else self._scores(table)
        return self._read[output_dir]

    def _scores(self, table: pyarrow.Table) -> pd.Series:
        order, index = self._layout(table)
        scores = table["score"].to_numpy()[order]
        kind = np.int8 if np.isin(scores, (0, 1)).all() else np.float64
        return pd.Series(scores.astype(kind), index, name="score")


def read_items(output_dir: str) -> pd.Series | None:
    """The score of every zero-shot item of a trial (int8 where all are 0 or 1), indexed by (task, doc_id), in order; None if none
    were kept."""
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
    """What picking answers without a model gives on the items of the trial in `output_dir`.

    Index: the tasks, then "mean" over them; columns: chance (`measures.chance`), majority (part of the more
    frequent answer, where all items have the same choices), items, threshold (the larger of both plus two standard errors of an
    accuracy that is truly that: one below it may come from guessing). Without the trial's items, what holds of the seven tasks, of
    as many items as `source` (a `ModelRun` as a dict) allows or, of a results file, has (`sizes`). NaN what is not known.
    """
    columns = ["chance", "majority", "items"]
    table = pd.DataFrame(index=pd.Index(tasks, name="task"), columns=columns, dtype="float64")
    read = columns_of(output_dir, ["task", "gold", "loglikelihoods"])
    items = None if read is None else read.to_pandas()
    limit = ((source or {}).get("protocol") or {}).get("limit") or math.inf
    usual = {task: min(TASK_ITEMS.get(task, math.nan), limit) for task in tasks}
    counts = pd.Series(usual if sizes is None else sizes, tasks, dtype="float64")
    for task in tasks:
        if items is not None and len(of_task := items[items["task"] == task]):
            answers = of_task["gold"].value_counts(normalize=True)
            majority = answers.max() if task in _MAJORITY else math.nan
            blind = np.mean([*map(chance, of_task["loglikelihoods"].map(len), of_task["gold"])])
            table.loc[task] = [blind, majority, len(of_task)]
        elif task in ZERO_SHOT_TASKS:
            table.loc[task] = [1 / 2 if task in _TWO_CHOICES else 1 / 4, _MAJORITY.get(task, math.nan), math.nan]
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


def columns_of(output_dir: str, columns: list[str], optional: Sequence[str] = ()) -> pyarrow.Table | None:
    """Columns of a trial's items.parquet, and the `optional` ones that it has; None if there is none. Raises UserError for a file
    that cannot be read."""
    path = location(output_dir) / ITEMS
    content = trial_file(path.parent, ITEMS) if output_dir else None
    if content is None:
        return None
    try:
        # A third of the time that pandas takes.
        with pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)) as file:
            wanted = [*columns, *(name for name in optional if name in file.schema_arrow.names)]
            return file.read(wanted, use_threads=False).select(wanted)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); restore it from a copy, or move it away to compare that trial by its standard error"
        ) from error
