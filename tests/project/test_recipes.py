"""docs/recipes.md: every command of it is one that its parser reads; adaptive searches of one experiment have one objective."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from tests.documents import blocks, statements
from tune_prune.__main__ import COMMANDS
from tune_prune.cli.search_flags import parser

ROOT = Path(__file__).parents[2]
LINES = [
    shlex.split(line, comments=True)[1:]
    for block in blocks(ROOT / "docs" / "recipes.md")
    if block.language == "bash"
    for line in statements(block.text)
    if line.startswith("tune-prune ")
]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_is_read(words: list[str]) -> None:
    importlib.import_module(COMMANDS[words[0]][0]).parser().parse_args(words[1:])


def test_the_searches_can_be_run_one_after_the_other() -> None:
    objectives: dict[object, str] = {}
    for words in LINES:
        found = parser().parse_args(words[1:]) if words[0] == "search" else None
        if found and found.model:
            experiment = found.name or (*found.model, found.search_space)
            assert objectives.setdefault(experiment, found.objective) == found.objective, words


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.*")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+)[)#]", index))
