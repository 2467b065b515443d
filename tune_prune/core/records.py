"""Results as plain data: what a stage reports, what the ledger keeps of a trial. No torch, no ray.

Metric names are flat: ppl, acc_mean, acc_<task> and each accuracy's standard error as <name>_stderr (plain fractions,
not percent); *_s are seconds, *_bytes bytes, *_tokens tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from tune_prune.core.config import ModelRun, PruningConfig, trial_key
from tune_prune.core.files import NON_FINITE
from tune_prune.core.store import EXPERIMENT
from tune_prune.core.validation import Amount, Count, Number, validated

Status = Literal["complete", "failed", "stopped_early"]

Failure = Literal["out_of_memory", "not_finite", "infeasible", "lost_worker", "hung", "user_error", "error"]
# Classes of failures in words: why a trial has no result.
FAILURES: dict[str, str] = {
    "out_of_memory": "out of memory",
    "not_finite": "not finite",  # numbers that a decision needs
    "infeasible": "infeasible",  # the model cannot take the configuration
    "lost_worker": "lost worker",  # its process or node died, at each of its attempts
    "hung": "hung",  # ended at --trial-timeout
    "user_error": "user error",  # any other that the user can mend
    "error": "other error",
}

# Of a trial, after one stage for each statistic that its method decides by. The dense baseline has neither pruning nor KL.
MODEL_STAGES = ("steps", "pruning", "refit", "recovery", "kl", "perplexity", "zero_shot")
MEASURING_STAGES = MODEL_STAGES[4:]
# Of those, what a trial has where that hyperparameter is not at its default.
RECIPE_STAGES = {"steps": "steps", "refit": "compensation", "recovery": "recovery"}


def pass_name(stage: str) -> str:
    """What the pass of a statistic's stage is called in text and in cost.json: that of `importance` is the gradient pass."""
    return "gradient" if stage == "importance" else stage


def in_order(stages: Iterable[str]) -> tuple[str, ...]:
    """Names of stages, each once, as they follow in a trial: those of statistics as given, then MODEL_STAGES."""
    return tuple(sorted(dict.fromkeys(stages), key=lambda s: MODEL_STAGES.index(s) if s in MODEL_STAGES else -1))


def failure_counts(failures: Iterable[str]) -> str:
    """Classes of failed trials (empty: of an older version, which had none), counted: "2 out of memory, 1 hung"."""
    names = FAILURES | {"": "of unknown cause"}
    return ", ".join(f"{count} {names.get(failure, failure)}" for failure, count in Counter(failures).most_common())


