"""Reads a search space: the YAML file that names the configurations a search may try.

    search: grid                              # grid: every combination; optuna: a sampler picks num_trials of them
    method: [taylor, layerwise, blockwise]
    seq_len: [64, 128]                        # tokens per calibration sample
    num_samples: [128, 256]                   # calibration samples
    pruning_ratio: [0.1, 0.2]                 # optional; fractions of all parameters, each searched by itself
    removal_divisor: 5                        # optional; removal losses use the first num_samples // 5 samples
    steps: [1, 4]                             # optional; steps in which the groups are removed, with new statistics for each
    shape: [free, aligned]                    # optional; free, aligned or uniform, these two also with a number: aligned-128
    seeds: [0, 1, 2]                          # optional; draws of calibration samples, else that of --seed
    compensation: [none, least_squares]       # optional; with a refit also damping: 0.1 and refit_tokens: 16384
    recovery: [none, lora]                    # optional; with a training also recovery_steps: 100 and recovery_rate: 0.001
    num_trials: 6                             # search: optuna only; per model, pruning ratio and recovery

A key is a row of core.hyperparameters, with one value (it is fixed) or a list (it is searched). The reader is strict
and reports every problem of the file at once, each with its line.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml

import tune_prune
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hyperparameters import HYPERPARAMETERS, OF_RUN, OLDER_NAMES, RECIPE, unread
from tune_prune.core.kinds import Kind, Whole
from tune_prune.pruning.methods import NO_STEPS, load_method, method_names

SEARCHES = ("grid", "optuna")
NUM_TRIALS = Whole(1, 10**9)
MAX_POINTS = 100_000  # combinations: a plan looks at each of them, which takes a minute then


@dataclass(frozen=True)
class SearchSpace:
    """A finite set of pruning configurations and how to search it."""

    name: str
    path: Path
    search: str  # "grid" or "optuna"
    num_trials: int | None  # what optuna tries per model, pruning ratio and recovery; None for a grid
    values: dict[str, tuple[Any, ...]]  # of every hyperparameter; a shape may still be "aligned", without its number
    given: Collection[str]  # hyperparameters that the file names; the others have their defaults
    reads: Mapping[str, frozenset[str]]  # method -> hyperparameters that its statistics depend on

    @property
    def combinations(self) -> int:
        """Count the combinations of its values: at least as many as there are configurations."""
        return prod(map(len, self.values.values()))

    @property
    def size(self) -> int:
        """Count the configurations at each pruning ratio."""
        return len(self._points()) // len(self.values["pruning_ratio"])

    @property
    def largest_group(self) -> int:
        """The most configurations that are compared with each other: those at one pruning ratio with one recovery."""
        return max(Counter((point["pruning_ratio"], point["recovery"]) for point in self._points()).values())

    def _points(self) -> list[dict[str, Any]]:
        """Return the values of every distinct configuration, methods innermost: neighbours share their passes.

        Configurations that differ only in what their method does not read are one: it has the first value of each such list (one
        step), and the run's seed. So are those without a refit, or a recovery, that differ only in what one reads: they have its
        defaults.
        """
        others = [name for name in HYPERPARAMETERS if name != "method"]
        points = {}
        for *point, method in product(*(self.values[name] for name in others), self.values["method"]):
            values = {"method": method} | dict(zip(others, point, strict=True))
            values |= {name: RECIPE[name].default for name in unread(values)}
            # A recipe draws samples, too, of its own length.
            drawn = frozenset(OF_RUN if any(values[row.switch] != "none" for row in RECIPE.values()) else ())
            for name in others:
                row = HYPERPARAMETERS[name]
                if row.read_by == "statistics" and name not in self.reads[method] | drawn:
                    values[name] = None if row.of_run else row.default if row.later else self.values[name][0]
            points[tuple(values.values())] = values
        return list(points.values())

    def configs(self) -> tuple[PruningConfig, ...]:
        """Return its distinct configurations; no shape may lack its number."""
        return tuple(PruningConfig(**point) for point in self._points())


def folder() -> Path:
    """Return where the search spaces of tune_prune are: in the installed package, or beside that of a checkout."""
    package = Path(tune_prune.__file__).parent
    installed = package / "search_spaces"
    return installed if installed.is_dir() else package.parent / "search_spaces"


def names() -> tuple[str, ...]:
    """Return the names of the search spaces that come with tune_prune."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def load(name_or_path: str) -> SearchSpace:
    """Return the search space of that name (one of `names()`) or in that YAML file.

    Raises UserError with one line per problem: `<file>:<line>: <problem>`.
    """
    path = _find(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"search space {path} cannot be read ({error}); name a YAML text file") from error
    return _Reader(path).read(text)


