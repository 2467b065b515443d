"""The items of trials: their outcomes, log-probabilities of right choices, KL by block, and what guessing would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Return what picking answers without a model gives on the items of the trial in `output_dir`.

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


GOLD, TEXTS = "gold_logprob_mean", ("kl_text", "kl_tasks")


@dataclass(frozen=True)
class SliceMeans:
    """The scores of a trial on growing slices of the items, by number of the slice; the last has them all."""

    items: np.ndarray  # [slices] how many
    accuracy: np.ndarray  # [slices] mean over the tasks that have items
    gold_logprob: np.ndarray  # [slices] likewise, of items with a single right choice


class GoldReader:
    """`gold_logprobs` that shares indexes, and remembers the means on slices of each trial that it has read."""

    def __init__(self) -> None:
        self._layout = Layouts()
        self._slices: dict[str, SliceMeans | None] = {}  # by folder

    def __call__(self, output_dir: str) -> pd.Series | None:
        table = columns_of(output_dir, ["task", "doc_id", "gold", "loglikelihoods"], ["slice", "score"])
        if table is None:
            self._slices[output_dir] = None
            return None
        order, index = self._layout(table)
        gold, choices = table["gold"].to_numpy(), table["loglikelihoods"].combine_chunks()
        values = choices.flatten().to_numpy()[choices.offsets.to_numpy()[:-1] + np.maximum(gold, 0)]
        self._slices[output_dir] = _slice_means(table, values, gold >= 0)
        known = gold[order] >= 0
        return pd.Series(values[order], index, name=GOLD) if known.all() else pd.Series(values[order], index)[known]

    def slices(self, output_dir: str) -> SliceMeans | None:
        """None where no items were kept, or not of which slice they are."""
        if output_dir not in self._slices:
            self(output_dir)
        return self._slices[output_dir]


def _slice_means(table: pyarrow.Table, golds: np.ndarray, known: np.ndarray) -> SliceMeans | None:
    if not {"slice", "score"} <= set(table.column_names):
        return None
    slices, scores = (
        table[name].to_numpy().astype(np.int64 if name == "slice" else np.float64) for name in ("slice", "score")
    )
    tasks = table["task"].combine_chunks().dictionary_encode().indices.to_numpy()
    count, places = int(slices.max()) + 1, tasks * (int(slices.max()) + 1) + slices

    def grown(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """[tasks, slices] of the items up to each slice."""
        added = np.bincount(places[rows], weights[rows], minlength=(int(tasks.max()) + 1) * count)
        return added.reshape(-1, count).cumsum(axis=1)

    def means(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        sums, counts = grown(values, rows), grown(np.ones(len(values)), rows)
        seen = (counts > 0).sum(axis=0)
        totals = (sums / np.maximum(counts, 1)).sum(axis=0)
        return np.where(seen > 0, totals / np.maximum(seen, 1), math.nan)

    whole = np.ones(len(table), dtype=bool)
    return SliceMeans(grown(np.ones(len(table)), whole).sum(axis=0), means(scores, whole), means(golds, known))


def gold_logprobs(output_dir: str) -> pd.Series | None:
    """The log-probability of the right choice (nats, summed over its tokens) of every item of a trial that has a single one,
    indexed by (task, doc_id), in order; None if no items were kept."""
    return GoldReader()(output_dir)


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


def with_gold_logprobs(model: Model) -> Model:
    """Return the model with `gold_logprob_*` from the items of trials, and of the dense model, whose records are older than
    them."""
    rows = model.rows
    recorded = rows[GOLD] if GOLD in rows else pd.Series(math.nan, rows.index)
    missing = {i: _summary(rows.loc[i, "output_dir"]) for i in rows.index[rows["success"] & recorded.isna()]}
    filled = pd.DataFrame.from_dict({i: values for i, values in missing.items() if values}, orient="index")
    if len(filled):
        rows = rows.reindex(columns=[*rows, *sorted(set(filled) - set(rows))])
        rows.loc[filled.index, filled.columns] = filled
    dense = {} if not model.baseline or GOLD in model.baseline else _summary(dense_folder(model))
    return replace(model, rows=rows, baseline={**model.baseline, **dense})


def dense_folder(model: Model) -> str:
    """The folder with the items of the dense model; "" where there is none."""
    for origin in model.origins if model.measured else ():
        folder = origin / TRIALS / str(model.measured)
        if open_store(folder).has(ITEMS):
            return folder.as_posix()
    return ""


def _summary(output_dir: str) -> dict[str, float]:
    """The metrics that a trial's record has of these items today (evaluation/item_scores.py)."""
    items = gold_logprobs(output_dir)
    if items is None or items.empty:
        return {}
    by_task = items.groupby(level="task", sort=False)
    means, errors = by_task.mean(), by_task.sem()
    means["mean"], errors["mean"] = means.mean(), math.sqrt(np.square(errors).sum(skipna=False)) / len(errors)
    metrics = {f"gold_logprob_{task}": float(value) for task, value in means.items()}
    return metrics | {f"gold_logprob_{task}_stderr": float(value) for task, value in errors.items()}


