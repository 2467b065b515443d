"""Tables of the study of real models, from what scripts/study.py has written to docs/studies/real_models/MODEL.

    python scripts/real_models.py               prints the tables of docs/studies/real_models.md

searched.json, what the study of Gemma or Qwen has searched, is of the experiments study-MODEL-grid and -recommended:

    python scripts/quality_table.py EXPERIMENTS --reference CONFIGURATION --output searched.json                  of SEARCHED

KL is to the original's predictions, in nats per token; right answers: log-probability that their right choice has lost, in nats.
Regained: of what the best of the published grid has lost, by KL unless a rule is named. Errors are one standard error, paired over
items or blocks of text, and over draws (scripts/quality_table.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from quality_table import MEASURES, share
from script_tools import markdown_table, script_parser, shown

STUDIES = Path(__file__).resolve().parents[1] / "docs" / "studies" / "real_models"
TITLES = {"smollm2": "SmolLM2-135M", "gemma3-270m": "Gemma 3 270M", "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B"}
RULES = {"kl": "KL", "gold_logprob": "right answers"}
STEPS = {"grid": "best of the published grid", "recommended": "recommended", "trained": "recommended, trained"}
RANDOM = "random-s16-n128"
# Models of which all that was searched is shown, and beside which configuration: that of their grid which is SmolLM2's best by KL.
SEARCHED = {"gemma3-270m": "taylor-s256-n128", "qwen2.5-coder-1.5b": "taylor-s128-n128"}
REGAINED = [f"regained: {what}" for what in ("text", "questions", "right answers")]  # in the order of MEASURES
MEASURED = ["configuration", "perplexity", "KL text", "KL questions", "right answers"]

Row = dict[str, Any]  # of quality_table.rows_of


class Study(NamedTuple):
    """Holds what the study of one model has found."""

    model: str
    title: str
    ratio: float  # of all parameters, removed
    dense: dict[str, float]
    chosen: dict[str, dict[str, str]]  # configurations by step and rule
    beside: dict[str, list[Row]]  # rows by the rule whose best of the grid they stand beside; of other ratios, too

    def rows(self, rule: str = "kl") -> dict[str, Row]:
        """Return by name the configurations at the study's ratio, beside the best of the grid by `rule`."""
        return {row["configuration"]: row for row in self.beside[rule] if row["model"] == self.label}

    @property
    def label(self) -> str:
        """Return what rows at the study's ratio call the model."""
        (label,) = {row["model"] for row in self.beside["gold_logprob"]}
        return str(label)

    def titles(self) -> dict[str, str]:
        """Return why each configuration was judged, by its name."""
        titles: dict[str, str] = {}
        for step, title in STEPS.items():
            for rule, name in self.chosen[step].items():
                titles[name] = f"{titles[name]} and {RULES[rule]}" if name in titles else f"{title}, by {RULES[rule]}"
        others = {name: "best of another model's grid" for name in self.rows() if name not in titles and name != RANDOM}
        return titles | others | {RANDOM: "random removal"}


def load(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def measured(row: Row) -> list[str]:
    """Return the cells of MEASURED."""
    return [f"`{row['configuration']}`", shown(row["ppl"]), *(f"{row[measure]:.3f}" for measure in MEASURES)]


def regained(row: Row, reference: str) -> list[str]:
    """Return the cells of REGAINED, which the reference itself leaves empty."""
    return ["" if row["configuration"] == reference else share(row, measure) for measure in MEASURES]


def searched(model: str) -> str:
    """Return what was searched of that model, on the items that choose; that of the lowest KL, mean of both, first."""
    rows = sorted(load(STUDIES / model / "searched.json"), key=lambda row: row["kl_text"] + row["kl_tasks"])
    cells = ([*measured(row), f"{row['accuracy']:.4f}", *regained(row, SEARCHED[model])] for row in rows)
    return markdown_table([*MEASURED, "accuracy", *REGAINED], cells)


def read() -> list[Study]:
    """Return the studies of which something is judged."""
    return [
        Study(
            model,
            title,
            float(pd.read_csv(STUDIES / model / "judged.csv")["pruning_ratio"][0]),
            load(STUDIES / model / "dense.json"),
            load(STUDIES / model / "chosen.json"),
            {rule: load(STUDIES / model / f"regained_{rule}.json") for rule in RULES},
        )
        for model, title in TITLES.items()
        if (STUDIES / model / "chosen.json").exists()
    ]


def recommended(studies: list[Study]) -> str:
    """Return what recommended, without and with training, regains beside the best of each model's grid by either rule."""
    trained = [name.replace("regained", "trained") for name in REGAINED]
    lines = []
    for one in studies:
        rules: dict[str, list[str]] = {}
        for rule in RULES:
            rules.setdefault(one.chosen["grid"][rule], []).append(rule)
        for name, chosen_by in rules.items():
            rows = (one.rows(chosen_by[0])[one.chosen[step]["kl"]] for step in ("recommended", "trained"))
            shares = (share(row, measure) for row in rows for measure in MEASURES)
            lines.append([one.title, " and ".join(RULES[rule] for rule in chosen_by), f"`{name}`", *shares])
    return markdown_table(["model", "best of its grid by", "", *REGAINED, *trained], lines)


def of_model(one: Study) -> str:
    """Return what was judged of one model, and what each regains of what the best of the grid has lost."""
    head = ["", *MEASURED, "accuracy", *REGAINED]
    rows = [["original", "", f"{one.dense['ppl']:.2f}", "0", "0", "0", f"{one.dense['acc_mean']:.4f}", "", "", ""]]
    for name, title in one.titles().items():
        row = one.rows()[name]
        rows.append([title, *measured(row), f"{row['accuracy']:.4f}", *regained(row, one.chosen["grid"]["kl"])])
    return markdown_table(head, rows)


def of_ratios(one: Study) -> str:
    """Return the best of the grid and of recommended by KL at the other ratios; "" before they are judged."""
    rows = [
        [row["model"], *measured(row), *regained(row, one.chosen["grid"]["kl"])]
        for row in sorted(one.beside["kl"], key=lambda row: (row["model"], -row["kl_text"]))
        if row["model"] != one.label
    ]
    return markdown_table(["model", *MEASURED, *REGAINED], rows) if rows else ""


def transfer(studies: list[Study]) -> str:
    """Return what each model regains of the loss by its own grid's best where it is pruned by the best of another's: less than 0 is
    lost besides. "" of one model."""
    head = ["model", "rule", "its own best", "the best of", "", *REGAINED]
    lines = []
    for one in studies:
        for rule, title in RULES.items():
            own, rows = one.chosen["grid"][rule], one.rows(rule)
            for other in studies:
                name = other.chosen["grid"][rule]
                if other is one:
                    continue
                cells = ["not judged yet"] * 3 if name not in rows else [share(rows[name], each) for each in MEASURES]
                if name == own:
                    cells = ["the same"] * 3
                lines.append([one.title, title, f"`{own}`", other.title, f"`{name}`", *cells])
    return markdown_table(head, lines) if lines else ""


def main(argv: list[str] | None = None) -> int:
    script_parser(__doc__).parse_args(argv)
    studies = read()
    tables = [
        recommended(studies),
        transfer(studies),
        *(part(one) for one in studies for part in (of_model, of_ratios)),
        *map(searched, SEARCHED),
    ]
    print("\n\n".join(filter(None, tables)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
