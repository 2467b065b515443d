"""Reads a search space: the YAML file that names the configurations a search may try.

    search: grid                              # grid: every combination; optuna: a sampler picks num_trials of them
    method: [taylor, layerwise, blockwise]
    taylor_seq_len: [64, 128]                 # tokens per calibration sample
    taylor_num_samples: [128, 256]            # calibration samples
    pruning_ratio: 0.2                        # optional; fraction of all parameters to remove
    removal_divisor: 5                        # optional; removal losses use the first taylor_num_samples // 5 samples
    shape: aligned                            # optional; free, aligned, aligned-N (e.g. aligned-128) or uniform
    num_trials: 6                             # search: optuna only

The reader is strict and reports every problem of the file at once, each with its line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

import tune_prune
from tune_prune.core.config import SHAPES, PruningConfig, alignment
from tune_prune.core.errors import UserError, did_you_mean

SEARCHES = ("grid", "optuna")
SEQ_LEN_BOUNDS = (2, 131_072)
NUM_SAMPLES_BOUNDS = (1, 1_000_000)

_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_REQUIRED = ("search", "method", "taylor_seq_len", "taylor_num_samples")
_OPTIONAL = ("pruning_ratio", "removal_divisor", "shape", "num_trials")


@dataclass(frozen=True)
class SearchSpace:
    """A finite set of pruning configurations and how to search it."""

    name: str
    path: Path
    search: str  # "grid" or "optuna"
    num_trials: int | None  # how many configurations optuna tries; None for a grid
    method: tuple[str, ...]
    seq_len: tuple[int, ...]
    num_samples: tuple[int, ...]
    pruning_ratio: float | None = None  # None: the command line's
    removal_divisor: int = 5
    shape: str | None = None  # free, aligned, aligned-N or uniform; None: the command line's

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return len(self.method) * len(self.seq_len) * len(self.num_samples)

    def configs(self, pruning_ratio: float, shape: str = "free") -> tuple[PruningConfig, ...]:
        """Every configuration at `pruning_ratio` and `shape`, seq_len outermost: neighbours share their gradient pass."""
        return tuple(
            PruningConfig(method, seq_len, num_samples, pruning_ratio, self.removal_divisor, shape)
            for seq_len, num_samples, method in product(self.seq_len, self.num_samples, self.method)
        )


def folder() -> Path:
    """Where the search spaces that come with tune_prune are: in the installed package, or beside a checkout's."""
    package = Path(tune_prune.__file__).parent
    installed = package / "search_spaces"
    return installed if installed.is_dir() else package.parent / "search_spaces"


