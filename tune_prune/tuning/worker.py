"""What a worker gets to know at its start, and what it keeps between trials."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import Failure, Status, TrialRecord
from tune_prune.core.store import Location, Store, open_store
from tune_prune.models import catalog
from tune_prune.models.loading import readable_in_place
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.trial.context import TrialContext
from tune_prune.trial.failures import Hung, LostWorker, failure_of
from tune_prune.trial.fallback import Fallback
from tune_prune.tuning.resources import TrialResources, limit_process
from tune_prune.tuning.work import TrialSpec


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of one search must know."""

    experiment_dir: Location  # absolute, the same on every node
    artifact_dir: Location  # likewise
    resources: TrialResources
    ways: Mapping[str, Residency] = field(default_factory=dict)  # by label, how models are held; else resident
    trial_timeout_s: float | None = None
    gpu_ways: Mapping[str, Mapping[str, Residency]] = field(
        default_factory=dict
    )  # `ways` by kind of GPU, where there are several
    gpu_free: Mapping[str, int] = field(default_factory=dict)  # bytes by kind of GPU, before the first trial
    search_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])  # of this start, in the records that it makes

    @property
    def store(self) -> Store:
        return open_store(self.experiment_dir)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store)

    def way(self, label: str) -> Residency:
        """Return how a model is held on the GPU of this process, or where it runs else."""
        ways = self.ways
        if self.gpu_ways and self.resources.gpus > 0:
            ways = self.gpu_ways.get(torch.cuda.get_device_name(), ways)
        return ways.get(label, RESIDENT)

    def failure_of_this_search(self, key: str) -> TrialRecord | None:
        """Return the failed record that a worker of this search left, not one of an earlier start."""
        record = self.ledger.read(key)
        failed_now = record is not None and record.status == "failed" and record.search_id == self.search_id
        return record if failed_now else None

    def begun(self, key: str, model: str, config: PruningConfig | None) -> TrialRecord:
        """Return the record of a trial of this search that begins now."""
        known: dict[str, Any] = {"search_id": self.search_id, "resources": self.resources.to_ray()}
        return TrialRecord.begun(key, model, config, **known)

    def end(
        self, record: TrialRecord, status: Status, reason: str = "", failure: Failure | Literal[""] = "", **more: Any
    ) -> TrialRecord:
        """End the trial of `record` so, with what `more` says, and return the record that the ledger now holds."""
        record = replace(record, status=status, reason=reason, failure=failure, **more)
        kept = self.ledger.write(record)
        if status != "failed":  # else it is tried again, and that record replaces this one
            self.ledger.forget(record)
        return kept

    def failed(self, spec: TrialSpec, last: TrialRecord | None, error: BaseException) -> TrialRecord:
        """Return the failed record of a trial that `error` has ended: what its process has left or, where that died after
        `last`, what is known here."""
        record = self.failure_of_this_search(spec.key)
        if record is not None and not isinstance(error, Hung):
            return record
        last = last or self.not_run(spec)
        reason = str(error)
        if isinstance(error, LostWorker):
            after = f" after the stage {last.stages[-1].stage}" if last.stages else ""
            reason = f"the worker of the trial died{after}, perhaps out of memory: {reason}"
        return self.end(last, "failed", reason, failure_of(error))

    def not_run(self, spec: TrialSpec) -> TrialRecord:
        """Return the record of a trial of this search of which no stage was run."""
        return replace(self.begun(spec.key, spec.run.label, spec.config), started_at="", host="")


class ContextCache:
    """Keeps the one model, with its data, that this process worked on last."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._run: ModelRun | None = None
        self._context: TrialContext | None = None
        self._fallbacks: dict[ModelRun, Fallback] = {}  # what was learned of models that were opened before

    def forget(self) -> None:
        self._context = self._run = None

    def open(self, run: ModelRun, after_a_death: bool = False) -> TrialContext:
        """Return the context of a run's model; `after_a_death`: of a worker that had it, so that it is held as leanly as
        can be."""
        if self._context is None or self._run != run or after_a_death:
            self._context = None  # let go of the old model first: two may not fit
            settings = self.settings
            limit_process(settings.resources, settings.gpu_free)
            fallback = self._fallbacks.setdefault(run, Fallback(settings.way(run.label)))
            if after_a_death:
                fallback.after_a_death(lambda: readable_in_place(catalog.resolve(run.model, run.revision)))
            where = settings.resources.device
            self._context = TrialContext.open(run, settings.artifact_dir, where, fallback.way, fallback)
            self._run = run
        return self._context
