"""Pages that list what the code has, list all of it: keys of search spaces, benchmarks, versions; what they point to exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import tune_prune
from tune_prune.commands.options import RUN_DEFAULTS
from tune_prune.core.hyperparameters import HYPERPARAMETERS, Hyperparameter
from tune_prune.pruning.methods import load_method, method_names
from tune_prune.tuning import space

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "ray_results/README.md")),
]
ROOMS = ("tune_prune", "scripts", "tests")
MADE = ("rootlayer.py", "rest.py")  # by the reader of a recipe
SPACES = (ROOT / "docs" / "search_spaces.md").read_text(encoding="utf-8")


def hyperparameter_row(row: Hyperparameter) -> str:
    default = "required" if row.required else f"that of `{row.flag}`" if row.of_run else f"`{row.default}`"
    if row.name == "shape":
        default = RUN_DEFAULTS["shape"]
    text = re.sub(r" {2,}", ": ", row.help).replace("\n", "; ")  # of a value a line
    return f"| `{row.name}` | {row.kind} | {default} | `{row.example}` | {text} |"


def use_row(row: Hyperparameter) -> str:
    """Where a value stands in names, which methods read it, and what TPE sees."""
    shown = "not in it" if row.name_prefix is None else f"`{row.name_prefix}{row.kind.read(row.example)}`"
    if row.read_by == "statistics":
        readers = ", ".join(f"`{name}`" for name in method_names() if row.name in load_method(name).reads)
    else:
        readers = "all methods"
    if row.name == "pruning_ratio":
        values = "not chosen by TPE: each ratio is searched by itself"
    else:
        values = "categories" if row.kind.is_text else "their rank"
    return f"| `{row.name}` | {shown} | {readers} | {values} |"


def test_every_key_of_a_search_space_is_described() -> None:
    rows = [build(row) for build in (hyperparameter_row, use_row) for row in HYPERPARAMETERS.values()]
    assert [row for row in rows if row not in SPACES] == []
    keys = re.findall(r"^\| `(\w+)` \|", SPACES.partition("## How it is searched")[2], re.MULTILINE)
    assert keys == ["search", "num_trials", *HYPERPARAMETERS, *HYPERPARAMETERS]


def test_the_example_is_the_search_space_that_the_page_says(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", SPACES, re.DOTALL)
    count = re.search(r"These are (\d+) configurations", SPACES)
    assert example and count
    (tmp_path / "example.yaml").write_text(example.group(1), encoding="utf-8")
    assert len(space.load(str(tmp_path / "example.yaml")).configs()) == int(count.group(1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_modules_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(((?!http)[^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    modules = re.findall(r"`((?:[\w-]+/)*\w+\.py)`", text)
    files = [f"/{path.relative_to(ROOT).as_posix()}" for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert [name for name in modules if name not in MADE and not any(file.endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize(("name", "beginning"), [
    ("ray_results/README.md", "| `space` |"),
    ("ray_results/README.md", "| `config` |"),
    ("ray_results/README.md", "| `method`, "),
    ("docs/architecture.md", "| hyperparameter |"),
])  # fmt: skip
def test_lists_of_hyperparameters_are_whole(name: str, beginning: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(beginning))
    assert [one for one in HYPERPARAMETERS if not re.search(rf"\b{one}\b", line)] == []


def test_every_benchmark_is_described() -> None:
    page = (ROOT / "docs" / "studies" / "costs.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "scripts").glob("bench_*.py")} - {"bench_common.py", "bench_lm_eval.py"}
    assert set(re.findall(r"`python scripts/(bench_\w+\.py)`", page)) == scripts


def test_one_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert released[0] == (citation["version"], citation["date-released"])
    assert citation["version"] == tune_prune.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version"] and citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Repository"]
