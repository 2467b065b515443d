"""The first table of docs/quality.md, from committed results alone: SmolLM2-135M with 20% of its parameters removed.

    python scripts/quality_page.py

Every number is of docs/studies/smollm2-135m: single trials in its CSV files, tables of scripts/quality_table.py in its JSON files.
Perplexity of several runs is their geometric mean.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from statistics import fmean, geometric_mean

from script_tools import markdown_table, script_parser, shown

STUDY = Path(__file__).resolve().parents[1] / "docs" / "studies" / "smollm2-135m"
HEAD = ("", "Perplexity", "Distance on text", "Distance on questions", "Runs")

Measured = tuple[float, float, float, int]  # perplexity, distances and runs of one configuration


def of_trials(method: str, seq_len: int, num_samples: int, file: str = "contenders") -> Measured:
    """Return what the CSV file of its trials says of a configuration."""
    levels = [method, str(seq_len), str(num_samples)]
    with (STUDY / f"{file}.csv").open(encoding="utf-8", newline="") as lines:
        trials = [t for t in csv.DictReader(lines) if [t["method"], t["seq_len"], t["num_samples"]] == levels]
    ppl, text, tasks = ([float(trial[name]) for trial in trials] for name in ("ppl", "kl_text", "kl_tasks"))
    return geometric_mean(ppl), fmean(text), fmean(tasks), len(trials)


def of_table(file: str, name: str) -> Measured:
    """Return what a table of means says of a configuration."""
    rows = json.loads((STUDY / f"{file}.json").read_text(encoding="utf-8"))
    (row,) = (row for row in rows if row["configuration"] == name)
    return row["ppl"], row["kl_text"], row["kl_tasks"], row["draws"]


def table() -> str:
    two_steps = "gate_fisher-s128-n512-least_squares-t131072"
    rows = {
        "**best recipe**: `gate_fisher` in two steps, questions in the sample text, repair, 400 training steps": of_table(
            "quality_two_steps_trained", f"{two_steps}-lora-i400-e0.003-k2"
        ),
        "the same without training": of_table("quality_two_steps", f"{two_steps}-k2"),
        "**recommended**: `gate_fisher` and repair, no training": of_table(
            "quality_draws", "gate_fisher-s128-n128-least_squares"
        ),
        "best of the published grid by perplexity (`taylor`)": of_trials("taylor", 256, 128),
        "best of the published grid by right answers (`layerwise`)": of_trials("layerwise", 32, 256),
        "random removal": of_trials("random", 16, 128, "control"),
    }
    dense = json.loads((STUDY / "dense.json").read_text(encoding="utf-8"))["ppl"]
    cells = (
        [label, shown(ppl), f"{text:.2f}", f"{tasks:.2f}", str(runs)]
        for label, (ppl, text, tasks, runs) in rows.items()
    )
    return markdown_table(HEAD, [["original", shown(dense), "0", "0", ""], *cells])


def main(argv: list[str] | None = None) -> int:
    script_parser(__doc__).parse_args(argv)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
