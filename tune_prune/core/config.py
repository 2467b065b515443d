"""What a search is made of, as plain frozen data: settings of a trial, of its evaluation, of one model's run.

Everything here can be imported without torch, ray or lm_eval, is picklable, and has one canonical form, so that equal
meaning gives an equal key (docs/architecture.md, "Keys").
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from tune_prune.core.errors import UserError

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

# Raise when the meaning of a trial's numbers changes: results of different versions are never mixed.
PROTOCOL_VERSION = 2


def canonical_json(value: Any) -> str:
    """The one text of `value` (plain data): sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 16) -> str:
    """A hex digest of `value` (plain data), equal for equal meaning."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def seed_for(seed: int, purpose: str) -> int:
    """A seed for one purpose, so that no random choice depends on the order in which others are made."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")


def alignment(shape: str) -> int | None:
    """The N of shape "aligned-N"; None for "free" and "uniform". Raises UserError for any other text."""
    match = _SHAPE.fullmatch(shape) if isinstance(shape, str) else None
    if match is None:
        raise UserError(
            f"shape is {shape!r}; it must be free, uniform or aligned-N with a whole number N from 1, e.g. aligned-64"
        )
    return int(match[1]) if match[1] else None


@dataclass(frozen=True, order=True)
class PruningConfig:
    """One point of the search: how a model is pruned."""

    method: str  # a module name of tune_prune/pruning/methods
    taylor_seq_len: int  # tokens per calibration sample
    taylor_num_samples: int  # calibration samples for the gradients
    pruning_ratio: float = 0.2  # fraction of ALL parameters to remove
    removal_divisor: int = 5  # removal losses use the first max(1, taylor_num_samples // removal_divisor) samples
    shape: str = (
        "free"  # what the layers may look like: "free", "aligned-N" (MLP widths in multiples of N) or "uniform"
    )

    def __post_init__(self) -> None:
        for name, low in (("taylor_seq_len", 2), ("taylor_num_samples", 1), ("removal_divisor", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least {low}")
        ratio = self.pruning_ratio
        if (
            not isinstance(ratio, (int, float))
            or isinstance(ratio, bool)
            or not math.isfinite(ratio)
            or not 0 <= ratio < 1
        ):
            raise UserError(f"pruning_ratio is {ratio!r}; it must be at least 0 and below 1, e.g. 0.2 for 20% smaller")
        alignment(self.shape)

    @property
    def num_removal_samples(self) -> int:
        return max(1, self.taylor_num_samples // self.removal_divisor)

    @property
    def name(self) -> str:
        """Short and readable, e.g. `blockwise-s64-n128` or, of a shape, `blockwise-s64-n128-aligned-64`; unique within one
        pruning ratio and removal divisor."""
        shape = "" if self.shape == "free" else f"-{self.shape}"
        return f"{self.method}-s{self.taylor_seq_len}-n{self.taylor_num_samples}{shape}"

    def meaning(self) -> dict[str, Any]:
        """What a key hashes. The free shape is left out: keys from before there were shapes stay what they were."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("shape", "free")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PruningConfig:
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


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
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit is {self.limit}; it must be at least 1 item per task, or be left out for all items")
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def trial_key(config: PruningConfig | None, model_fingerprint: str, data_fingerprint: str, run: ModelRun) -> str:
    """A trial is its meaning: configuration (None: the dense model), model, data and protocol. Two identical ones are one."""
    return digest(
        {
            "config": config.meaning() if config else {},
            "model": model_fingerprint,
            "data": data_fingerprint,
            "protocol": asdict(run.protocol) | {"version": PROTOCOL_VERSION},
            "seed": run.seed,
            "dtype": run.dtype,
        }
    )
