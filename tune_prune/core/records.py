"""Results as plain data: what a stage reports, and the record of a trial, which grows by it. No torch, no ray.

Metric names are flat: ppl, acc_mean, acc_<task> and each accuracy's standard error as <name>_stderr (plain fractions,
not percent); *_s are seconds, *_bytes bytes, *_tokens tokens.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from tune_prune.core.config import PruningConfig
from tune_prune.core.validation import Amount, Count, Number, validated

Status = Literal["running", "complete", "failed", "stopped_early"]

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
    """Return what the pass of a statistic's stage is called in text and in cost.json: that of `importance` is the gradient pass."""
    return "gradient" if stage == "importance" else stage


def in_order(stages: Iterable[str]) -> tuple[str, ...]:
    """Return the names of stages, each once, as they follow in a trial: statistics as given, then MODEL_STAGES."""
    return tuple(sorted(dict.fromkeys(stages), key=lambda s: MODEL_STAGES.index(s) if s in MODEL_STAGES else -1))


def failure_counts(failures: Iterable[str]) -> str:
    """Count classes of failed trials in words: "2 out of memory, 1 hung"."""
    return ", ".join(f"{count} {FAILURES.get(failure, failure)}" for failure, count in Counter(failures).most_common())


@dataclass(frozen=True)
class Slice:
    """Outcomes that a slice of the zero-shot items has added to a trial."""

    index: int
    fraction: float  # of all items, as the protocol says it: stopping levels are met exactly, whatever the rounding
    outcomes: Mapping[str, str]  # task -> "0" or "1" per item that it adds, in the order that is the same for all
    items_per_task: Mapping[str, int]  # in the protocol
    # Task -> log-probability in nats of the right choice, of those of its items that have a single one, in the same order.
    gold_logprobs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    gold_items_per_task: Mapping[str, int] = field(default_factory=dict)  # those in the protocol; no task without any


@dataclass
class StageReport:
    """Name, cost and metrics of one stage of a trial, or of one pass over the dense model."""

    stage: str  # a statistic's, or one of MODEL_STAGES
    duration_s: Amount
    metrics: dict[str, Number] = field(default_factory=dict)  # a record has them beside its stages
    items_scored: Count = 0  # zero-shot items scored so far, over all tasks
    items_total: Count = 0  # zero-shot items the last slice will have reached
    tokens: Count = 0  # tokens forwarded by this stage; 0 where all it needed was cached
    peak_memory_bytes: Count = 0  # GPU: torch's peak in this stage; CPU: the process's peak resident set up to its end
    # How the model was held for what it computed, if not as usual: nothing that was measured depends on it.
    way: str = ""
    slice: Slice | None = None  # of a zero-shot stage; said once: a trial's items.parquet keeps it, no record does

    def to_dict(self) -> dict[str, Any]:
        """Return what a record keeps of the stage."""
        return {name: value for name, value in vars(self).items() if name not in ("metrics", "slice")}


def _config(values: dict[str, Any]) -> PruningConfig | None:
    try:
        return PruningConfig.from_dict(values) if values else None
    except (TypeError, AttributeError) as error:  # a field without a default is missing, or it is no object
        raise ValueError(str(error)) from error


@dataclass
class TrialRecord:
    """A trial (or the dense baseline, which has no configuration) as far as it has come: the unit of the ledger. It is `begun`,
    grows by a report per stage (`after`), and ends with another status than "running"."""

    key: str
    model: str  # label of the model
    config: Annotated[PruningConfig | None, PlainValidator(_config)]  # {} in the file of a dense baseline
    status: Status = "running"
    reason: str = ""  # why it failed or was stopped; empty when complete
    failure: Failure | Literal[""] = ""  # the class of a failed trial's reason
    metrics: dict[str, Number] = field(default_factory=dict)
    stages: list[StageReport] = field(default_factory=list)  # without their metrics and slices
    search_id: str = ""  # of the start that ran it
    started_at: str = ""  # ISO 8601, UTC
    elapsed_time_s: Amount = 0.0  # of its stages
    peak_memory_bytes: Count = 0  # of its stages the largest
    host: str = ""
    device_name: str = ""  # of the GPU or CPU; empty where the model was never opened
    torch_version: str = ""  # likewise
    transformers_version: str = ""  # likewise
    method_code: str = ""  # digest of the code of its method and the method's statistics
    resources: dict[str, Number] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # caveats of the numbers, in sentences
    files: dict[str, str] = field(default_factory=dict)  # of its folder: name -> SHA-256

    @classmethod
    def begun(cls, key: str, model: str, config: PruningConfig | None, **known: Any) -> TrialRecord:
        """Return the record of a trial that begins now in this process."""
        # In microseconds, as the file of an attempt is named by it.
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        return cls(key, model, config, started_at=now, host=platform.node(), **known)

    def after(self, report: StageReport) -> TrialRecord:
        """Return the record with a stage more."""
        return replace(
            self,
            metrics=self.metrics | report.metrics,
            stages=[*self.stages, replace(report, metrics={}, slice=None)],
            elapsed_time_s=self.elapsed_time_s + report.duration_s,
        )

    @property
    def ended(self) -> bool:
        return self.status != "running"

    @property
    def accuracy(self) -> float | None:
        """acc_mean over the items seen so far; None before the first, and where it is not finite."""
        value = self.metrics.get("acc_mean", math.nan)
        return value if math.isfinite(value) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as files have them."""
        config = {} if self.config is None else self.config.to_dict()
        return vars(self) | {"config": config, "stages": [stage.to_dict() for stage in self.stages]}

    @classmethod
    def read(cls, content: bytes | Any) -> TrialRecord:
        """Return the record of `record.to_dict()`, as text or values. Raises ValueError that names a missing or wrong field."""
        return validated(cls, content)


def may_pass(record: TrialRecord) -> bool:
    """Say whether a trial has failed by something else than what its configuration is: another attempt may measure it."""
    return record.status == "failed" and record.failure not in ("not_finite", "infeasible")
