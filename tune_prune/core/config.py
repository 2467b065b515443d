"""What a search is made of, as plain frozen data: settings of a trial, of its evaluation, of one model's run.

Everything here can be imported without torch, ray or lm_eval, is picklable, and has one canonical form, so that an equal
identity gives an equal key (docs/architecture.md, "Keys").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from tune_prune.core.errors import UserError
from tune_prune.core.hashing import digest

# The seven zero-shot tasks and the metric each is reported by, as in the published search.
ZERO_SHOT_METRIC = {
    "boolq": "acc",
    "piqa": "acc_norm",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "openbookqa": "acc_norm",
}
ZERO_SHOT_TASKS = tuple(ZERO_SHOT_METRIC)

# What a pruned model's layers may look like (docs/methods.md, "Shapes"); in a configuration `aligned` has its number.
SHAPES = ("free", "aligned", "uniform")
_SHAPE = re.compile(r"free|aligned-([1-9][0-9]{0,6})|uniform")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})")

MAX_LABEL = 100  # letters; folders and files are named by labels, with more behind

# Raise when the meaning of a trial's numbers changes: results of different versions are never mixed.
PROTOCOL_VERSION = 2


class Kind(Protocol):
    """What values a hyperparameter takes. As text it finishes the sentence "it must be ..."."""

    is_text: bool  # its values are text, so a file may quote them

    def read(self, text: str) -> Any:
        """The value that a file or a flag asks for; ValueError where it is none."""

    def holds(self, value: Any) -> bool:
        """Whether a configuration may have that value."""


@dataclass(frozen=True)
class Whole:
    """Whole numbers within bounds, both included."""

    low: int
    high: int
    is_text = False

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}, in plain decimal digits"

    def read(self, text: str) -> int:
        # Not what else int or YAML take: 1_000, 010 (eight), 0x10, 1:30 (ninety).
        if not _DECIMAL.fullmatch(text) or not self.holds(int(text)):
            raise ValueError(text)
        return int(text)

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


class Fraction:
    """A part of a whole: above 0 where it is asked for, also 0 (nothing is removed) in a configuration."""

    is_text = False

    def __str__(self) -> str:
        return "a number above 0 and below 1, e.g. 0.2 for 20% smaller"

    def read(self, text: str) -> float:
        if not 0 < (value := float(text)) < 1:
            raise ValueError(text)
        return value

    def holds(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


class ShapeName:
    """free, uniform or aligned-N; asked for also as aligned, which gets its N by the model's size."""

    is_text = True

    def __str__(self) -> str:
        return "free, uniform, aligned or aligned-N with a whole number N from 1, e.g. aligned-64"

    def read(self, text: str) -> str:
        if text not in SHAPES and not self.holds(text):
            raise ValueError(text)
        return text

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and _SHAPE.fullmatch(value) is not None


class MethodName:
    """A module of tune_prune/pruning/methods; which ones there are is not known here."""

    is_text = True

    def __str__(self) -> str:
        return "the name of a pruning method"

    def read(self, text: str) -> str:
        return text

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True)
class Hyperparameter:
    """One row of the table: all that readers of search spaces, flags, keys, names, tables and figures know of it."""

    name: str  # everywhere: search spaces, flags (--seq-len), records, results tables; the field of PruningConfig
    label: str  # in figures and reports
    kind: Kind
    example: str  # a value, as a search space has it
    help: str  # of its flag
    read_by: Literal["scores", "statistics", "selection"]  # the step; statistics say which of theirs they read
    default: Any = None  # None: a search space must say it
    name_prefix: str | None = ""  # before its value in a configuration's name; None: names do not show it
    always_in_key: bool = False  # also at its default: the hyperparameters that the first keys had
    older: str = ""  # its name in the published search and in files of version 0.1, which are read; keys still hash it

    @property
    def required(self) -> bool:
        return self.default is None

    @property
    def usual(self) -> Any:
        """The default; where there is none, the example: what a configuration holds whose method does not read it."""
        return self.kind.read(self.example) if self.required else self.default

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


