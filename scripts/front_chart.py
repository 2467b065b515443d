"""README's chart and table, from committed results alone: real models, pruned by the best of the published grid and as recommended.

    python scripts/front_chart.py                      prints the table, draws docs/figures/front_chart.png
    python scripts/front_chart.py --output chart.svg

Every number is of docs/studies/real_models, of what judged and had chosen nothing. The picture says in its metadata which table it
was drawn with.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from quality_table import share
from real_models import STUDIES, Study, read
from script_tools import markdown_table, script_parser, shown

from tune_prune.analysis.figures import BLUE, GREY, ORANGE, SKY
from tune_prune.commands.flags import output_file
from tune_prune.core.files import atomic_write_bytes

STEPS = {"grid": "published grid's best by KL", "recommended": "**recommended**", "trained": "trained, 100 steps"}
MEASURES = {"kl_text": "undone on text", "kl_tasks": "on questions"}
COLOURS = {"original": GREY, "trained": BLUE, "recommended": SKY, "grid": ORANGE}
LABELS = {
    "original": "original",
    "trained": "recommended,\n100 training steps",
    "recommended": "recommended",
    "grid": "published grid's\nbest by KL",
}
WIDTH, HEIGHT, DPI = 6.4, 2.5, 150  # 960 x 375 pixels


def perplexities(one: Study) -> dict[str, float]:
    """Return by step the perplexity of its best by KL."""
    return {step: one.rows()[one.chosen[step]["kl"]]["ppl"] for step in STEPS}


def method(one: Study, step: str) -> str:
    """Return the method of the best of a step by KL."""
    return one.chosen[step]["kl"].split("-")[0]


def table(studies: list[Study]) -> str:
    head = ["Perplexity", "original", *STEPS.values(), *MEASURES.values()]
    lines = []
    for one in studies:
        ppl = {step: shown(value) for step, value in perplexities(one).items()}
        ppl |= {step: f"{ppl[step]} `{method(one, step)}`" for step in ("grid", "recommended")}
        cells = [f"{one.title} -{one.ratio:.0%}", shown(one.dense["ppl"]), *ppl.values()]
        rows = [one.rows()[one.chosen[step]["kl"]] for step in ("recommended", "trained")]
        lines.append([*cells, *(" → ".join(share(row, measure) for row in rows) for measure in MEASURES)])
    return markdown_table(head, lines)


def chart(studies: list[Study], kind: str) -> bytes:
    """Return the chart as a PNG or SVG file, the same bytes each time."""
    with rc_context({"font.family": "DejaVu Sans", "font.size": 8, "svg.hashsalt": "front_chart"}):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white", layout="constrained")
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
        content = io.BytesIO()
        dateless = {"Software": None} if kind == "png" else {"Date": None}
        figure.savefig(content, format=kind, metadata={"Description": table(studies), **dateless})
    return content.getvalue()


def picture(text: str) -> Path:
    path = output_file(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} is no picture; give a name that ends in .png or .svg")
    return path


def main(argv: list[str] | None = None) -> int:
    parser = script_parser(__doc__)
    path = STUDIES.parents[1] / "figures" / "front_chart.png"
    parser.add_argument("--output", type=picture, default=path, metavar="FILE", help="a .png or .svg file")
    args = parser.parse_args(argv)
    studies = read()
    atomic_write_bytes(args.output, chart(studies, args.output.suffix[1:]))
    print(table(studies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
