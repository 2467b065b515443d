"""What the files of trials tell beside accuracies: log-probabilities of right choices, by item; KL to the dense model, by block;
and whether a model tells right choices from wrong ones at all, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow

from tune_prune.analysis.input.items import Layouts, columns_of
from tune_prune.analysis.input.study import Model
from tune_prune.core.errors import UserError
from tune_prune.core.files import number, parse_json
from tune_prune.core.ledger import trial_file
from tune_prune.core.store import ITEMS, KL, TRIALS, location, open_store

GOLD, TEXTS = "gold_logprob_mean", ("kl_text", "kl_tasks")


@dataclass(frozen=True)
class SliceMeans:
    """What a trial scores on growing slices of the items, by number of the slice; the last has them all."""

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
        found = (sums / np.maximum(counts, 1)).sum(axis=0)
        return np.where(seen > 0, found / np.maximum(seen, 1), math.nan)

    whole = np.ones(len(table), dtype=bool)
    return SliceMeans(grown(np.ones(len(table)), whole).sum(axis=0), means(scores, whole), means(golds, known))


def gold_logprobs(output_dir: str) -> pd.Series | None:
    """The log-probability of the right choice (nats, summed over its tokens) of every item of a trial that has a single one,
    indexed by (task, doc_id), in order; None if no items were kept."""
    return GoldReader()(output_dir)


def kl_blocks(output_dir: str) -> dict[str, pd.Series]:
    """By `kl_text` and `kl_tasks` the KL (nats per token) of every block of a trial, indexed by (block, tokens); empty if none were
    kept. Raises UserError for a file that cannot be read."""
    path = location(output_dir) / KL
    content = trial_file(path.parent, KL) if output_dir else None
    if content is None:
        return {}
    try:
        found = {}
        for name, blocks in parse_json(path, content).items():
            index = pd.MultiIndex.from_arrays([range(len(blocks["tokens"])), [int(n) for n in blocks["tokens"]]])
            found[f"kl_{name}"] = pd.Series([float(number(value)) for value in blocks["nats"]], index)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it from a copy, or move it away") from error
    return found


def with_gold_logprobs(model: Model) -> Model:
    """The same with `gold_logprob_*` from the items of trials, and of the dense model, whose records are older than them."""
    rows = model.rows
    recorded = rows[GOLD] if GOLD in rows else pd.Series(math.nan, rows.index)
    missing = {i: _summary(rows.loc[i, "output_dir"]) for i in rows.index[rows["success"] & recorded.isna()]}
    found = pd.DataFrame.from_dict({i: values for i, values in missing.items() if values}, orient="index")
    if len(found):
        rows = rows.reindex(columns=[*rows, *sorted(set(found) - set(rows))])
        rows.loc[found.index, found.columns] = found
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
    found = {f"gold_logprob_{task}": float(value) for task, value in means.items()}
    return found | {f"gold_logprob_{task}_stderr": float(value) for task, value in errors.items()}


def discrimination(output_dir: str) -> pd.DataFrame:
    """Whether log-likelihoods tell right choices from wrong ones, by the items of one model. Index: task; columns:

    auc  with two choices: the chance that ll(second) - ll(first) is higher on an item whose second choice is right than on one
         whose first is (ties half), which no preference for one of the answers changes; with more, or one label only: the
         mean share of the other choices that the right one is above. 0.5 where nothing is told.
    p    of such an AUC or a higher one if nothing were told: one-sided, by Mann and Whitney's (1947) normal approximation with
         ties; or of ranks that are uniform, a sum of independent items of variance (c + 1) / (12 (c - 1)) with c choices

    Without items an empty table.
    """
    table = columns_of(output_dir, ["task", "gold", "loglikelihoods"])
    found: dict[str, dict[str, float]] = {}
    if table is not None:
        rows = table.to_pandas()
        for task, items in rows[rows["gold"] >= 0].groupby("task", sort=False):
            choices = [np.asarray(values) for values in items["loglikelihoods"]]
            found[str(task)] = _told(items["gold"].to_numpy(), choices)
    return pd.DataFrame.from_dict(found, orient="index", columns=["auc", "p"], dtype="float64").rename_axis("task")


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
