"""docs/architecture.md's layer table, held against the imports of every module, read and not run; and the two promises
that are about running: analysis needs nothing heavy, and neither does `search --help`."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tune_prune"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TOP = tuple(  # each starts a command line; none is in the table
    f"tune_prune.{name}" for name in ("__main__", "shrink", "search", "prune", "evaluate", "speed", "analysis.__main__")
)
SIDE = "side"
PRUNED = "tune_prune.models.pruned"

# Packages that only some modules may import, at any level of nesting.
ONLY_IN = {
    "ray": ("tuning.ray", "tuning.nodes"),
    "optuna": ("tuning.sampler", "analysis.statistics.effects", "analysis.optuna_study"),
    "matplotlib": ("analysis.figures", "checkpoint.card"),
    "jinja2": ("analysis.render.templating", "checkpoint.card", "data.template_process"),
    "markupsafe": ("analysis.render.templating",),
    "gguf": ("checkpoint.gguf", "models.gguf.header", "models.gguf.convert"),
    "llama_cpp": ("checkpoint.gguf.llama_cpp_quantize",),
    "compressed_tensors": ("checkpoint.quantised_folder", "models.quantised"),
    "fsspec": ("core.store",),
    "tqdm": ("core.terminal",),
    "peft": ("pruning.compensation.recovery",),
    "tensorboard": ("tuning.observers.tensorboard",),
    "torch.utils.tensorboard": ("tuning.observers.tensorboard",),
    "mlflow": ("tuning.observers.tracking",),
    "wandb": ("tuning.observers.tracking",),
    "lm_eval": ("evaluation.zero_shot", "evaluation.encoding"),
    "datasets": ("data",),
    "mlx": ("models.pruned.mlx_tune_prune",),
    "mlx_lm": ("models.pruned.mlx_tune_prune",),
}
# Everything outside the standard library that a layer may import; layers that are not named may import anything else.
ALLOWED = {
    0: {"numpy", "pydantic", "pydantic_core", "filelock", "fsspec", "tqdm"},
    SIDE: {"numpy", "pandas", "pyarrow", "scipy", "statsmodels", "matplotlib", "jinja2", "markupsafe", "optuna"},
}
HEAVY = ("torch", "transformers", "ray", "lm_eval", "optuna", "datasets")


class _Imports(ast.NodeVisitor):
    """Every imported name of a module, functions' imports included; those for type checkers only where `types` are wanted."""

    def __init__(self, package: str, types: bool) -> None:
        self.package = package
        self.types = types
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if self.types or "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        # The class files travel in checkpoints, where they find each other by nothing else.
        assert node.level == (self.package == PRUNED and "tune_prune" in (node.module or "")), "a relative import"
        prefix = f"{self.package}." if node.level else ""
        self.found |= {f"{prefix}{node.module}.{alias.name}" for alias in node.names}


def in_source(source: str, package: str = "", types: bool = False) -> set[str]:
    visitor = _Imports(package, types)
    visitor.visit(ast.parse(source))
    return visitor.found


@cache
def imports(module: str, types: bool = False) -> frozenset[str]:
    return frozenset(in_source(MODULES[module].read_text(encoding="utf-8"), module.rpartition(".")[0], types))


def own(module: str, types: bool = False) -> set[str]:
    """Modules of this package that `module` imports."""
    found = set()
    for name in imports(module, types):
        if name.partition(".")[0] == "tune_prune":
            found.add(name if name in MODULES else name.rpartition(".")[0])
    assert found <= set(MODULES), f"{module} imports what does not exist: {found - set(MODULES)}"
    return found - {module}


def foreign(module: str) -> set[str]:
    return {name for name in imports(module) if name.partition(".")[0] not in sys.stdlib_module_names | {"tune_prune"}}


@cache
def layers() -> dict[str, int | str]:
    """module -> its layer, as the table in docs/architecture.md says."""
    table: dict[str, int | str] = {}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for layer, names in re.findall(r"^\| (\d|side) \| ([^|]+) \|", text, flags=re.MULTILINE):
        for name in re.findall(r"[a-z_]+", names):
            for module in MODULES:
                if f"{module}.".startswith(f"tune_prune.{name}."):
                    assert module not in table, f"{module} stands in two rows of the table"
                    table[module] = layer if layer == SIDE else int(layer)
    return table


def test_the_reader_sees_every_kind_of_import():
    source = """
import a, b.c as d
from e.f import g
if TYPE_CHECKING:
    import never
def f():
    import h
    class C:
        from i import j
try:
    import k
finally:
    pass
"""
    assert in_source(source) == {"a", "b.c", "e.f.g", "h", "i.j", "k"}
    assert in_source(source, types=True) == in_source(source) | {"never"}


