"""How much of what pruning loses a configuration regains beside another one: of searches that measured all of them on the same
items, texts and draws.

    tune-prune search --model smollm2 --search-space quality.yaml --name quality --limit 100 ...
    python scripts/quality_table.py ray_results/quality --reference taylor-s128-n128

What is lost is the KL to the dense model, on the perplexity text and on questions with their right answers, and the log-probability
of right choices (mean of the tasks). Regained: 1 - loss / loss of the reference, by the mean over draws of calibration samples. Its
standard error is paired: over blocks of text, or the items of all tasks as of one, to first order; of several draws with what
they differ by, which counts chance within a draw twice. Both are rather too wide. Trained configurations stand in a table of
their own.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from script_tools import markdown_table, script_parser

from tune_prune import load_results
from tune_prune.analysis.input.items import GOLD, dense_folder, gold_logprobs, kl_blocks
from tune_prune.analysis.statistics.draws import mean_of_draws
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json

MEASURES = {"kl_text": "KL text", "kl_tasks": "KL tasks", GOLD: "gold logprob"}


@dataclass(frozen=True)
class Losses:
    """Holds by measure the losses of one configuration [draws, observations], and weights of observations that add up to 1."""

    values: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]

    def mean(self, measure: str) -> float:
        return float((self.values[measure] @ self.weights[measure]).mean())


def losses(folders: list[str], dense: pd.Series) -> Losses:
    """Read the losses of the trials of all draws; `dense`: log-probabilities of right choices."""
    values: dict[str, list[np.ndarray]] = {}
    weights: dict[str, np.ndarray] = {}
    sizes = dense.groupby(level="task").transform("size")
    for folder in folders:
        gold = gold_logprobs(folder)
        if gold is None or not gold.index.equals(dense.index):
            raise UserError(f"{folder} was not measured on the dense model's items; search again with equal settings")
        measured = {name: (blocks, blocks.index.get_level_values(1)) for name, blocks in kl_blocks(folder).items()}
        for name, (series, weight) in (measured | {GOLD: (dense - gold, 1 / sizes)}).items():
            values.setdefault(name, []).append(series.to_numpy(np.float64))
            weights[name] = np.asarray(weight, np.float64) / np.sum(np.asarray(weight, np.float64))
    return Losses({name: np.stack(draws) for name, draws in values.items()}, weights)


def regained(reference: Losses, other: Losses, measure: str) -> tuple[float, float]:
    """Return 1 - other's loss / the reference's, and its standard error. Of several draws, which both have, the error of the
    draws is that of their mean; observations are shared by all draws."""
    base, values, weights = reference.values[measure], other.values[measure], reference.weights[measure]
    lost = float((base @ weights).mean())
    share = 1 - float((values @ weights).mean()) / lost
    # To first order the ratio of means is the mean of these.
    parts = (base - values).mean(axis=0) - share * base.mean(axis=0)
    n = len(parts)
    of_items = n / (n - 1) * float(np.square(weights * parts).sum()) / lost**2 if n > 1 else math.nan
    of_draws = 0.0
    if len(base) > 1:
        by_draw = ((base - values) @ weights - share * (base @ weights)) / lost
        of_draws = float(by_draw.var(ddof=1)) / len(by_draw)
    return share, float(np.sqrt(of_items + of_draws))


def rows_of(folders: list[str], reference: str) -> list[dict[str, Any]]:
    """Return a row per model and configuration, of searches in those `folders`, that has every draw of the reference; trained
    ones among the others of their model. Raises UserError where that is not there."""
    by_model: dict[tuple[Any, ...], list[Any]] = {}
    for folder in folders:
        for model in load_results(folder).findings.study.models.values():
            by_model.setdefault((model.base, model.ratio), []).append(model)
    rows = [row for models in by_model.values() for row in _rows_of_model(models, reference)]
    return sorted(rows, key=lambda row: (row["model"], row["kl_tasks"]))


def _rows_of_model(models: list[Any], reference: str) -> list[dict[str, Any]]:
    """Return the rows of one model at one ratio, which several searches may have measured."""
    label = models[0].label
    trials = pd.concat(
        [
            model.rows[model.rows["success"]].assign(run_seed=0 if model.source is None else model.source["seed"])
            for model in models
        ],
        ignore_index=True,
    )
    # A configuration's name says its seed where that is not the run's.
    seeds = trials["seed"].fillna(trials["run_seed"]).astype(int)
    names = [re.sub(rf"-r{seed}(?=-|$)", "", name) for name, seed in zip(trials["name"], seeds, strict=True)]
    by_name = {name: part.set_index(seeds[part.index]).groupby(level=0).tail(1) for name, part in trials.groupby(names)}
    if reference not in by_name:
        raise UserError(f"{reference} was not measured on {label}; there are {', '.join(by_name)}")
    dense = gold_logprobs(dense_folder(models[0]))
    if dense is None:
        raise UserError(f"there are no items of the dense {label}; search again with the same command")
    draws = sorted(by_name[reference].index)
    base = losses(list(by_name[reference].loc[draws, "output_dir"]), dense)
    rows = []
    for name, members in by_name.items():
        if not set(draws) <= set(members.index):
            continue
        chosen = members.loc[draws]
        lost = losses(list(chosen["output_dir"]), dense)
        if any(base.values[measure].shape != values.shape for measure, values in lost.values.items()):
            raise UserError(f"{name} was measured on other texts than {reference}; search again with equal settings")
        row = {"model": label, "configuration": name, "draws": len(draws)}
        row |= {"ppl": mean_of_draws(chosen["ppl"]), "accuracy": chosen["acc_mean"].mean()}
        for measure in lost.values:
            share, error = regained(base, lost, measure)
            row |= {measure: lost.mean(measure), f"{measure}_regained": share, f"{measure}_stderr": error}
        rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the tables, regained shares in percent with their standard errors: of configurations without a training and, where
    there are any, of trained ones. The reference is in both."""
    seconds = any("seconds" in row for row in rows)

    def table(trained: bool) -> str:
        models = {row["model"] for row in rows if _trained(row) == trained}
        part = [row for row in rows if _trained(row) == trained or (_reference(row) and row["model"] in models)]
        return _table(part, seconds) if models else ""

    untrained, trained = table(False), table(True)
    return "\n\n".join(filter(None, (untrained, trained and f"trained:\n\n{trained}")))