HYPERPARAMETERS = {
    row.name: row
    for row in (
        Hyperparameter(
            "method", "Method", MethodName(), "blockwise", "how KV groups and MLP channels are scored", "scores"
        ),
        Hyperparameter(
            "seq_len", "Tokens per sample", Whole(2, 131_072), "64",
            "tokens per calibration sample", "statistics", name_prefix="s", older="taylor_seq_len",
        ),
        Hyperparameter(
            "num_samples", "Calibration samples", Whole(1, 1_000_000), "128",
            "number of calibration samples", "statistics", name_prefix="n", older="taylor_num_samples",
        ),
        Hyperparameter(
            "pruning_ratio", "Pruning ratio", Fraction(), "0.2",
            "fraction of ALL parameters to remove", "selection", 0.2, name_prefix=None, always_in_key=True,
        ),
        Hyperparameter(
            "removal_divisor", "Removal divisor", Whole(1, 1_000_000), "5",
            "removal losses use the first num_samples // removal_divisor samples", "statistics", 5, "d", always_in_key=True,
        ),
        Hyperparameter(
            "shape", "Shape", ShapeName(), "aligned",
            "widths of the pruned layers: free, any; aligned, MLP widths in multiples of --align (or aligned-N) and a KV group in "
            "every layer; uniform, the same in every layer, which makes a plain checkpoint of the family", "selection", "free",
        ),
    )
}  # fmt: skip


# Older name -> name. `method` is pruning_method in results tables only.
OLDER_NAMES = {row.older: row.name for row in HYPERPARAMETERS.values() if row.older} | {"pruning_method": "method"}


def renamed(values: Any) -> Any:
    """A mapping with older names of hyperparameters replaced; anything else as it is."""
    return {OLDER_NAMES.get(k, k): v for k, v in values.items()} if isinstance(values, Mapping) else values


def alignment(shape: str) -> int | None:
    """The N of shape "aligned-N"; None for "free" and "uniform"."""
    match = _SHAPE.fullmatch(shape)
    if match is None:
        raise UserError(f"shape is {shape!r}; it must be free, uniform or aligned-N, e.g. aligned-64")
    return int(match[1]) if match[1] else None


