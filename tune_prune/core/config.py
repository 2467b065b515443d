"""Describe a search as plain frozen data: settings of a trial, of its evaluation, of one model's run.

Nothing here needs torch, ray or lm_eval. Each has one canonical form, so that an equal identity gives an equal key
(docs/architecture.md, "Keys").
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tune_prune.core.errors import UserError
from tune_prune.core.hashing import digest
from tune_prune.core.hyperparameters import HYPERPARAMETERS, OF_RUN, RECIPE, renamed, unread
from tune_prune.core.kinds import Shape, ShapeName, Whole

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
# Items of each task's evaluation split, as lm-eval 0.4 scores them: what published accuracies are fractions of.
TASK_ITEMS = {
    "boolq": 3270,
    "piqa": 1838,
    "hellaswag": 10042,
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "openbookqa": 500,
}

EMBEDDED_MODELS = ("tiny-llama", "tiny-qwen2", "tiny-mistral", "tiny-qwen3-moe")  # which tune_prune/embedded has
EMBEDDED_DATA = "embedded"  # as ModelRun.data_dir: the embedded tasks and text for a model that is not an embedded one

# What notes say of a model whose weights were changed besides the cut, or were not, as a guard has refused what was asked for
REFITTED = "were repaired with sample text"
NOT_REFITTED = "no repair was used: none passed its checks (docs/methods.md)"
TRAINED = "was trained on sample text to imitate the original"
NOT_TRAINED = "no training was used: on sample text that it had not seen it brought the model no nearer to the original"

PERPLEXITY_TOKENS = Whole(2, 10**9)
MAX_LABEL = 100  # letters; folders and files are named by labels, with more behind

# Raise when the meaning of a trial's numbers changes: results of different versions are never mixed.
PROTOCOL_VERSION = 2

BEGUN = "a BOS token begins every window and every question"  # what is said where it does

# The perplexity text of a user's file: its fingerprint is none of WikiText-2, which a few other blanks would change, too
OTHER_TEXT = "the text in {file} (not recognised as WikiText-2)"


def reads_embedded_data(model: str, data_dir: str | None) -> bool:
    """Say whether a run of `model` has the embedded tasks and perplexity text: one of an embedded model without a
    --data-dir, and of what was pruned from one (EMBEDDED_DATA)."""
    return model in EMBEDDED_MODELS if data_dir is None else data_dir == EMBEDDED_DATA


def alignment(shape: str) -> int | None:
    """Return what MLP widths are multiples of: the N of shape "aligned-N" or "uniform-N", where it is for several GPUs the least
    multiple of N and of their number; None for "free" and "uniform"."""
    if not ShapeName().holds(shape):
        raise UserError(f"shape is {shape!r}; it must be free, uniform, aligned-N or uniform-N, e.g. aligned-64")
    _, align, gpus = Shape.read(shape)
    return None if align is None and gpus == 1 else math.lcm(align or 1, gpus)


@dataclass(frozen=True)
class Samples:
    """A choice of calibration samples, for which a pass is made. None: as the run says."""

    seq_len: int
    seed: int | None = None
    calibration: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name, without the run's."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def name(self) -> str:
        """Return the part of a configuration's name, e.g. `s64` or `s64-r1`."""
        return "-".join(HYPERPARAMETERS[name].in_name(value) for name, value in self.to_dict().items())

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.to_dict().items())