def share(row: dict[str, Any], measure: str) -> str:
    """Return in percent what a row regains of what its reference has lost, and its standard error."""
    return f"{100 * row[f'{measure}_regained']:z.0f} ± {100 * row[f'{measure}_stderr']:.0f}%"


def _trained(row: dict[str, Any]) -> bool:
    """Say whether a configuration has a recovery, which is in its name."""
    return "-lora" in row["configuration"]


def _reference(row: dict[str, Any]) -> bool:
    """Say whether a row has lost what the reference has, with no error at all."""
    return all(row[f"{name}_regained"] == row[f"{name}_stderr"] == 0 for name in MEASURES)


def _table(rows: list[dict[str, Any]], seconds: bool) -> str:
    """Return the rows as Markdown; `seconds`: with those that made the model, which some records of docs/studies have."""
    head = [
        "model",
        "configuration",
        "draws",
        *(name for label in MEASURES.values() for name in (label, "regained")),
        "perplexity",
        "accuracy",
    ]
    head += ["seconds"] * seconds
    lines = []
    for row in rows:
        cells = [row["model"], f"`{row['configuration']}`", str(row["draws"])]
        for name in MEASURES:
            cells += [f"{row[name]:.3f}", share(row, name)]
        cells += [f"{row['ppl']:.2f}", f"{row['accuracy']:.3f}"]
        if seconds:
            taken = row.get("seconds")
            cells.append("–" if taken is None else f"{taken:.1f}")
        lines.append(cells)
    return markdown_table(head, lines)


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__, "also as JSON")
    parser.add_argument("experiments", nargs="+", help="their folders")
    parser.add_argument(
        "--reference", required=True, metavar="NAME", help="the configuration whose losses are regained"
    )
    args = parser.parse_args(argv)

    def run() -> None:
        rows = rows_of(args.experiments, args.reference)
        print(markdown(rows))
        if args.output:
            atomic_write_text(args.output, to_json(rows))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
