"""Pages for users: parsers read the commands of README and docs/recipes.md, perplexities of docs/questions.md are those of the
records, every page is in the index."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shlex
from pathlib import Path
from statistics import geometric_mean

import pytest

from tests.documents import blocks, statements
from tune_prune.__main__ import COMMANDS
from tune_prune.commands.search import parser

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "docs" / "studies" / "smollm2-135m"
QUESTIONS = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
LINES = [
    shlex.split(line, comments=True)[1:]
    for document in ("README.md", "docs/recipes.md")
    for block in blocks(ROOT / document)
    if block.language == "bash"
    for line in statements(block.text)
    if line.startswith("tune-prune ")
]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_is_read(words: list[str]) -> None:
    assert vars(importlib.import_module(COMMANDS[words[0]][0]).parser().parse_args(words[1:]))  # else argparse exits


def test_the_searches_can_be_run_one_after_the_other() -> None:
    """Adaptive searches of one experiment have one objective."""
    objectives: dict[object, str] = {}
    for words in LINES:
        found = parser().parse_args(words[1:]) if words[0] == "search" else None
        if found and found.model:
            experiment = found.name or (*found.model, found.search_space)
            assert objectives.setdefault(experiment, found.objective) == found.objective, words


def test_perplexities_are_those_of_the_records() -> None:
    def recorded(name: str, configuration: str, model: str = "smollm2") -> float:
        rows = json.loads((STUDY / f"quality_{name}.json").read_text(encoding="utf-8"))
        (found,) = (row["ppl"] for row in rows if (row["configuration"], row["model"]) == (configuration, model))
        return found

    random = csv.DictReader((STUDY / "control.csv").read_text(encoding="utf-8").splitlines())
    rows = {
        "original": json.loads((STUDY / "dense.json").read_text(encoding="utf-8"))["ppl"],
        "best method of the": recorded("grid", "taylor-s256-n128"),
        "a better method": recorded("draws", "gate_fisher-s128-n128-least_squares"),
        "the best recipe": recorded(
            "two_steps_trained", "gate_fisher-s128-n512-least_squares-t131072-lora-i400-e0.003-k2"
        ),
    }
    for row, value in rows.items():
        assert re.search(rf"^\| {row}.* \| {value:.1f} \|$", QUESTIONS, re.MULTILINE), (row, value)
    assert f"| random removal | {geometric_mean(float(row['ppl']) for row in random):,.0f} |" in QUESTIONS
    trained = "gate_fisher-s128-n256-least_squares-t65536-lora-e0.003"
    small, large, half = (recorded("ratios", trained, f"smollm2@{ratio}") for ratio in ("0.1", "0.35", "0.5"))
    assert f"{small:.1f} at 10%, {large:.1f} at 35% and {half:.1f} at 50%" in QUESTIONS


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.*")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+)[)#]", index))
