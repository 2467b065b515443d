"""Two search spaces at equal cost: how good the best configuration of each is once both have forwarded as many tokens.

    tune-prune search --model tiny-llama --search-space paper_grid --name grid --storage-path one
    tune-prune search --model tiny-llama --search-space extended --name extended --storage-path two
    python scripts/equal_cost.py --reference one/grid --other two/extended

Of the other search those trials count that were finished before its tokens reached those of the whole reference; what it has as a
whole stands below. A trial costs what its stages forwarded, and the first trial that reads the statistics of a length pays for
their pass; the dense model's own measures, which are the same for both, are left out. A gradient's token counts as one, as in
cost.json, though it takes the time of three. Separate --storage-path's, as one search would else take statistics from the
other's cache.

Several folders are several draws of calibration samples (--seed), in pairs. Accuracies are cross-fitted (docs/analysis.md), so that
a search with more trials is not ahead by luck alone. `points` is the difference of those; its standard error takes both as
independent, though they have the same items: rather too wide. The mean over draws has what the draws differ by for its error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
from quality_table import shown

from tune_prune import load_results
from tune_prune.analysis.statistics.findings import ModelFindings, find
from tune_prune.commands.flags import output_file
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, PassLog
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import open_store


def tokens_spent(folder: str, model: str) -> pd.Series:
    """Tokens that a search had forwarded for `model` when each of its trials ended, by the trial's key, in that order."""
    store = open_store(folder)
    passes = [one for one in PassLog(store).read() if one["model"] == model]
    records = [record for record in Ledger(store).records() if record.model == model]
    paid: set[int] = set()
    spent, total = {}, 0
    for record in sorted(records, key=_ended):
        total += sum(stage["tokens"] for stage in record.stages)
        for index, one in enumerate(passes):
            if index not in paid and _reads(record, one):
                paid.add(index)
                total += one["tokens"]
        spent[record.key] = total
    return pd.Series(spent, dtype="int64")


def _ended(record: TrialRecord) -> datetime:
    return datetime.fromisoformat(record.started_at) + timedelta(seconds=record.elapsed_time_s)


def _reads(record: TrialRecord, one: Mapping[str, Any]) -> bool:
    """Whether a trial needs the statistics of that pass."""
    stages = {stage["stage"] for stage in record.stages}
    return one["stage"] in stages and one["seq_len"] == record.config["seq_len"]


def found_within(folder: str, label: str, tokens: float) -> tuple[ModelFindings, pd.Series]:
    """The findings of a search's first trials, up to so many tokens, and the tokens spent at the end of each. Raises UserError
    where fewer than two are complete by then: there is nothing to choose from."""
    study = load_results(folder).findings.study
    model = study.models[label]
    spent = tokens_spent(folder, (model.source or {}).get("label", label))
    spent = spent[spent <= tokens]
    rows = model.rows[model.rows["key"].isin(spent.index)].reset_index(drop=True)
    found = find(replace(study, models={label: replace(model, rows=rows)}))
    if label not in found.models or len(found.models[label].eligible) < 2:
        raise UserError(
            f"{folder} has fewer than two complete configurations of {label} within {tokens:,.0f} tokens; search for longer, or "
            "take a larger reference"
        )
    return found.models[label], spent


def row_of(folder: str, label: str, tokens: float) -> dict[str, Any]:
    """What a search has within so many tokens: the cross-fitted accuracy of its best configuration. Raises UserError."""
    found, spent = found_within(folder, label, tokens)
    if (fit := found.cross_fit) is None:
        raise UserError(f"{folder} has no items of {label} that its best configuration was chosen by; search again")
    best = found.best
    return {
        "trials": len(spent),
        "tokens": int(spent.max()),
        "seconds": float(found.model.rows["elapsed_time"].sum()),
        "best": best["name"],
        "accuracy": float(best["acc_mean"]),
        "cross_fitted": fit.corrected,
        "stderr": fit.stderr,
        "lowest_kl_tasks": float(found.eligible["kl_tasks"].min()),  # of any configuration
    }


def compared(references: list[str], others: list[str]) -> list[dict[str, Any]]:
    """A row per model and pair of folders: what the whole reference has, what the other has for as many tokens and as a whole, each
    of these with `points`, how far it is above the reference. Raises UserError."""
    if len(references) != len(others):
        raise UserError(
            f"--reference has {len(references)} folders and --other {len(others)}; name as many, one of each per draw"
        )
    rows = []
    for draw, (reference, other) in enumerate(zip(references, others, strict=True)):
        labels, there = (load_results(folder).findings.study.models for folder in (reference, other))
        if lost := [label for label in labels if label not in there]:
            raise UserError(f"{other} has no {lost[0]}, which {reference} has; search it for the same models")
        for label in labels:
            one = row_of(reference, label, np.inf)
            found = {"reference": one}
            for name, tokens in (("other", one["tokens"]), ("whole", np.inf)):
                two = row_of(other, label, tokens)
                points = 100 * (two["cross_fitted"] - one["cross_fitted"])
                error = 100 * float(np.hypot(one["stderr"], two["stderr"]))
                found[name] = two | {"points": points, "stderr_points": error}
            rows.append({"model": label, "draw": draw, **found})
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table, lines of means per model below the rows of several draws."""
    lines = [
        "| model | search | trials | million tokens | best | accuracy | cross-fitted | points | lowest KL tasks |",
        "|---" * 9 + "|",
    ]
    names = {"reference": "reference", "other": "other, as many tokens", "whole": "other, whole"}
    for row in rows:
        for name, words in names.items():
            one, of = row[name], row["model"]
            ahead = f"{one['points']:+.1f} ± {one['stderr_points']:.1f}" if "points" in one else ""
            lines.append(
                f"| {of} | {words} | {one['trials']} | {one['tokens'] / 1e6:.2f} | `{one['best']}` | {one['accuracy']:.3f} "
                f"| {one['cross_fitted']:.3f} ± {one['stderr']:.3f} | {ahead} | {one['lowest_kl_tasks']:.4f} |"
            )
    for model in dict.fromkeys(row["model"] for row in rows):
        for name in ("other", "whole"):
            points = np.array([row[name]["points"] for row in rows if row["model"] == model])
            if len(points) > 1:
                error = points.std(ddof=1) / len(points) ** 0.5
                mean = f"{points.mean():+.1f} ± {error:.1f}"
                lines.append(f"| {model} | {names[name]}, mean of {len(points)} | | | | | | {mean} | |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", nargs="+", required=True, metavar="FOLDER", help="a search, one per draw")
    parser.add_argument("--other", nargs="+", required=True, metavar="FOLDER", help="as many of the other search")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also as JSON")
    args = parser.parse_args(argv)
    return shown(lambda: compared(args.reference, args.other), markdown, args.output)


if __name__ == "__main__":
    sys.exit(main())
