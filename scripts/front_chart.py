"""README's chart and table, from committed results alone: SmolLM2-135M with 20% of its parameters removed, in several ways.

    python scripts/front_chart.py                      prints the table, draws docs/figures/front_chart.png
    python scripts/front_chart.py --output chart.svg

Every number is of docs/studies/smollm2-135m: single trials in its CSV files, tables of scripts/quality_table.py in its JSON files.
Perplexity of several runs is their geometric mean. The picture says in its metadata which table it was drawn with.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from script_tools import markdown_table, script_parser

from tune_prune.analysis.figures import BLUE, GREY, ORANGE, SKY
from tune_prune.commands.flags import output_file
from tune_prune.core.files import atomic_write_bytes

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "docs" / "studies" / "smollm2-135m"
HEAD = ("", "Perplexity", "Distance on text", "Distance on questions", "Runs")
RUNS = {1: "one run", 3: "three runs"}
WIDTH, HEIGHT, DPI = 6.4, 3.2, 150  # 960 x 480 pixels


class Row(NamedTuple):
    label: str  # in the table
    chart: str  # beside the bar; "" for a row of the table alone
    colour: str
    ppl: float
    kl_text: float = 0.0
    kl_tasks: float = 0.0
    runs: int | None = None


def of_trials(method: str, seq_len: int, num_samples: int, file: str = "contenders") -> tuple[float, float, float, int]:
    """Return perplexity, distances and runs of one configuration, from the CSV file of its trials."""
    levels = [method, str(seq_len), str(num_samples)]
    with (STUDY / f"{file}.csv").open(encoding="utf-8", newline="") as lines:
        trials = [t for t in csv.DictReader(lines) if [t["method"], t["seq_len"], t["num_samples"]] == levels]
    ppl, text, tasks = ([float(trial[name]) for trial in trials] for name in ("ppl", "kl_text", "kl_tasks"))
    return geometric_mean(ppl), fmean(text), fmean(tasks), len(trials)


def of_table(file: str, name: str) -> tuple[float, float, float, int]:
    """Return perplexity, distances and runs of one configuration from a table of means."""
    rows = json.loads((STUDY / f"{file}.json").read_text(encoding="utf-8"))
    (row,) = (row for row in rows if row["configuration"] == name)
    return row["ppl"], row["kl_text"], row["kl_tasks"], row["draws"]


def rows() -> list[Row]:
    two_steps = "gate_fisher-s128-n512-least_squares-t131072"
    return [
        Row("original", "original", GREY, json.loads((STUDY / "dense.json").read_text(encoding="utf-8"))["ppl"]),
        Row(
            "**best recipe**: `gate_fisher` in two steps, questions in the sample text, repair, 400 training steps",
            "best recipe: gate_fisher in two steps,\nquestions in the sample text, repair,\n400 training steps",
            BLUE,
            *of_table("quality_two_steps_trained", f"{two_steps}-lora-i400-e0.003-k2"),
        ),
        Row("the same without training", "", BLUE, *of_table("quality_two_steps", f"{two_steps}-k2")),
        Row(
            "**recommended**: `gate_fisher` and repair, no training",
            "recommended: gate_fisher\nand repair, no training",
            SKY,
            *of_table("quality_draws", "gate_fisher-s128-n128-least_squares"),
        ),
        Row(
            "best of the published grid by perplexity (`taylor`)",
            "best of the published grid by\nperplexity: taylor",
            ORANGE,
            *of_trials("taylor", 256, 128),
        ),
        Row(
            "best of the published grid by right answers (`layerwise`)",
            "best of the published grid by\nright answers: layerwise",
            ORANGE,
            *of_trials("layerwise", 32, 256),
        ),
        Row("random removal", "", GREY, *of_trials("random", 16, 128, "control")),
    ]


def shown(ppl: float) -> str:
    return f"{ppl:.1f}" if ppl < 1000 else f"{ppl:,.0f}"


def table(rows: list[Row]) -> str:
    def cells(row: Row) -> list[str]:
        distances = [f"{value:.2f}" if row.runs else "0" for value in (row.kl_text, row.kl_tasks)]
        return [row.label, shown(row.ppl), *distances, str(row.runs or "")]

    return markdown_table(HEAD, map(cells, rows))


def chart(rows: list[Row], kind: str) -> bytes:
    """Return the chart as a PNG or SVG file, the same bytes each time."""
    bars = [row for row in rows if row.chart]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 8, "svg.hashsalt": "front_chart"}):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        drawn = axes.barh(range(len(bars)), [row.ppl for row in bars], 0.62, color=[row.colour for row in bars])
        axes.bar_label(drawn, [shown(row.ppl) for row in bars], padding=4, fontsize=9, fontweight="bold")
        axes.set_yticks(range(len(bars)), [row.chart + (f" ({RUNS[row.runs]})" if row.runs else "") for row in bars])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(f"perplexity on WikiText-2: lower is better (random removal: {shown(rows[-1].ppl)})")
        figure.suptitle("SmolLM2-135M with 20% of its parameters removed", fontsize=10, fontweight="bold")
        content = io.BytesIO()
        dateless = {"Software": None} if kind == "png" else {"Date": None}
        figure.savefig(content, format=kind, metadata={"Description": table(rows), **dateless})
    return content.getvalue()


def picture(text: str) -> Path:
    path = output_file(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} is no picture; give a name that ends in .png or .svg")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    path = ROOT / "docs" / "figures" / "front_chart.png"
    parser.add_argument("--output", type=picture, default=path, metavar="FILE", help="a .png or .svg file")
    args = parser.parse_args(argv)
    atomic_write_bytes(args.output, chart(rows(), args.output.suffix[1:]))
    print(table(rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