def _find(name_or_path: str) -> Path:
    path = folder() / f"{name_or_path}.yaml" if name_or_path in names() else Path(os.path.expanduser(name_or_path))
    if path.is_file():
        return path
    choices = f"{did_you_mean(path.stem, names())}, or the path of a YAML file"
    if path.is_dir():
        raise UserError(f"search space {name_or_path!r} is a folder; name a file in it")
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UserError(f"search space file {name_or_path!r} does not exist; {choices}")
    raise UserError(f"search space {name_or_path!r} is unknown; {choices}")


class _Reader:
    """Walks the YAML nodes (they know their lines) and collects problems instead of stopping at the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.methods = method_names()
        self.shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        self.problems: list[tuple[int, int, str]] = []  # line, column, text; both from 1

    def read(self, text: str) -> SearchSpace:
        nodes = self._mapping(text)
        given = {name: self._values(name, node) for name, node in nodes.items() if name in HYPERPARAMETERS}
        search = self._search(nodes.get("search"))
        num_trials = self._value("num_trials", NUM_TRIALS, nodes["num_trials"]) if "num_trials" in nodes else None
        values = {
            name: given.get(name, () if row.required else (row.default,)) for name, row in HYPERPARAMETERS.items()
        }
        # Methods import torch, which takes seconds: not where the file has problems to tell of.
        methods = [] if self.problems else [load_method(name) for name in values["method"]]
        reads = {method.name: method.reads for method in methods}
        off = {name for name in RECIPE if values[name] == ("none",)}
        for name in given.keys() & {name for name, row in RECIPE.items() if row.of in off}:
            switch = RECIPE[RECIPE[name].of]
            self._problem(
                nodes[name], f"{name} is read by no trial; add `{switch.name}: {switch.example}`, or remove it"
            )
        alone = [name for name, read in reads.items() if "steps" not in read]
        if alone and 1 not in values["steps"]:
            self._problem(nodes["steps"], f"steps lists no 1, but {alone[0]} {NO_STEPS}; add 1, or remove {alone[0]}")
        for method, by in product(methods, given.get("normalization", ())):
            try:
                method.check_normalization(by)
            except UserError as error:
                self._problem(nodes["normalization"], str(error))
        if self.problems:
            raise self._error()
        return SearchSpace(self.path.stem, self.path, search or "", num_trials, values, frozenset(given), reads)

    def _error(self) -> UserError:
        lines = [f"{self.shown}:{line}: {problem}" for line, _, problem in sorted(self.problems)]
        return UserError("\n".join([f"{self.shown} has {len(lines)} problem{'s' * (len(lines) > 1)}:", *lines]))

    def _problem(self, node: yaml.Node, text: str) -> None:
        self.problems.append((node.start_mark.line + 1, node.start_mark.column + 1, text))

    def _mapping(self, text: str) -> dict[str, yaml.Node]:
        """Return the nodes of the known keys; a file that is no mapping at all ends the reading here."""
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            cause = getattr(error, "problem", None) or getattr(error, "context", None) or " ".join(str(error).split())
            column = f"column {mark.column + 1}: " if mark else ""
            self.problems.append((mark.line + 1 if mark else 1, 1, f"{column}not valid YAML: {cause}"))
            raise self._error() from error
        if not isinstance(root, yaml.MappingNode):
            problem = "is empty" if root is None else "is not a mapping"
            self.problems.append((1, 1, f"the file {problem}; write one `key: value` per line: {', '.join(_EXAMPLES)}"))
            raise self._error()
        nodes: dict[str, yaml.Node] = {}
        first_line: dict[str, int] = {}
        for key, value in root.value:
            written = key.value if isinstance(key, yaml.ScalarNode) else "[...]"
            name = OLDER_NAMES.get(written, written)
            if name in first_line:
                same = "" if name == written else f", of which {written!r} is another name,"
                self._problem(key, f"key {name!r}{same} is given twice (first in line {first_line[name]}); keep one")
                continue
            first_line[name] = key.start_mark.line + 1
            if name in _KEYS:
                nodes[name] = value
            else:
                self._problem(key, f"unknown key {name!r}; {did_you_mean(name, _KEYS)}")
        for name in _EXAMPLES:
            if name not in nodes:
                self._problem(root, f"key {name!r} is missing; add it, e.g. `{name}: {_EXAMPLES[name]}`")
        return nodes

    def _search(self, node: yaml.Node | None) -> str | None:
        if node is not None and isinstance(node, yaml.ScalarNode) and node.value in SEARCHES:
            return str(node.value)
        if node is not None:
            self._problem(node, f"search is {_shown(node)}; {did_you_mean(str(node.value), SEARCHES)}")
        return None

    def _values(self, name: str, node: yaml.Node) -> tuple[Any, ...]:
        """Return the values of a list, or the one of a scalar; fewer after noting a problem."""
        row = HYPERPARAMETERS[name]
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not items:
            self._problem(node, f"{name} is an empty list; give at least one value, e.g. `{name}: [{row.example}]`")
        values: list[Any] = []
        for item in items:
            value = self._value(name, row.kind, item)
            if value is not None and value in values:
                self._problem(item, f"{name} lists {value!r} twice; keep one")
            elif isinstance(value, float) and f"{value:g}" in {
                f"{other:g}" for other in values
            }:  # as in names and labels
                self._problem(item, f"{name} lists {value!r} beside one that has the same six digits; keep one")
            elif name == "method" and value is not None and value not in self.methods:
                self._problem(item, f"unknown method {value!r}; {did_you_mean(value, self.methods)}")
            elif value is not None:
                values.append(value)
        return tuple(values)

    def _value(self, name: str, kind: Kind, node: yaml.Node) -> Any:
        """Return the value of a scalar, or None after noting a problem.

        Numbers are read as Python does: YAML 1.1 takes 1e-1 for text and 010 for eight."""
        if isinstance(node, yaml.ScalarNode) and (_is(node, "str") if kind.is_text else node.style is None):
            with suppress(ValueError):
                return kind.read(node.value)
        self._problem(node, f"{name} is {_shown(node)}; it must be {kind}")
        return None


_KEYS = ("search", *HYPERPARAMETERS, "num_trials")
_EXAMPLES = {"search": "grid"} | {name: f"[{row.example}]" for name, row in HYPERPARAMETERS.items() if row.required}


def _is(node: yaml.Node, kind: str) -> bool:
    return bool(node.tag == f"tag:yaml.org,2002:{kind}")


def _shown(node: yaml.Node) -> str:
    """Return how an error shows a value: what the user wrote, and its type where that is the surprise."""
    if not isinstance(node, yaml.ScalarNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    if _is(node, "bool"):
        return f"{node.value} (true or false)"
    if _is(node, "null"):
        return "empty"
    return f"the text {node.value!r:.60}" if _is(node, "str") else f"{node.value:.60}"
