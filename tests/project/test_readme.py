"""What README and the pages behind it list is there, and is all: models, methods, search spaces, commands, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tune_prune.models.catalog import HUB_ALIASES, aliases
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.methods import load_method, method_names
from tune_prune.tuning import space

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def table(name: str, header: str) -> list[list[str]]:
    """The cells of the page's table whose first column is called `header`."""
    rows = re.search(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page(name), re.MULTILINE)
    assert rows, f"no table of {header}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.group(1).splitlines()]


def test_the_models_are_those_of_the_catalog() -> None:
    rows = table("models", "alias")
    named = [alias for row in rows for alias in re.findall(r"`(.+?)`", row[0])]
    assert sorted(named) == sorted(aliases())
    for row in rows:
        for alias in re.findall(r"`(.+?)`", row[0]):
            assert alias not in HUB_ALIASES or HUB_ALIASES[alias].rpartition("/")[2] in row[1]
            assert set(row[2].split(", ")) <= set(FAMILIES)
    families = re.search(r"Any other model of the families (.*) works", page("models"))
    assert families
    assert set(re.split(r", | and ", families.group(1))) == set(FAMILIES)


def test_the_methods_are_those_of_the_code_with_their_papers() -> None:
    rows = {row[0].strip("`"): row for row in table("methods", "method")}
    assert sorted(rows) == sorted(method_names())
    for name, row in rows.items():
        (file,) = (ROOT / "tune_prune" / "pruning" / "methods").rglob(f"{load_method(name).name}.py")
        for paper in re.findall(r"arxiv\.org/abs/(\d+\.\d+)", row[2]):
            assert paper in file.read_text() + page("methods").partition("\n## Words and notation")[2], paper


def test_the_search_spaces_are_those_that_are_shipped() -> None:
    rows = {re.search(r"`(.+?)`", row[0]).group(1): row[1] for row in table("search_spaces", "search space")}  # type: ignore[union-attr]
    assert sorted(rows) == sorted(space.names())
    for name, text in rows.items():
        size = space.load(name).size
        assert str(size) in text or (name, text) == ("minimal", "3 methods with 4 samples")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_the_readme_is_read_in_one_sitting() -> None:
    """Its length, and the two commands that set up a fresh machine."""
    assert len(README.splitlines()) <= 170 and len(README.split()) <= 1500
    assert "`make demo`" in README and "`make test`" in README