def names() -> tuple[str, ...]:
    """The search spaces that come with tune_prune."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def load(name_or_path: str, known_methods: Collection[str]) -> SearchSpace:
    """The search space of that name (one of `names()`) or in that YAML file.

    Raises UserError with one line per problem: `<file>:<line>: <problem>`.
    """
    path = _find(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"search space {path} cannot be read ({error}); name a YAML text file") from error
    return _Reader(path, known_methods).read(text)


def _find(name_or_path: str) -> Path:
    if name_or_path in names():
        return folder() / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    known = f"{did_you_mean(path.stem, names())}, or the path of a YAML file"
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UserError(f"search space file {name_or_path!r} does not exist; {known}")
    raise UserError(f"search space {name_or_path!r} is unknown; {known}")


class _Reader:
    """Walks the YAML nodes (they know their lines) and collects problems instead of stopping at the first."""

    def __init__(self, path: Path, known_methods: Collection[str]) -> None:
        self.path = path
        self.known_methods = known_methods
        self.shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        self.problems: list[tuple[int, int, str]] = []  # line, column, text; both from 1

    def read(self, text: str) -> SearchSpace:
        nodes = self._mapping(text)
        values = {name: getattr(self, f"_{name}")(node) for name, node in nodes.items()}
        self._check_num_trials(nodes, values)
        if self.problems:
            raise self._error()
        return SearchSpace(
            name=self.path.stem,
            path=self.path,
            search=values["search"],
            num_trials=values.get("num_trials"),
            method=values["method"],
            seq_len=values["taylor_seq_len"],
            num_samples=values["taylor_num_samples"],
            pruning_ratio=values.get("pruning_ratio"),
            removal_divisor=values.get("removal_divisor", SearchSpace.removal_divisor),
            shape=values.get("shape"),
        )

    def _error(self) -> UserError:
        lines = [f"{self.shown}:{line}: {problem}" for line, _, problem in sorted(self.problems)]
        return UserError("\n".join([f"{self.shown} has {len(lines)} problem{'s' * (len(lines) > 1)}:", *lines]))

    def _problem(self, node: yaml.Node, text: str) -> None:
        self.problems.append((node.start_mark.line + 1, node.start_mark.column + 1, text))

    def _mapping(self, text: str) -> dict[str, yaml.Node]:
        """The nodes of the known keys; a file that is no mapping at all ends the reading here."""
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            self.problems.append((line, column, f"column {column}: not valid YAML: {error.problem or error.context}"))
            raise self._error() from error
        except (yaml.YAMLError, RecursionError) as error:
            self.problems.append((1, 1, f"not valid YAML: {' '.join(str(error).split())}"))
            raise self._error() from error
        if not isinstance(root, yaml.MappingNode):
            what = "is empty" if root is None else "is not a mapping"
            self.problems.append((1, 1, f"the file {what}; write one `key: value` per line: {', '.join(_REQUIRED)}"))
            raise self._error()
        nodes: dict[str, yaml.Node] = {}
        first_line: dict[str, int] = {}
        for key, value in root.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "[...]"
            if name in first_line:
                self._problem(key, f"key {name!r} is given twice (first in line {first_line[name]}); keep one")
                continue
            first_line[name] = key.start_mark.line + 1
            if name in _REQUIRED + _OPTIONAL:
                nodes[name] = value
            else:
                self._problem(key, f"unknown key {name!r}; {did_you_mean(name, _REQUIRED + _OPTIONAL)}")
        for name in _REQUIRED:
            if name not in nodes:
                self._problem(root, f"key {name!r} is missing; add it, e.g. `{_EXAMPLES[name]}`")
        return nodes

    # One method per key, named after it. Each returns the value, or None after noting a problem.

    def _search(self, node: yaml.Node) -> str | None:
        text = self._text(node, "search")
        if text is not None and text not in SEARCHES:
            self._problem(node, f"search is {text!r}; {did_you_mean(text, SEARCHES)}")
        return text

    def _method(self, node: yaml.Node) -> tuple[str, ...] | None:
        return self._list(node, "method", self._one_method)

    def _taylor_seq_len(self, node: yaml.Node) -> tuple[int, ...] | None:
        return self._list(node, "taylor_seq_len", lambda item: self._integer(item, "taylor_seq_len", *SEQ_LEN_BOUNDS))

    def _taylor_num_samples(self, node: yaml.Node) -> tuple[int, ...] | None:
        name = "taylor_num_samples"
        return self._list(node, name, lambda item: self._integer(item, name, *NUM_SAMPLES_BOUNDS))

    def _pruning_ratio(self, node: yaml.Node) -> float | None:
        """A fraction above 0 and below 1; YAML 1.1 takes 1e-1 for text, so plain scalars are read as Python does."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None and not _is(node, "bool")
        try:
            ratio = float(node.value) if plain else math.nan
        except ValueError:
            ratio = math.nan
        if 0 < ratio < 1:
            return ratio
        self._problem(node, f"pruning_ratio is {_shown(node)}; it must be a number above 0 and below 1, e.g. 0.2")
        return None

    def _removal_divisor(self, node: yaml.Node) -> int | None:
        return self._integer(node, "removal_divisor", 1, NUM_SAMPLES_BOUNDS[1])

    def _shape(self, node: yaml.Node) -> str | None:
        text = self._text(node, "shape")
        if text is None or text in SHAPES:
            return text
        try:
            alignment(text)
        except UserError:
            known = did_you_mean(text, (*SHAPES, "aligned-N"))
            self._problem(node, f"shape is {text!r}; {known}, N a whole number from 1, e.g. aligned-64")
            return None
        return text

    def _num_trials(self, node: yaml.Node) -> int | None:
        return self._integer(node, "num_trials", 1, None)

    def _check_num_trials(self, nodes: dict[str, yaml.Node], values: dict[str, Any]) -> None:
        """What several keys say together."""
        search, node, num_trials = values.get("search"), nodes.get("num_trials"), values.get("num_trials")
        lists = [values.get(name) for name in ("method", "taylor_seq_len", "taylor_num_samples")]
        size = math.prod(len(items) for items in lists if items) if all(lists) else None
        if search == "grid" and node is not None:
            self._problem(node, "num_trials has no meaning for `search: grid`, which tries every point; remove it")
        elif search == "optuna" and node is None:
            self._problem(nodes["search"], f"`search: optuna` needs num_trials; add e.g. `{_EXAMPLES['num_trials']}`")
        elif search == "optuna" and node is not None and size is not None and (num_trials or 0) > size:
            step = f"write at most {size}, or use `search: grid` to try them all"
            self._problem(node, f"num_trials is {num_trials}; the space has {size} points: {step}")

    def _one_method(self, node: yaml.Node) -> str | None:
        text = self._text(node, "method")
        if text is not None and text not in self.known_methods:
            self._problem(node, f"unknown method {text!r}; {did_you_mean(text, self.known_methods)}")
        return text

    def _list(self, node: yaml.Node, name: str, read: Callable[[yaml.Node], Any]) -> tuple[Any, ...] | None:
        if not isinstance(node, yaml.SequenceNode):
            self._problem(node, f"{name} is {_shown(node)}; it must be a list, e.g. `{_EXAMPLES[name]}`")
            return None
        if not node.value:
            self._problem(node, f"{name} is an empty list; give at least one value, e.g. `{_EXAMPLES[name]}`")
        before = len(self.problems)
        values: list[Any] = []
        for item in node.value:
            value = read(item)
            if value is not None and value in values:
                self._problem(item, f"{name} lists {value!r} twice; keep one")
            elif value is not None:
                values.append(value)
        return tuple(values) if len(self.problems) == before else None

    def _text(self, node: yaml.Node, name: str) -> str | None:
        if isinstance(node, yaml.ScalarNode) and _is(node, "str"):
            return str(node.value)
        self._problem(node, f"{name} is {_shown(node)}; it must be text, e.g. `{_EXAMPLES[name]}`")
        return None

    def _integer(self, node: yaml.Node, name: str, low: int, high: int | None) -> int | None:
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        # YAML 1.1 also takes 0x10, 010 (eight) and 1:30 (ninety) for integers; only plain decimals are unambiguous.
        if isinstance(node, yaml.ScalarNode) and _is(node, "int") and _DECIMAL.fullmatch(node.value):
            value = int(node.value)
            if value >= low and (high is None or value <= high):
                return value
        self._problem(node, f"{name} is {_shown(node)}; it must be a whole number {bounds}, in plain decimal digits")
        return None


_EXAMPLES = {
    "search": "search: grid",
    "method": "method: [taylor, blockwise]",
    "taylor_seq_len": "taylor_seq_len: [64, 128]",
    "taylor_num_samples": "taylor_num_samples: [128, 256]",
    "num_trials": "num_trials: 20",
    "shape": "shape: aligned",
}


def _is(node: yaml.Node, kind: str) -> bool:
    return bool(node.tag == f"tag:yaml.org,2002:{kind}")


def _shown(node: yaml.Node) -> str:
    """How an error shows a value: what the user wrote, and its type where that is the surprise."""
    if not isinstance(node, yaml.ScalarNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    if _is(node, "bool"):
        return f"{node.value} (true or false)"
    if _is(node, "null"):
        return "empty"
    return f"the text {node.value!r}" if _is(node, "str") else str(node.value)