def _finite_or_not(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


_StageValue = Annotated[Any, BeforeValidator(_finite_or_not)]  # text or a number, as before `to_json`


# Fields of a StageReport that are said once, with the slice that they are of: a trial's items.parquet keeps them, no record does.
PER_ITEM = ("outcomes", "gold_logprobs")


@dataclass
class StageReport:
    """What one stage of a trial reports: its name, its cost and its metrics."""

    stage: str  # a statistic's, or one of MODEL_STAGES
    duration_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    items_scored: int = 0  # zero-shot items scored so far, over all tasks
    items_total: int = 0  # zero-shot items the last slice will have reached
    tokens: int = 0  # tokens forwarded by this stage; 0 where all it needed was cached
    peak_memory_bytes: int = 0  # GPU: torch's peak in this stage; CPU: the process's peak resident set up to its end
    way: str = (
        ""  # how the model was held for what it computed, if not as usual: nothing that was measured depends on it
    )
    outcomes: dict[str, str] = field(default_factory=dict)  # of this slice: task -> "0" or "1" per item, in order
    # Likewise, of the items that have a single right choice: its log-probability in nats.
    gold_logprobs: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass
class TrialRecord:
    """One finished trial (or the dense baseline, whose config is empty): the unit of the ledger."""

    key: str
    model: str  # label of the model
    config: dict[str, Any]  # PruningConfig as a dict; {} for the dense baseline
    status: Status
    reason: str = ""  # why it failed or was stopped; empty when complete
    failure: Failure | Literal[""] = ""  # the class of a failed trial's reason; empty in records of older versions
    metrics: dict[str, Number] = field(default_factory=dict)
    stages: list[dict[str, _StageValue]] = field(default_factory=list)  # StageReport dicts without metrics
    search_id: str = ""  # of the start that ran it; empty in records of older versions
    started_at: str = ""  # ISO 8601, UTC
    elapsed_time_s: Amount = 0.0
    peak_memory_bytes: Count = 0  # of its stages the largest
    host: str = ""
    device_name: str = ""  # of the GPU or CPU; empty where the model was never opened, and in older records
    torch_version: str = ""  # likewise
    transformers_version: str = ""  # likewise
    method_code: str = ""  # digest of the code of its method and the method's statistics; empty in older records
    resources: dict[str, Number] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # caveats of the numbers, in sentences
    files: dict[str, str] = field(default_factory=dict)  # of its folder: name -> SHA-256; empty in older records

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> TrialRecord:
        """The inverse of `to_dict`, also after `to_json`. Unknown fields (of a newer version) are ignored. Raises ValueError that
        names a field which is missing or wrong."""
        record = validated(cls, values)
        for name, value in record.metrics.items():
            if what := _impossible(name, value):
                raise ValueError(f"metrics.{name} is {value}; it must be {what}")
        names = [name for name in record.metrics if name.startswith("acc_") and not name.endswith("_stderr")]
        tasks, mean = [record.metrics[name] for name in names if name != "acc_mean"], record.metrics.get("acc_mean")
        if tasks and mean is not None and abs(mean - sum(tasks) / len(tasks)) > 1e-6:
            raise ValueError(f"metrics.acc_mean is {mean}; it must be the mean of its tasks, {sum(tasks) / len(tasks)}")
        for index, stage in enumerate(record.stages):
            try:
                validated(PassCost, stage)
            except ValueError as error:
                raise ValueError(f"stages[{index}].{error}") from error
            scored, total = (stage.get(name, 0) for name in ("items_scored", "items_total"))
            if scored > total:
                raise ValueError(f"stages[{index}].items_scored is {scored}; it must be at most {total}, of all items")
        return record


def may_pass(record: TrialRecord) -> bool:
    """Whether a trial has failed by something else than what its configuration is: another attempt may measure it."""
    return record.status == "failed" and record.failure not in ("not_finite", "infeasible")


_ROUNDING = 1e-2  # of what is computed from float32 or less
# By how a metric's name begins: the least and the most that it can be. Infinite and undefined ones are results.
_BOUNDS = {
    "acc_": (0, 1, "a fraction"),
    "chance_acc_": (0, 1, "a fraction"),
    "removed_fraction": (0, 1, "a fraction"),
    "ppl": (1 - _ROUNDING, math.inf, "at least 1"),
    "kl_": (-_ROUNDING, math.inf, "at least 0"),
    "gold_logprob_": (-math.inf, _ROUNDING, "at most 0"),
    "params_count": (0, math.inf, "at least 0"),
}


def _impossible(name: str, value: float) -> str:
    """What a metric would have to be, where it cannot be `value`; else nothing."""
    if name.endswith("_stderr"):
        return "at least 0" if value < 0 else ""
    for start, (least, most, what) in _BOUNDS.items():
        if name.startswith(start) and (value < least or value > most):
            return what
    return ""


@dataclass
class PassCost:
    """What every stage of a record and every file of a pass tells; there is more in both."""

    stage: str
    duration_s: Amount
    tokens: Count
    peak_memory_bytes: Count = 0  # in no record of an older version
    items_scored: Count = 0
    items_total: Count = 0


@dataclass
class Cost:
    """What of cost.json (ray_results/README.md) is read; any of it may be missing, and there is more."""

    trials: int = 0
    seconds_per_stage: dict[str, Number] = field(default_factory=dict)
    worker_seconds: Number = 0.0
    evaluation_fraction: Number = 0.0
    gpu_hours: Number = 0.0


@dataclass
class _Meaning:
    """What must not change in an experiment, of one model."""

    model: str = ""  # fingerprint
    data: str = ""  # likewise
    calibration: str = ""
    texts: dict[str, str] = field(default_factory=dict)  # data fingerprints with other calibration texts
    protocol: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: str = ""
    pruning_ratio: float | list[float] = 0.0
    shape: str | list[str] = ""


@dataclass
class _Sizes:
    mlp_width: list[int]
    total_params: int


@dataclass
class _ModelAbout:
    run: ModelRun = field(default=None)  # type: ignore[assignment]  # may be missing, but not null
    meaning: _Meaning = field(default_factory=_Meaning)
    geometry: _Sizes = field(default_factory=lambda: _Sizes([], 0))
    perplexity_window: int = 0
    target_params: int | list[int] = 0
    trial_keys: dict[str, str] = field(default_factory=dict)


@dataclass
class About:
    """The types of the fields of experiment.json (ray_results/README.md); any of them may be missing."""

    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    search: str = ""
    num_trials: int = 0
    space: dict[str, Any] = field(default_factory=dict)
    models: dict[str, _ModelAbout] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None


def stranger(record: TrialRecord, about: Mapping[str, Any]) -> str:
    """How `record`, of a trial or a dense model, differs from the experiment that `about` (experiment.json) describes, as the end
    of "it is ..."; "" where it is one of its own, as far as `about` tells."""
    models = about.get("models")
    if models is None:
        return ""
    if record.model not in models:
        return f"of a model, {record.model}, that {EXPERIMENT} does not name"
    entry = models[record.model]
    meaning = entry.get("meaning", {})
    config = PruningConfig.from_dict(record.config) if record.config else None
    if "run" in entry and {"model", "data"} <= set(meaning):
        data = meaning["data"]
        if config is not None and config.calibration is not None:
            data = meaning.get("texts", {}).get(config.calibration)
        if data is None:
            return f"of another search: {EXPERIMENT} does not name its calibration text"
        key = trial_key(config, meaning["model"], data, validated(ModelRun, entry["run"]))
        if record.key != key:
            return f"of another search: its key would be {key} by the model, data and settings in {EXPERIMENT}"
    for name in ("pruning_ratio", "shape") if config is not None else ():
        own, searched = getattr(config, name), meaning.get(name)
        if searched is not None and own not in (searched if isinstance(searched, list) else [searched]):
            return f"of another search: its {name} is {own}, in {EXPERIMENT} {searched}"
    return ""
