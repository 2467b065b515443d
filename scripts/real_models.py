"""Tables of the study of real models, from what scripts/study.py has written to docs/studies/real_models/MODEL.

    python scripts/real_models.py               prints README's table, then those of docs/studies/real_models.md

KL is to the original's predictions, in nats per token; right answers: log-probability that their right choice has lost, in nats.
Regained: of what the best of the published grid by KL has lost. Errors are one standard error, paired over items or blocks of text,
and over draws (scripts/quality_table.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from quality_table import MEASURES
from script_tools import script_parser

STUDIES = Path(__file__).resolve().parents[1] / "docs" / "studies" / "real_models"
TITLES = {"smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M", "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B"}
RULES = {"kl": "KL", "gold_logprob": "right answers"}
ROLES = (  # title, step and rule of what was chosen; random removal has its name
    ("best of the published grid by KL", "grid", "kl"),
    ("best of the published grid by right answers", "grid", "gold_logprob"),
    ("recommended, by KL", "recommended", "kl"),
    ("recommended, by right answers", "recommended", "gold_logprob"),
    ("recommended, trained", "trained", "kl"),
    ("random removal", "", ""),
)
RANDOM = "random-s16-n128"

Row = dict[str, Any]  # of quality_table.rows_of


class Study(NamedTuple):
    """Holds what the study of one model has found."""

    model: str
    title: str
    dense: dict[str, float]
    chosen: dict[str, dict[str, str]]  # configurations by step and rule
    beside: dict[str, list[Row]]  # rows by the rule whose best of the grid they stand beside; of other ratios, too

    def row(self, name: str, rule: str = "kl") -> Row:
        """Return a configuration at the study's ratio, beside the best of the grid by `rule`."""
        (row,) = (row for row in self.beside[rule] if (row["configuration"], row["model"]) == (name, self.label))
        return row

    @property
    def label(self) -> str:
        """Return what rows at the study's ratio call the model: those of the ratio that judged most."""
        labels = [row["model"] for row in self.beside["gold_logprob"]]
        assert len(set(labels)) == 1
        return str(labels[0])

    def roles(self) -> dict[str, str]:
        """Return configurations by their titles; what was chosen twice stands at its first."""
        named: dict[str, str] = {}
        for title, step, rule in ROLES:
            name = self.chosen[step][rule] if step else RANDOM
            if name not in named.values():
                named[title] = name
        return named


def read() -> list[Study]:
    """Return the finished studies."""

    def load(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8"))

    return [
        Study(
            model,
            title,
            load(STUDIES / model / "dense.json"),
            load(STUDIES / model / "chosen.json"),
            {rule: load(STUDIES / model / f"regained_{rule}.json") for rule in RULES},
        )
        for model, title in TITLES.items()
        if (STUDIES / model / "chosen.json").exists()
    ]


def table(head: list[str], rows: list[list[str]]) -> str:
    first, *others = (f"| {' | '.join(cells).strip()} |" for cells in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def share(row: Row, measure: str, sign: int = 1) -> str:
    return f"{sign * 100 * row[f'{measure}_regained']:.0f} ± {100 * row[f'{measure}_stderr']:.0f}%"


def perplexity(ppl: float) -> str:
    return f"{ppl:.1f}" if ppl < 1000 else f"{ppl:,.0f}"


def for_readme(studies: list[Study]) -> str:
    """Return perplexity and distances by model, and what is regained."""

    def cell(row: Row) -> str:
        return " · ".join((perplexity(row["ppl"]), f"{row['kl_text']:.2f}", f"{row['kl_tasks']:.2f}"))

    def line(title: str, step: str, rule: str) -> list[str]:
        return [title, *(cell(one.row(one.chosen[step][rule] if step else RANDOM)) for one in studies)]

    regained = [
        " · ".join(share(one.row(one.chosen["recommended"]["kl"]), measure) for measure in MEASURES) for one in studies
    ]
    lines = [
        ["original", *(f"{one.dense['ppl']:.1f}" for one in studies)],
        line("best of the published grid", "grid", "kl"),
        line("**recommended**", "recommended", "kl"),
        ["of the grid's loss regained: text · questions · right answers", *regained],
        line("recommended, trained briefly", "trained", "kl"),
        line("random removal", "", ""),
    ]
    return table(["", *(one.title for one in studies)], lines)


def of_model(one: Study) -> str:
    """Return what was judged of one model, and what each regains of what the best of the grid has lost."""
    head = ["", "configuration", "perplexity", "KL text", "KL questions", "right answers", "accuracy"]
    head += [f"regained: {what}" for what in ("text", "questions", "right answers")]
    rows = [["original", "", f"{one.dense['ppl']:.2f}", "0", "0", "0", f"{one.dense['acc_mean']:.4f}", "", "", ""]]
    for title, name in one.roles().items():
        row = one.row(name)
        cells = [perplexity(row["ppl"]), *(f"{row[measure]:.3f}" for measure in MEASURES), f"{row['accuracy']:.4f}"]
        reference = name == one.chosen["grid"]["kl"]
        rows.append([title, f"`{name}`", *cells, *("" if reference else share(row, measure) for measure in MEASURES)])
    return table(head, rows)


def of_ratios(one: Study) -> str:
    """Return the best of the grid and of recommended by KL at the other ratios; "" before they are judged."""
    head = ["model", "configuration", "perplexity", "KL text", "KL questions", "right answers"]
    head += [f"regained: {what}" for what in ("text", "questions", "right answers")]
    rows = []
    for row in sorted(one.beside["kl"], key=lambda row: (row["model"], -row["kl_text"])):
        if row["model"] != one.label:
            cells = [perplexity(row["ppl"]), *(f"{row[measure]:.3f}" for measure in MEASURES)]
            reference = row["configuration"] == one.chosen["grid"]["kl"]
            shares = ["" if reference else share(row, measure) for measure in MEASURES]
            rows.append([row["model"], f"`{row['configuration']}`", *cells, *shares])
    return table(head, rows) if rows else ""


def transfer(studies: list[Study]) -> str:
    """Return how much more each model loses when it is pruned by the best of another's grid than by that of its own; "" of one
    model."""
    head = ["model", "rule", "its own best", "the best of", "", "more lost: text", "questions", "right answers"]
    rows = []
    for one in studies:
        for rule, title in RULES.items():
            own = one.chosen["grid"][rule]
            for other in studies:
                name = other.chosen["grid"][rule]
                if other is one:
                    continue
                cells = ["the same"] * 3 if name == own else [share(one.row(name, rule), each, -1) for each in MEASURES]
                rows.append([one.title, title, f"`{own}`", other.title, f"`{name}`", *cells])
    return table(head, rows) if rows else ""


def main(argv: list[str] | None = None) -> int:
    script_parser(__doc__).parse_args(argv)
    studies = read()
    tables = [for_readme(studies), *(part(one) for one in studies for part in (of_model, of_ratios)), transfer(studies)]
    print("\n\n".join(filter(None, tables)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