def test_every_module_has_a_layer():
    assert set(MODULES) - set(layers()) - {"tune_prune", *TOP} == set()
    assert set(layers().values()) == {*range(7), SIDE}
    # What everyone imports imports nothing but the way to have something done when transformers is used.
    assert own("tune_prune") == {"tune_prune.models.registration"} and foreign("tune_prune") == {"wrapt"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module):
    mine = layers().get(module)
    for other in own(module) - {"tune_prune"}:
        theirs = layers().get(other)
        if module in ("tune_prune", *TOP):
            continue
        if mine == SIDE:
            allowed = theirs == SIDE or theirs == 0
        elif theirs == SIDE:
            allowed = mine in (5, 6)
        else:
            allowed = other not in TOP and theirs <= mine
        assert allowed, f"{module} (layer {mine}) imports {other} (layer {theirs})"


def test_no_import_cycle():
    # A cycle that is hidden in a function or in a type still ties the modules together.
    arrows = {module: own(module, types=True) if module != "tune_prune" else set() for module in MODULES}
    order = tuple(graphlib.TopologicalSorter(arrows).static_order())  # or CycleError
    assert set(order) >= set(MODULES)


def test_rooms_have_no_circle_either():
    def room(module: str) -> str:
        return module.split(".")[1]

    arrows: dict[str, set[str]] = {}
    for module in set(MODULES) - {"tune_prune", *TOP}:
        others = {room(other) for other in own(module, types=True) - {"tune_prune"}}
        arrows.setdefault(room(module), set()).update(others - {room(module)})
    order = tuple(graphlib.TopologicalSorter(arrows).static_order())  # or CycleError
    assert order[0] == "core" and set(order) >= set(arrows)


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_stay_in_their_rooms(module):
    short = module.removeprefix("tune_prune.")
    for name in foreign(module):
        for package, rooms in ONLY_IN.items():
            if f"{name}.".startswith(f"{package}."):
                assert any(f"{short}.".startswith(f"{room}.") for room in rooms), f"{module} imports {name}"
    allowed = ALLOWED.get(layers().get(module))
    if allowed is not None:
        others = {name.partition(".")[0] for name in foreign(module)} - allowed
        assert not others, f"{module} imports {sorted(others)}"


def test_each_rule_has_a_use():
    for package, rooms in ONLY_IN.items():
        users = {m for m in MODULES if any(f"{name}.".startswith(f"{package}.") for name in foreign(m))}
        if package != "tensorboard":  # used through torch
            assert users, f"nothing imports {package}"
            assert all(any(f"{user}.".startswith(f"tune_prune.{room}.") for user in users) for room in rooms)


def test_analysis_runs_where_nothing_heavy_is_installed(run_without):
    names = [name for name in MODULES if name.startswith("tune_prune.analysis")]
    assert len(names) > 3
    run_without(HEAVY, "".join(f"import {name}\n" for name in names))


@pytest.mark.parametrize("command", ["search", "prune", "evaluate", "speed"])
def test_help_versions_and_misspelt_names_need_nothing_heavy(command, run_without, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("search: grid\nmethod: [taylor, blokwise]\nseq_len: 16\nnum_samples: 8\n", encoding="utf-8")
    misspelt = {
        "search": [
            ["--search-space", "smok"],
            ["--search-space", str(space)],
            ["--calibration", "c5"],
            ["--tasks", "x"],
        ],
        "prune": [["--output", "x", "--method", "blokwise"], ["--output", "x", "--calibration", "c5"]],
        "evaluate": [["--tasks", "bolq"], ["--data-dir", "nowhere"]],
        "speed": [["--all"], ["--output", "."]],
    }[command]
    code = f"""
from tune_prune.commands import {command}
tiny = ["--model", "tiny-llama"]
wrong = [["--no-such-flag"], ["--model", "mistrall", "--output", "x"][: {2 if command == "search" else 4}], [*tiny, "--limit", "0"]]
wrong += [[*tiny, *flags] for flags in {misspelt}]
for arguments in (["--help"], ["--version"], *wrong):
    try:
        print("exit", {command}.main(arguments))
    except SystemExit as stop:
        print("exit", stop.code)
"""
    told = run_without((*HEAVY, "pandas", "numpy"), code)
    assert "--model" in told
    codes = re.findall(r"^exit (\S+)$", told, flags=re.MULTILINE)
    assert codes == ["0", "0"] + (3 + len(misspelt)) * ["2"]