@dataclass(frozen=True)
class PruningConfig:
    """One point of the search: how a model is pruned. A field is a row of HYPERPARAMETERS; None: as the run says."""

    method: str
    seq_len: int
    num_samples: int
    pruning_ratio: float = HYPERPARAMETERS["pruning_ratio"].default
    removal_divisor: int = HYPERPARAMETERS["removal_divisor"].default
    shape: str = HYPERPARAMETERS["shape"].default
    seed: int | None = None
    calibration: str | None = None
    compensation: str = HYPERPARAMETERS["compensation"].default
    damping: float = HYPERPARAMETERS["damping"].default
    refit_tokens: int = HYPERPARAMETERS["refit_tokens"].default
    recovery: str = HYPERPARAMETERS["recovery"].default
    recovery_steps: int = HYPERPARAMETERS["recovery_steps"].default
    recovery_rate: float = HYPERPARAMETERS["recovery_rate"].default
    recovery_rank: int = HYPERPARAMETERS["recovery_rank"].default
    steps: int = HYPERPARAMETERS["steps"].default
    removal_power: float = HYPERPARAMETERS["removal_power"].default
    normalization: str = HYPERPARAMETERS["normalization"].default
    layer_cap: float = HYPERPARAMETERS["layer_cap"].default
    whole_experts: float = HYPERPARAMETERS["whole_experts"].default

    def __post_init__(self) -> None:
        for name, row in HYPERPARAMETERS.items():
            value = getattr(self, name)
            if not (row.kind.holds(value) or (row.of_run and value is None)):
                raise UserError(f"{name} is {value!r}; it must be {row.kind}")

    def __lt__(self, other: PruningConfig) -> bool:
        """Compare configurations by their `order`."""
        return self.order < other.order

    @property
    def order(self) -> list[tuple[bool, Any]]:
        """The values in their order, the run's before others: the key to sort many configurations by."""
        return [(value is not None, value) for value in vars(self).values()]

    @property
    def samples(self) -> Samples:
        return Samples(self.seq_len, *(getattr(self, name) for name in OF_RUN))

    def within(self, run: ModelRun) -> PruningConfig:
        """Return the same configuration of that run, with None for what says as the run does, so that equal trials are one."""
        same: dict[str, Any] = {name: None for name in OF_RUN if getattr(self, name) == getattr(run, name)}
        return replace(self, **same)

    def canonical(self) -> PruningConfig:
        """Return the same configuration with the defaults of what nothing reads, so that equal trials are one."""
        return replace(self, **{name: RECIPE[name].default for name in unread(asdict(self))})

    def untrained(self) -> PruningConfig:
        """Return the same configuration without recovery."""
        return replace(self, recovery=PruningConfig.recovery).canonical()

    def values(self, run: ModelRun) -> dict[str, Any]:
        """Return every hyperparameter by name, the run's where it is as the run says."""
        return asdict(self) | {name: getattr(run.of(self), name) for name in OF_RUN}

    def to_dict(self) -> dict[str, Any]:
        """Return what a record keeps: all values but the run's; of a refit or a recovery only where there is one, and of what came
        later only what is off its default."""
        values = asdict(self)
        left_out = {name for name, row in RECIPE.items() if values[row.switch] == "none"}
        left_out |= {name for name, row in HYPERPARAMETERS.items() if row.later and values[name] == row.default}
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    def group(self, label: str) -> Group:
        """Return the group in which the model of that label with this configuration is compared."""
        return label, self.pruning_ratio, self.recovery

    @property
    def num_removal_samples(self) -> int:
        """Count of the calibration samples that the removal losses use."""
        return max(1, self.num_samples // self.removal_divisor)

    @property
    def changes_weights(self) -> bool:
        """Says whether more is done to what is left of the model than cutting it."""
        return any(getattr(self, row.switch) != "none" for row in RECIPE.values())

    @property
    def name(self) -> str:
        """Return a short name, unique within a pruning ratio: `blockwise-s64-n128` or, off a default, `blockwise-s64-n128-d3`."""
        return self.named(HYPERPARAMETERS)

    def named(self, shown: Container[str]) -> str:
        """Return the name of the hyperparameters that are `shown` alone."""
        return "-".join(
            row.in_name(value)
            for name, row in HYPERPARAMETERS.items()
            if name in shown and (value := getattr(self, name)) != row.default and row.name_prefix is not None
        )

    def in_words(self, shown: Container[str] = HYPERPARAMETERS) -> str:
        """Describe the configuration, e.g. `taylor on 128 samples of 64 tokens, repaired`, by hyperparameters of `shown`."""
        samples = f" on {self.num_samples:,} sample{'s' * (self.num_samples > 1)} of {self.seq_len:,} tokens"
        usual = self.refit_tokens == HYPERPARAMETERS["refit_tokens"].default
        repaired = "repaired" + ("" if usual else f" with {self.refit_tokens:,} tokens")
        words = {"compensation": repaired, "recovery": f"trained for {self.recovery_steps:,} steps"}
        said = {"method", "seq_len", "num_samples", "pruning_ratio", "refit_tokens", "recovery_steps"}
        others = [
            words.get(name) or f"{name} {row.kind.short(value)}"
            for name, row in HYPERPARAMETERS.items()
            if name in shown and name not in said and (value := getattr(self, name)) != row.default
        ]
        return ", ".join([self.method + samples * ("num_samples" in shown), *others])

    def settings(self) -> dict[str, Any]:
        """Return what a search space must say to try this configuration alone: what is off its default, and the first ones."""
        rows = HYPERPARAMETERS
        return {n: v for n, v in asdict(self).items() if rows[n].always_in_key or v != rows[n].default}

    def identity(self) -> dict[str, Any]:
        """Return what a key hashes: the settings by their older names, so that older keys stay the same, without the run's."""
        return {HYPERPARAMETERS[n].older or n: value for n, value in self.settings().items() if n not in OF_RUN}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PruningConfig:
        """Read a record's `config`, by names or older ones; what is absent is at its default, what is unknown left out."""
        values = renamed(values)
        return cls(**{name: values[name] for name in HYPERPARAMETERS if name in values})


def check_label(label: str, what: str) -> None:
    """Raise UserError, which begins with `what` has it, unless `label` can name a model in tables, on screens and in files."""
    if not label.strip() or len(label) > MAX_LABEL or not label.isprintable():
        raise UserError(
            f"{what} would be named {label!r:.30} in the results, {len(label):,} letters; a name has 1 to {MAX_LABEL} letters and "
            "no control characters: rename it"
        )


Group = tuple[str, float, str]  # model's label, pruning ratio, recovery: what is compared in itself


def group_labels(groups: Iterable[Group]) -> dict[Group, str]:
    """Return the label of each: the model's own, with the ratio where it has several, and with the recovery of those that
    are trained where others are not, e.g. `tiny-llama@0.3+lora`."""
    members = dict.fromkeys(groups)
    ratios: dict[str, set[float]] = defaultdict(set)
    recoveries: dict[str, set[str]] = defaultdict(set)
    for model, ratio, recovery in members:
        ratios[model].add(ratio)
        recoveries[model].add(recovery)

    def label(model: str, ratio: float, recovery: str) -> str:
        trained = recovery != PruningConfig.recovery and len(recoveries[model]) > 1
        return model + (f"@{ratio:g}" if len(ratios[model]) > 1 else "") + (f"+{recovery}" if trained else "")

    return {group: label(*group) for group in members}


@dataclass(frozen=True)
class EvaluationProtocol:
    """Settings by which every trial and the dense baseline are measured."""

    tasks: tuple[str, ...] = ZERO_SHOT_TASKS
    limit: int | None = None  # at most this many items per task (the first ones, as lm-eval's --limit); None: all
    slices: tuple[float, ...] = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # growing fractions of all items; the last is 1.0
    perplexity_window: int = 2048  # tokens; shortened to the model's limit
    seed: int = 0  # order in which items enter the slices
    perplexity_tokens: int | None = None  # of the perplexity text the first; None: all
    bos: bool = False  # a BOS token is the first of every window, of sample text, too, and of every prompt

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("no task was named; name at least one, e.g. --tasks boolq,piqa")
        for name in self.tasks:
            if name == "mean" or name.endswith("_stderr"):  # acc_mean and acc_<task>_stderr are metrics of every record
                raise UserError(f"a task cannot be named {name!r}, which metrics are named by; rename its folder")

    def to_dict(self) -> dict[str, Any]:
        """Return what records and keys have: what came later only where it is off its default, as before there was it."""
        usual = {"perplexity_tokens": None, "bos": False}
        return {name: value for name, value in asdict(self).items() if name not in usual or value != usual[name]}

    def of_items(self) -> dict[str, Any]:
        """Return the part that the zero-shot tasks depend on."""
        return replace(self, perplexity_tokens=None).to_dict() | {"perplexity_window": None}


@dataclass(frozen=True)
class ModelRun:
    """Settings that all trials of one model share; they travel to the workers, so every path is absolute."""

    model: str  # alias, hub id or absolute folder
    label: str  # name in tables and file names, e.g. "tiny-llama"
    revision: str | None  # commit asked for (hub models)
    calibration: str  # "embedded", "wikitext2", "c4" or an absolute text file, or several with "+" between them
    data_dir: str | None  # task and text files as in docs/data.md; None: the hub (or embedded); "embedded": those
    protocol: EvaluationProtocol
    seed: int  # of items in slices and, unless a configuration has its own, of its draw
    dtype: str  # "float32" or "bfloat16"

    @property
    def trusts_tasks(self) -> bool:
        """Says whether task files of `data_dir` may run code."""
        return False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"protocol": self.protocol.to_dict()}

    def of(self, config: PruningConfig | Samples | None) -> ModelRun:
        """Return the run as the trials of `config`, or passes over those samples, see it: with what they say themselves."""
        stated = (
            {} if config is None else {name: value for name in OF_RUN if (value := getattr(config, name)) is not None}
        )
        return replace(self, **stated) if stated else self


class TrustingRun(ModelRun):
    """Lets task files run code: a type and no field, as only who starts a command can say so, never a file."""

    @property
    def trusts_tasks(self) -> bool:
        return True


def trial_key(config: PruningConfig | None, model_fingerprint: str, data_fingerprint: str, run: ModelRun) -> str:
    """Return the identity of a trial: of its configuration (None: the dense model), model, data and protocol. Two identical
    ones are one. The `data_fingerprint` is that of the configuration's calibration text."""
    return digest(
        {
            "config": config.identity() if config else {},
            "model": model_fingerprint,
            "data": data_fingerprint,
            "protocol": run.protocol.to_dict() | {"version": PROTOCOL_VERSION},
            "seed": run.of(config).seed,
            "dtype": run.dtype,
        }
    )
