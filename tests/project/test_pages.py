"""Pages list what is there, and all of it: models, methods, search spaces, keys, benchmarks, commands, links, one version."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import tune_prune
from tests.documents import blocks, statements
from tune_prune.checkpoint.gguf.architecture import ARCHITECTURES
from tune_prune.commands.options import CommandLine
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.models.catalog import HUB_ALIASES, aliases
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.methods import method_names
from tune_prune.tuning import space

ROOT = Path(__file__).parents[2]
ROOTS = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "ray_results/README.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in ROOTS)]
MADE = ("rootlayer.py", "rest.py")  # by the reader of a recipe
LINES = [
    shlex.split(line, comments=True)[1:]
    for document in ("README.md", "docs/recipes.md")
    for block in blocks(ROOT / document)
    if block.language == "bash"
    for line in statements(block.text)
    if line.startswith("tune-prune ")
]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(name: str, header: str) -> dict[str, list[str]]:
    """The rows of the page's table whose first column is called `header`, by the names in that column."""
    rows = re.search(rf"^\| {header} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page(f"docs/{name}.md"), re.MULTILINE)
    assert rows, f"no table of {header}"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.group(1).splitlines()]
    return {named: row[1:] for row in cells for named in re.findall(r"`(.+?)`", row[0])}


def test_the_models_are_those_of_the_catalog() -> None:
    rows = table("models", "alias")
    assert sorted(rows) == sorted(aliases())
    for alias, (hub, families, *_) in rows.items():
        assert alias not in HUB_ALIASES or HUB_ALIASES[alias].rpartition("/")[2] in hub
        assert set(families.split(", ")) <= set(FAMILIES)
    families = table("models", "family")
    assert set(families) == set(FAMILIES)
    for name, (_, pruned, *_, gguf, _) in families.items():
        assert pruned == {"attention": "attention and MLP", "mlp": "MLP"}[FAMILIES[name].prunes[0]]
        assert (gguf == "no") == (name not in ARCHITECTURES)


def test_the_methods_and_search_spaces_are_those_that_are_shipped() -> None:
    assert sorted(table("methods", "method")) == sorted(method_names())
    rows = table("search_spaces", "search space")
    assert sorted(rows) == sorted(space.names())
    for name, (text, *_) in rows.items():
        assert str(space.load(name).size) in text or name == "minimal"


def test_every_key_of_a_search_space_is_described_and_the_example_is_as_large_as_it_says(tmp_path: Path) -> None:
    text = page("docs/search_spaces.md")
    assert [name for name in HYPERPARAMETERS if f"\n| `{name}` | " not in text] == []
    example, count = re.search(r"```yaml\n(.*?)```", text, re.DOTALL), re.search(r"These are (\d+) config", text)
    assert example and count
    (tmp_path / "example.yaml").write_text(example.group(1), encoding="utf-8")
    assert len(space.load(str(tmp_path / "example.yaml")).configs()) == int(count.group(1))


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("ray_results/README.md", "| `space` |"),
        ("ray_results/README.md", "| `config` |"),
        ("ray_results/README.md", "| `method`, "),
        ("docs/architecture.md", "| hyperparameter |"),
    ],
)
def test_lists_of_hyperparameters_are_whole(name: str, beginning: str) -> None:
    (line,) = (line for line in page(name).splitlines() if line.startswith(beginning))
    assert [one for one in HYPERPARAMETERS if not re.search(rf"\b{one}\b", line)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_modules_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(((?!http)[^)#]+)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    files = [
        f"/{file.relative_to(ROOT)}"
        for room in ("tune_prune", "scripts", "tests")
        for file in (ROOT / room).rglob("*.py")
    ]
    modules = set(re.findall(r"`((?:[\w-]+/)*\w+\.py)`", text)) - set(MADE)
    assert [name for name in modules if not any(file.endswith(f"/{name}") for file in files)] == []


def test_every_page_is_in_the_index_and_every_benchmark_on_its_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.*")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+)[)#]", page("docs/README.md")))
    scripts = {path.name for path in (ROOT / "scripts").glob("bench_*.py")} - {"bench_common.py", "bench_lm_eval.py"}
    assert set(re.findall(r"`python scripts/(bench_\w+\.py)`", page("docs/studies/costs.md"))) == scripts


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_command_is_read(words: list[str]) -> None:
    assert vars(CommandLine(words[0]).parse_args(words[1:]))  # else argparse exits


def test_one_version() -> None:
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", page("CHANGELOG.md"), re.MULTILINE)
    citation = yaml.safe_load(page("CITATION.cff"))
    assert released[0] == (citation["version"], citation["date-released"])
    project = tomllib.loads(page("pyproject.toml"))["project"]
    assert project["dynamic"] == ["version"] and citation["version"] == tune_prune.__version__


def test_the_readme_is_read_in_one_sitting() -> None:
    """Its length, and the two commands that set up a fresh machine."""
    readme = page("README.md")
    assert len(readme.splitlines()) <= 170 and len(readme.split()) <= 1500
    assert "`make demo`" in readme and "`make test`" in readme
