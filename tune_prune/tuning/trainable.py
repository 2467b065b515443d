"""One trial inside a Ray worker: every `step()` is one stage of `tune_prune.trial.Trial`.

The worker, not the driver, writes the trial's files and then its ledger record: once the record is there the trial is
done, whatever happens to the driver. An actor is reused for the next trial and keeps its model and data.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray import tune

from tune_prune.config import ModelRun, PruningConfig
from tune_prune.errors import UserError
from tune_prune.ledger import Ledger
from tune_prune.records import StageReport, Status, TrialRecord
from tune_prune.trial import Trial, TrialContext
from tune_prune.tuning.resources import TrialResources, claim

TIMEOUT_REASON = "stopped by the time limit"


@dataclass(frozen=True)
class TrialSpec:
    """One point of the search for one model; `key` names it in the ledger."""

    run: ModelRun
    config: PruningConfig
    key: str


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of one search must know."""

    experiment_dir: Path  # absolute, the same on every node
    resources: TrialResources
    trial_timeout_s: float | None = None
    earlier_failures: dict[str, TrialRecord] = field(default_factory=dict)  # by key, from before this search

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.experiment_dir / "ledger")

    def failure_of_this_search(self, key: str) -> TrialRecord | None:
        """The failed record that a worker of this search left, not one of an earlier start."""
        record = self.ledger.read(key)
        failed_now = record is not None and record.status == "failed" and record != self.earlier_failures.get(key)
        return record if failed_now else None


class ContextCache:
    """Keeps the one model, with its data, that this process worked on last."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._run: ModelRun | None = None
        self._context: TrialContext | None = None

    def open(self, run: ModelRun) -> TrialContext:
        if self._context is None or self._run != run:
            self._context = None  # let go of the old model first: two may not fit
            claim(self.settings.resources)
            self._context = TrialContext.open(
                run, self.settings.experiment_dir / "artifacts", device=self.settings.resources.device
            )
            self._run = run
        return self._context


class PruneTrainable(tune.Trainable):
    """Runs the trial that `config["key"]` names; `specs` and `settings` come through `tune.with_parameters`.

    A UserError (the same at every attempt) ends the trial as failed. Any other exception is recorded as well and raised,
    so that Ray tries again in a fresh process.
    """

    def setup(  # type: ignore[override]  # with_parameters adds the last two
        self, config: dict[str, Any], specs: dict[str, TrialSpec], settings: WorkerSettings
    ) -> None:
        self._specs = specs
        self._settings = settings
        self._contexts = ContextCache(settings)
        self._watchdog: threading.Timer | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._spec = self._specs[config["key"]]
        self._trial: Trial | None = None
        self._stages: Iterator[StageReport] | None = None
        self._started_at = datetime.now(UTC).isoformat()
        self._stage_index = 0
        self._slice_index = 0
        self._metrics: dict[str, float] = {}

    def cleanup(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    def step(self) -> dict[str, Any]:
        """Run one stage and return its metrics; raises what the stage raised, unless it is a UserError."""
        timed_out = self._settings.failure_of_this_search(self._spec.key) if self._trial is None else None
        if timed_out is not None and timed_out.reason.startswith(TIMEOUT_REASON):
            return self._result("failed", timed_out)  # a second attempt would take as long
        try:
            report = self._next_stage()
            if report is None or (report.items_total and report.items_scored >= report.items_total):
                return self._complete(report)
            return self._result("running", self._record("stopped_early"), report)
        except UserError as error:
            return self._result("failed", self._fail(str(error)))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise

    def _next_stage(self) -> StageReport | None:
        if self._stages is None:
            if self._settings.trial_timeout_s is not None:
                self._watchdog = threading.Timer(self._settings.trial_timeout_s, self._time_is_up)
                self._watchdog.daemon = True
                self._watchdog.start()
            context = self._contexts.open(self._spec.run)
            key = context.key(self._spec.config)
            if key != self._spec.key:
                raise UserError(
                    f"the model or data of {self._spec.run.label} differ on {os.uname().nodename} (trial key {key}, expected "
                    f"{self._spec.key}): make the same files visible on every node, then start again"
                )
            self._trial = Trial(self._spec.config, context)
            self._stages = iter(self._trial.stages())
        report = next(self._stages, None)
        if report is not None:
            self._metrics |= report.metrics
        return report

    def _complete(self, report: StageReport | None) -> dict[str, Any]:
        assert self._trial is not None and self._stages is not None
        for last in self._stages:  # slices that add no item, when there are fewer items than slices
            self._metrics |= last.metrics
        self.cleanup()
        record = self._record("complete")
        self._trial.write_files(self._settings.experiment_dir / "trials" / self._spec.key)
        self._settings.ledger.write(record)
        return self._result("complete", record, report)

    def _fail(self, reason: str) -> TrialRecord:
        self.cleanup()
        record = self._record("failed", reason)
        self._settings.ledger.write(record)
        return record

    def _record(self, status: Status, reason: str = "") -> TrialRecord:
        if self._trial is None:  # the model or its data could not be opened
            record = TrialRecord(self._spec.key, self._spec.run.label, asdict(self._spec.config), status, reason)
            record.started_at, record.host = self._started_at, os.uname().nodename
        else:
            record = self._trial.record(status, reason)
        record.resources = self._settings.resources.to_ray()
        return record

    def _time_is_up(self) -> None:
        # Python cannot stop a thread that computes, and Ray has no limit of its own: the process has to end.
        try:
            self._fail(f"{TIMEOUT_REASON} of {self._settings.trial_timeout_s:g} s per trial (--trial-timeout)")
        finally:
            os._exit(1)

    def _result(self, status: str, record: TrialRecord, report: StageReport | None = None) -> dict[str, Any]:
        """What the driver is told: finite metrics by name, and the whole record for the callbacks."""
        result: dict[str, Any] = {name: value for name, value in self._metrics.items() if math.isfinite(value)}
        result |= {"trial_status": status, "record": record.to_dict(), "done": status != "running"}
        if report is not None:
            result |= {"stage": report.stage, "stage_index": self._stage_index, "stage_duration_s": report.duration_s}
            result |= {"items_scored": report.items_scored, "items_total": report.items_total}
            if report.items_scored:
                # The slice's nominal fraction, so that a scheduler's levels are met exactly whatever the rounding.
                slices = self._spec.run.protocol.slices
                result["evaluated_fraction"] = slices[min(self._slice_index, len(slices) - 1)]
                self._slice_index += 1
            self._stage_index += 1
        return result