@dataclass(frozen=True, order=True)
class PruningConfig:
    """One point of the search: how a model is pruned. A field is a row of HYPERPARAMETERS."""

    method: str
    seq_len: int
    num_samples: int
    pruning_ratio: float = HYPERPARAMETERS["pruning_ratio"].default
    removal_divisor: int = HYPERPARAMETERS["removal_divisor"].default
    shape: str = HYPERPARAMETERS["shape"].default

    def __post_init__(self) -> None:
        for name, row in HYPERPARAMETERS.items():
            value = getattr(self, name)
            if not row.kind.holds(value):
                raise UserError(f"{name} is {value!r}; it must be {row.kind}")

    @property
    def num_removal_samples(self) -> int:
        """How many of the calibration samples the removal losses use."""
        return max(1, self.num_samples // self.removal_divisor)

    @property
    def name(self) -> str:
        """Short and readable, e.g. `blockwise-s64-n128` or, off the defaults, `blockwise-s64-n128-d3-aligned-64`; unique
        within one pruning ratio."""
        return "-".join(
            f"{row.name_prefix}{value}"
            for name, row in HYPERPARAMETERS.items()
            if (value := getattr(self, name)) != row.default and row.name_prefix is not None
        )

    def settings(self) -> dict[str, Any]:
        """What a search space must say to try this configuration alone; what is at its default is left out, but for the first
        hyperparameters."""
        rows = HYPERPARAMETERS
        return {n: v for n, v in asdict(self).items() if rows[n].always_in_key or v != rows[n].default}

    def identity(self) -> dict[str, Any]:
        """What a key hashes: the settings by their older names, so that older keys stay what they were."""
        return {HYPERPARAMETERS[name].older or name: value for name, value in self.settings().items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PruningConfig:
        """From a record's `config`, by names or older ones; what is not there is at its default, what a newer version adds is left
        out."""
        values = renamed(values)
        return cls(**{name: values[name] for name in HYPERPARAMETERS if name in values})


def check_label(label: str, what: str) -> None:
    """Raise UserError unless `label` can name a model in tables, on screens and in names of files; the sentence begins with `what`
    has it."""
    if not label.strip() or len(label) > MAX_LABEL or not label.isprintable():
        shown = f"{label[:30]!r}{'...' if len(label) > 30 else ''}"
        raise UserError(
            f"{what} would be named {shown} in the results, {len(label):,} letters; a name has 1 to {MAX_LABEL} letters and no "
            "control characters: rename it"
        )


def group_labels(members: Iterable[tuple[str, float]]) -> dict[tuple[str, float], str]:
    """The label of each (model's label, pruning ratio): what is compared in itself. The model's own where it has one ratio,
    else with it, e.g. `tiny-llama@0.3`."""
    groups = dict.fromkeys(members)
    ratios: dict[str, int] = {}
    for model, _ in groups:
        ratios[model] = ratios.get(model, 0) + 1
    return {(model, ratio): f"{model}@{ratio:g}" if ratios[model] > 1 else model for model, ratio in groups}


@dataclass(frozen=True)
class EvaluationProtocol:
    """How a model is measured; the same for every trial and for the dense baseline."""

    tasks: tuple[str, ...] = ZERO_SHOT_TASKS
    limit: int | None = None  # at most this many items per task (the first ones, as lm-eval's --limit); None: all
    slices: tuple[float, ...] = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # growing fractions of all items; the last is 1.0
    perplexity_window: int = 2048  # tokens; shortened to the model's limit
    seed: int = 0  # order in which items enter the slices

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("no task was named; name at least one, e.g. --tasks boolq,piqa")
        if self.limit is not None and not Whole(1, 10**9).holds(self.limit):
            raise UserError(
                f"limit is {self.limit!r}; it must be at least 1 item per task, or be left out for all items"
            )
        if list(self.slices) != sorted(set(self.slices)) or self.slices[-1] != 1.0 or self.slices[0] <= 0:
            raise UserError(f"slices are {self.slices}; they must grow, be above 0 and end with 1.0")


@dataclass(frozen=True)
class ModelRun:
    """What all trials of one model share; it travels to the workers, so every path in it is absolute."""

    model: str  # alias, hub id or absolute folder
    label: str  # name in tables and file names, e.g. "tiny-llama"
    revision: str | None  # commit asked for (hub models)
    calibration: str  # "embedded", "wikitext2", "c4" or an absolute text file
    data_dir: str | None  # task and text files as in docs/data.md; None: the hub (or embedded); "embedded": those
    protocol: EvaluationProtocol
    seed: int
    dtype: str  # "float32" or "bfloat16"

    @property
    def trusts_tasks(self) -> bool:
        """Whether task files of `data_dir` may run code."""
        return False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class TrustingRun(ModelRun):
    """A run whose task files may run code. A type and no field: only who starts a command can say so (--trust-tasks), never a
    file that a run is read from."""

    @property
    def trusts_tasks(self) -> bool:
        return True


def trial_key(config: PruningConfig | None, model_fingerprint: str, data_fingerprint: str, run: ModelRun) -> str:
    """A trial is its identity: configuration (None: the dense model), model, data and protocol. Two identical ones are one."""
    return digest(
        {
            "config": config.identity() if config else {},
            "model": model_fingerprint,
            "data": data_fingerprint,
            "protocol": asdict(run.protocol) | {"version": PROTOCOL_VERSION},
            "seed": run.seed,
            "dtype": run.dtype,
        }
    )
