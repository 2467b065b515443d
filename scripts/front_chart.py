"""Charts of real models, and README's table, from committed results alone (docs/studies/real_models), of what had chosen nothing.

    python scripts/front_chart.py                      prints the table, draws both charts into docs/figures

front_chart.png: perplexity by the best of the published grid and as recommended. transfer.png: how much more each model loses by
the best of another's grid. A picture says in its metadata which table it was drawn with.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from quality_table import MEASURES, share
from real_models import STUDIES, Study, read, transfer
from script_tools import markdown_table, script_parser, shown

from tune_prune.analysis.figures import BLUE, GREY, ORANGE, SKY
from tune_prune.core.files import atomic_write_bytes

STEPS = {"grid": "published grid's best by KL", "recommended": "**recommended**", "trained": "trained, 100 steps"}
UNDONE = {"kl_text": "undone on text", "kl_tasks": "on questions"}
COLOURS = {"original": GREY, "trained": BLUE, "recommended": SKY, "grid": ORANGE}
LABELS = {
    "original": "original",
    "trained": "recommended,\n100 training steps",
    "recommended": "recommended",
    "grid": "published grid's\nbest by KL",
}
TITLES = ("KL on text", "KL on questions", "right answers")  # in the order of MEASURES
WIDTH, DPI = 6.4, 150  # 960 pixels


def perplexities(one: Study) -> dict[str, float]:
    """Return by step the perplexity of its best by KL."""
    return {step: one.rows()[one.chosen[step]["kl"]]["ppl"] for step in STEPS}


def method(one: Study, step: str) -> str:
    """Return the method of the best of a step by KL."""
    return one.chosen[step]["kl"].split("-")[0]


def table(studies: list[Study]) -> str:
    head = ["Perplexity", "original", *STEPS.values(), *UNDONE.values()]
    lines = []
    for one in studies:
        ppl = {step: shown(value) for step, value in perplexities(one).items()}
        ppl |= {step: f"{ppl[step]} `{method(one, step)}`" for step in ("grid", "recommended")}
        cells = [f"{one.title} -{one.ratio:.0%}", shown(one.dense["ppl"]), *ppl.values()]
        rows = [one.rows()[one.chosen[step]["kl"]] for step in ("recommended", "trained")]
        lines.append([*cells, *(" → ".join(share(row, measure) for row in rows) for measure in UNDONE)])
    return markdown_table(head, lines)


def chart(studies: list[Study]) -> Figure:
    """Draw the perplexity of each model, one panel for each."""
    figure = Figure(figsize=(WIDTH, 2.5), dpi=DPI, facecolor="white", layout="constrained")
    for axes, one in zip(figure.subplots(1, len(studies), sharey=True, squeeze=False)[0], studies, strict=True):
        values = {"original": one.dense["ppl"]} | perplexities(one)
        drawn = axes.barh(
            range(len(LABELS)), [values[name] for name in LABELS], 0.62, color=[COLOURS[name] for name in LABELS]
        )
        axes.bar_label(drawn, [shown(values[name]) for name in LABELS], padding=3, fontsize=9, fontweight="bold")
        axes.set_yticks(range(len(LABELS)), LABELS.values())
        axes.margins(x=0.3)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{one.title}\n{one.ratio:.0%} removed", fontsize=8, fontweight="bold")
    axes.invert_yaxis()
    figure.supxlabel("perplexity on WikiText-2: lower is better", fontsize=8)
    return figure


def transfer_chart(studies: list[Study]) -> Figure:
    """Draw how much more each model loses by the best of another's grid than by that of its own, chosen by KL: with two standard
    errors, blue where these include 0, else orange; one panel for each measure."""
    pairs = [(one, other, other.chosen["grid"]["kl"]) for one in studies for other in studies if one is not other]
    rows = [(one.rows()[name], f"{one.title}\nby {other.title}'s, {name}") for one, other, name in pairs]
    figure = Figure(figsize=(WIDTH, 3), dpi=DPI, facecolor="white", layout="constrained")
    for axes, measure, title in zip(figure.subplots(1, 3, sharex=True, sharey=True), MEASURES, TITLES, strict=True):
        axes.axvline(0, color=GREY, linewidth=0.8)
        for place, (row, _) in enumerate(rows):
            lost, error = -100 * row[f"{measure}_regained"], 200 * row[f"{measure}_stderr"]
            colour = BLUE if abs(lost) <= error else ORANGE
            axes.errorbar(lost, place, xerr=error, fmt="o", markersize=4, capsize=2, color=colour)
        axes.set_yticks(range(len(rows)), [label for _, label in rows], fontsize=7)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MultipleLocator(50))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.0f}" if x else "0")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, fontsize=8, fontweight="bold")
    axes.invert_yaxis()
    figure.supxlabel(
        "more lost than by the best of its own grid by KL, in % (below 0: less)\n"
        "bars: two standard errors, orange where clear of 0",
        fontsize=8,
    )
    return figure


def png(draw: Callable[[list[Study]], Figure], studies: list[Study], described: str) -> bytes:
    """Return a chart as a PNG file, the same bytes each time, with the table that it shows in its metadata."""
    content = io.BytesIO()
    with rc_context({"font.family": "DejaVu Sans", "font.size": 8}):
        draw(studies).savefig(content, format="png", metadata={"Description": described, "Software": None})
    return content.getvalue()


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    figures = STUDIES.parents[1] / "figures"
    parser.add_argument("--output", type=Path, default=figures, metavar="DIR", help="(default: docs/figures)")
    args = parser.parse_args(argv)
    studies = read()
    args.output.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(args.output / "front_chart.png", png(chart, studies, table(studies)))
    atomic_write_bytes(args.output / "transfer.png", png(transfer_chart, studies, transfer(studies)))
    print(table(studies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
