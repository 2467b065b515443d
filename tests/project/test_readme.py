"""What the README says is there, is there: models, methods, search spaces, commands and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tune_prune.cli.search_flags import parser
from tune_prune.core.values.hyperparameters import HYPERPARAMETERS
from tune_prune.models.catalog import HUB_ALIASES, aliases
from tune_prune.models.families import FAMILIES
from tune_prune.planning import search_space
from tune_prune.pruning.methods import load_method, method_names

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(header: str) -> list[list[str]]:
    """The cells of the table whose first column is called `header`."""
    rows = re.search(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert rows, f"no table of {header}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.group(1).splitlines()]


def test_the_models_are_those_of_the_catalog() -> None:
    rows = table("alias")
    named = [alias for row in rows for alias in re.findall(r"`(.+?)`", row[0])]
    assert sorted(named) == sorted(aliases())
    for row in rows:
        for alias in re.findall(r"`(.+?)`", row[0]):
            assert alias not in HUB_ALIASES or HUB_ALIASES[alias].rpartition("/")[2] in row[1]
            assert set(row[2].split(", ")) <= set(FAMILIES)
    families = re.search(r"Any other model of the families (.*) works", README)
    assert families
    assert set(re.split(r", | and ", families.group(1))) == set(FAMILIES)


def test_the_methods_are_those_of_the_code_with_their_papers() -> None:
    rows = {row[0].strip("`"): row for row in table("method")}
    assert sorted(rows) == sorted(method_names())
    for name, row in rows.items():
        (file,) = (ROOT / "tune_prune" / "pruning" / "methods").rglob(f"{load_method(name).name}.py")
        for paper in re.findall(r"arxiv\.org/abs/(\d+\.\d+)", row[2]):
            assert paper in file.read_text() + (ROOT / "docs" / "methods.md").read_text(), paper


def test_the_search_spaces_are_those_that_are_shipped() -> None:
    rows = {re.search(r"`(.+?)`", row[0]).group(1): row[1] for row in table("search space")}  # type: ignore[union-attr]
    assert sorted(rows) == sorted(search_space.names())
    for name, text in rows.items():
        size = search_space.load(name).size
        assert str(size) in text or (name, text) == ("minimal", "3 methods with 4 samples")


def test_every_hyperparameter_is_named() -> None:
    assert [name for name in HYPERPARAMETERS if f"`{name}`" not in README] == []


def test_every_benchmark_named_is_there() -> None:
    named = set(re.findall(r"scripts/(bench_\w+\.py)", README))
    assert named <= {path.name for path in (ROOT / "scripts").glob("bench_*.py")}  # docs/studies/costs.md names all


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_the_ways_to_search_can_be_run_one_after_the_other() -> None:
    """Adaptive searches of one experiment have one objective."""
    objectives: dict[object, str] = {}
    for line in re.findall(r"^    python -m tune_prune\.search (--model .+?)(?: +#|$)", README, re.MULTILINE):
        found = parser().parse_args(shlex.split(line))
        experiment = found.name or (*found.model, found.search_space)
        assert objectives.setdefault(experiment, found.objective) == found.objective, line
