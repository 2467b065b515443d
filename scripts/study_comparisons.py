"""How far apart the configurations of a study are: every difference that its page speaks of, on the same items, with errors of
items and of draws.

    python scripts/study_comparisons.py --storage-path ray_results --output comparisons.csv

Reads the experiments of scripts/study_smollm2.py, which calls it at its end. A row is the mean of `first` less that of `second`,
each a configuration, `dense`, or all configurations of the grid with a method, or with a method and a seq_len or num_samples.

measure   gold_logprob (nats, mean of tasks), kl_text, kl_tasks (nats per token), accuracy (points, mean of all tasks),
          accuracy_able (points, without the tasks on which the dense model does not tell right from wrong), and boolq_yes: to
          how many items of BoolQ `first` answers yes (`gold`: to how many that is right)
items     standard error over items or blocks of text that both have in common, of means over draws and configurations
draws_stderr    standard error over draws of calibration samples, of both: the variance between its own draws, as configurations
          differ in how far these lie apart, over their number; nothing where there is one draw. From three draws it is rough. The
          interaction of draws with items is taken off where it is known (accuracies), and counts twice elsewhere, which is
          rather too wide
stderr    of both
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tune_prune import load_results
from tune_prune.analysis.input.items import GOLD, TEXTS, columns_of, dense_folder, gold_logprobs, kl_blocks, read_items
from tune_prune.analysis.statistics.differences import paired_gap
from tune_prune.analysis.statistics.draws import draw_variance
from tune_prune.analysis.statistics.findings import ModelFindings
from tune_prune.commands.flags import output_file
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text

COLUMNS = ("step", "ratio", "first", "second", "draws", "measure", "value", "stderr", "items", "draws_stderr")
DENSE = "dense"


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    name: str
    folders: tuple[str, ...]  # trials whose mean it is; none of the dense model's KL
    draws: int = 1
    several: Mapping[int, pd.DataFrame] = field(default_factory=dict)  # its draws, as `ModelFindings.draws` has them
    interactions: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # of these


class Comparisons:
    """Compares configurations of one model; `able`: the tasks on which the dense one tells right from wrong."""

    def __init__(self, grid: ModelFindings) -> None:
        tasks = grid.model.tasks
        self.dense = dense_folder(grid.model)
        if not self.dense:
            raise UserError(f"{grid.model.label} has no items of the dense model; run the study's grid again")
        self.able = [task for task in tasks if task not in grid.uninformative]
        # By measure the columns whose mean it is
        self.measures = {"gold_logprob": [GOLD], **{text: [text] for text in TEXTS}, "accuracy": ["acc_mean"]}
        if self.able:
            self.measures["accuracy_able"] = [f"acc_{task}" for task in self.able]
        self._read = cache(self._observations)

    def rows(self, step: str, found: ModelFindings, pairs: Sequence[tuple[Side, Side]]) -> Iterator[dict[str, Any]]:
        """A row for each pair and each measure that both have."""
        about = {"step": step, "ratio": found.model.ratio}
        for first, second in pairs:
            for measure in self.measures:
                names = {"first": first.name, "second": second.name, "draws": first.draws, "measure": measure}
                gap = self._gap(first, second, measure)
                if gap is not None:
                    yield about | names | gap

    def yes(self, step: str, found: ModelFindings) -> Iterator[dict[str, Any]]:
        """To how many items of BoolQ each configuration says yes, the dense model does, and that is right."""
        folders = {DENSE: self.dense} | dict(zip(found.eligible["name"], found.eligible["output_dir"], strict=True))
        for name, folder in folders.items():
            counts = yes_answers(folder)
            for first, count in {name: counts[0], "gold": counts[1]}.items() if counts else ():
                if first != "gold" or name == DENSE:
                    yield {
                        "step": step,
                        "ratio": found.model.ratio,
                        "first": first,
                        "measure": "boolq_yes",
                        "value": count,
                    }

    def _gap(self, first: Side, second: Side, measure: str) -> dict[str, Any] | None:
        one, other = (self._mean(side.folders, measure) for side in (first, second))
        if second.name == DENSE and measure in TEXTS and one is not None:
            other = one * 0.0
        paired = None if one is None or other is None else paired_gap(one, other)
        if paired is None:
            return None
        parts = [own for side in (first, second) if (own := _between(side, self.measures[measure])) is not None]
        points = 100.0 if measure.startswith("accuracy") else 1.0
        between = points * math.sqrt(sum(parts)) if parts else None
        stderr = paired[1] if between is None else math.hypot(paired[1], between)
        return {"value": paired[0], "stderr": stderr, "items": paired[1], "draws_stderr": between}

    def _mean(self, folders: Sequence[str], measure: str) -> pd.Series | None:
        found = [self._read(folder, measure) for folder in folders]
        known = [own for own in found if own is not None]
        if not known or len(known) < len(found):
            return None
        if not all(own.index.equals(known[0].index) for own in known):
            raise UserError(
                f"{folders[0]} was not measured on the items of {folders[-1]}; search again with equal settings"
            )
        return sum(known[1:], known[0]) / len(known)

    def _observations(self, folder: str, measure: str) -> pd.Series | None:
        if measure == "gold_logprob":
            return gold_logprobs(folder)
        if measure in TEXTS:
            return kl_blocks(folder).get(measure)
        items = read_items(folder)
        if items is None:
            return None
        tasks = items.index.get_level_values("task")
        return 100.0 * (items[tasks.isin(self.able)] if measure == "accuracy_able" else items)


def _between(side: Side, columns: Sequence[str]) -> float | None:
    """The variance that draws give to the mean of a side, in the unit of the columns; None where it is not known."""
    own = draw_variance(side.several, side.interactions, list(columns))
    return None if own is None else own.variance / side.draws


def yes_answers(folder: str) -> tuple[int, int] | None:
    """To how many items of BoolQ a model says yes, its second choice, and to how many that is right; None without such items."""
    table = columns_of(folder, ["task", "gold", "loglikelihoods"])
    items = [] if table is None else table.to_pandas().query("task == 'boolq'").to_dict("records")
    said = sum(int(np.argmax(item["loglikelihoods"])) for item in items)
    return (said, sum(int(item["gold"]) for item in items)) if items else None


def sides(found: ModelFindings) -> list[Side]:
    """The configurations, each the mean of its draws."""
    rows = found.eligible.sort_values(["method", "seq_len", "num_samples"])
    folders = {i: found.draws[i]["output_dir"] if i in found.draws else [own] for i, own in rows["output_dir"].items()}
    return [
        Side(
            str(rows.loc[i, "name"]),
            tuple(own),
            len(own),
            {i: found.draws[i]} if i in found.draws else {},
            found.interactions,
        )
        for i, own in folders.items()
    ]


def groups(found: ModelFindings) -> list[tuple[Side, Side]]:
    """Pair the methods of the grid, and of each the longest samples with the shortest, the most with the fewest."""
    rows = found.eligible
    methods = sorted(rows["method"].unique())
    folders = {method: tuple(rows.loc[rows["method"] == method, "output_dir"]) for method in methods}
    pairs = list(combinations([Side(name, own) for name, own in folders.items()], 2))
    for name, letter in (("seq_len", "s"), ("num_samples", "n")):
        for method in methods:
            ends = []
            for level in (int(rows[name].max()), int(rows[name].min())):
                chosen = (rows["method"] == method) & (rows[name] == level)
                ends.append(Side(f"{method}-{letter}{level}", tuple(rows.loc[chosen, "output_dir"])))
            pairs.append((ends[0], ends[1]))
    return pairs


def compared(folder: Callable[[str], Path]) -> list[dict[str, Any]]:
    """All rows of a study whose steps are in these folders; of a step that has not begun there are none."""

    def read(step: str) -> list[ModelFindings]:
        place = folder(step)
        return list(load_results(place).findings.models.values()) if step == "grid" or place.is_dir() else []

    (grid,) = read("grid")
    of = Comparisons(grid)
    dense, every = Side(DENSE, (of.dense,)), sides(grid)
    first = max(every, key=lambda side: grid.named(side.name).get(GOLD, math.nan))
    rows = [*of.rows("grid", grid, [(side, dense) for side in every]), *of.yes("grid", grid)]
    rows += of.rows("grid", grid, [(side, first) for side in every if side is not first])
    rows += of.rows("grid", grid, groups(grid))
    chosen = [side for found in read("contenders") for side in sides(found)]
    for step in ("contenders", "control", "ratios"):
        for found in read(step):
            own = sides(found)
            others = chosen if step == "control" else []
            pairs = [(side, other) for side in own for other in (dense, *others)] + list(combinations(own, 2))
            rows += of.rows(step, found, pairs)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as CSV, numbers with six digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{own:.6g}" if isinstance(own, float) else own for name, own in row.items()})
    return text.getvalue()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--storage-path", type=Path, default=Path("ray_results"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--name", default="study-smollm2", help="first part of the experiments' names (default: %(default)s)"
    )
    parser.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the CSV file")
    args = parser.parse_args(argv)
    try:
        rows = compared(lambda step: args.storage_path.absolute() / f"{args.name}-{step}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    atomic_write_text(args.output, table(rows))
    print(f"wrote {args.output}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