def discrimination(output_dir: str) -> pd.DataFrame:
    """Return whether log-likelihoods tell right choices from wrong ones, by the items of one model. Index: task; columns:

    auc  with two choices: the chance that ll(second) - ll(first) is higher on an item whose second choice is right than on one
         whose first is (ties half), which no preference for one of the answers changes; with more, or one label only: the
         mean share of the other choices that the right one is above. 0.5 where nothing is told.
    p    of such an AUC or a higher one if nothing were told: one-sided, by Mann and Whitney's (1947) normal approximation with
         ties; or of ranks that are uniform, a sum of independent items of variance (c + 1) / (12 (c - 1)) with c choices

    Without items an empty table.
    """
    table = columns_of(output_dir, ["task", "gold", "loglikelihoods"])
    by_task: dict[str, dict[str, float]] = {}
    if table is not None:
        rows = table.to_pandas()
        for task, items in rows[rows["gold"] >= 0].groupby("task", sort=False):
            choices = [np.asarray(values) for values in items["loglikelihoods"]]
            by_task[str(task)] = _told(items["gold"].to_numpy(), choices)
    return pd.DataFrame.from_dict(by_task, orient="index", columns=["auc", "p"], dtype="float64").rename_axis("task")


def _told(gold: np.ndarray, choices: list[np.ndarray]) -> dict[str, float]:
    from scipy.stats import mannwhitneyu, norm

    counts = np.array([len(values) for values in choices])
    if not all(np.isfinite(values).all() for values in choices) or counts.min() < 2:
        return {"auc": math.nan, "p": math.nan}
    if counts.max() == 2 and len(set(gold)) == 2:
        margin = np.array([second - first for first, second in choices])
        test = mannwhitneyu(margin[gold == 1], margin[gold == 0], alternative="greater", method="asymptotic")
        pairs = np.count_nonzero(gold == 1) * np.count_nonzero(gold == 0)
        return {
            "auc": float(test.statistic) / pairs,
            "p": float(np.nan_to_num(test.pvalue, nan=1.0)),
        }  # nan: all margins equal
    above = np.array(
        [
            ((values < values[right]).sum() + ((values == values[right]).sum() - 1) / 2) / (len(values) - 1)
            for right, values in zip(gold, choices, strict=True)
        ]
    )
    z = (above - 0.5).sum() / math.sqrt(((counts + 1) / (12 * (counts - 1))).sum())
    return {"auc": float(above.mean()), "p": float(norm.sf(z))}


def informative_mean(row: Mapping[str, Any], tasks: list[str], together: float = 0.0) -> tuple[float, float]:
    """acc_mean and its standard error over these `tasks` only; NaN what is not known, or without tasks. `together`: what their mean
    has of variance beside that of independent tasks."""
    accuracies, errors = (
        np.array([row.get(f"acc_{task}{end}", math.nan) for task in tasks], dtype=np.float64) for end in ("", "_stderr")
    )
    if not len(tasks):
        return math.nan, math.nan
    variance = np.square(errors).sum() / len(tasks) ** 2 + together
    return float(accuracies.mean()), float(np.sqrt(np.maximum(0.0, variance)))


_ROUNDED = 0.02  # what four digits of a standard error leave open of the number of items, at most


def with_wilson_errors(model: Model, sizes: Mapping[str, float]) -> Model:
    """Return the model with `wilson_errors` in its rows and its baseline. Every other standard error stays as it is. `sizes`:
    `certain_sizes`."""
    baseline = {**model.baseline, **wilson_errors(model.baseline, sizes)}
    return replace(model, rows=rows_with_wilson_errors(model.rows, sizes), baseline=baseline)


def certain_sizes(model: Model) -> Mapping[str, float]:
    """Return how many items each task has of which a complete trial, or the dense model, has an accuracy of 0 or 1 without an
    error.

    The number of a task's items is that of the trials' or, where these were not kept, what the standard errors of other accuracies
    of that task tell; a task of which it is not known is left out. UserError for items that cannot be read.
    """
    complete = model.rows[model.rows["success"]]
    rows = [*complete.filter(regex="^acc_").to_dict("records"), model.baseline]
    return sizes_of(complete, [task for task in model.tasks if any(is_certain(row, task) for row in rows)])


def rows_with_wilson_errors(rows: pd.DataFrame, sizes: Mapping[str, float]) -> pd.DataFrame:
    """Rows of trials, or of configurations, with `wilson_errors` where they are complete. `sizes`: `certain_sizes`."""
    complete = rows.loc[rows["success"] if sizes else [], :].filter(regex="^acc_")
    errors_of = {
        i: wilson_errors(row, sizes) for i, row in zip(complete.index, complete.to_dict("records"), strict=True)
    }
    changed = pd.DataFrame.from_dict({i: errors for i, errors in errors_of.items() if errors}, orient="index")
    rows = rows.copy()
    rows.update(changed)
    return rows


def sizes_of(complete: pd.DataFrame, tasks: Sequence[str]) -> Mapping[str, float]:
    """Return how many items each of `tasks` has, as far as that is known: by the items of a trial or, where these were not kept,
    by what the standard errors say: the published number, where it is as near as errors of four digits tell."""
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
