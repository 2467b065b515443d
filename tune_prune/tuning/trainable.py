"""One trial inside a Ray worker: every `step()` is one stage of `tune_prune.trial.trial.Trial`. Or one preparation job, whole.

The worker, not the driver, writes the trial's files and then its ledger record: once the record is there the trial is
done, whatever happens to the driver. An actor is reused for the next trial and keeps its model and data.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ray import tune

from tune_prune.core.errors import UserError
from tune_prune.core.records import StageReport, Status, TrialRecord
from tune_prune.core.store import TRIALS
from tune_prune.pruning.statistics import Need
from tune_prune.trial.statistics import needs_of
from tune_prune.trial.trial import Trial
from tune_prune.tuning.preparation import PrepareJob, run_job
from tune_prune.tuning.worker import ContextCache, TrialSpec, WorkerSettings

TIMEOUT_REASON = "stopped by the time limit"


class PruneTrainable(tune.Trainable):
    """Runs the trial that `config["key"]` names, or the job that `config["job"]` counts; the rest comes through
    `tune.with_parameters`.

    A UserError (the same at every attempt) ends the trial as failed. Any other exception is recorded as well and raised,
    so that Ray tries again in a fresh process.
    """

    def setup(  # type: ignore[override]  # with_parameters adds the last three
        self, config: dict[str, Any], specs: dict[str, TrialSpec], jobs: list[PrepareJob], settings: WorkerSettings
    ) -> None:
        self._specs = specs
        self._jobs = jobs
        self._settings = settings
        self._contexts = ContextCache(settings)
        self._ending = (
            threading.RLock()
        )  # held while a trial is recorded: its end or the time limit, whichever is first
        self._watchdog: threading.Timer | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._job = self._jobs[config["job"]] if "job" in config else None
        if self._job is None:
            self._spec = self._specs[config["key"]]
        self._trial: Trial | None = None
        self._stages: Iterator[StageReport] | None = None
        self._started_at = datetime.now(UTC).isoformat()
        self._stage_index = 0
        self._slice_index = 0
        self._metrics: dict[str, float] = {}

    def cleanup(self) -> None:
        with self._ending:
            if self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None

    def step(self) -> dict[str, Any]:
        """Run one stage and return its metrics; raises what the stage raised, unless it is a UserError."""
        if self._job is not None:
            return self._run_job(self._job)
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

    def _run_job(self, job: PrepareJob) -> dict[str, Any]:
        try:
            prepared = run_job(job, self._contexts.open(job.run), self._settings)
        except UserError as error:
            return {"done": True, "refused": str(error)}
        return {"done": True, "prepared": prepared}

    def _next_stage(self) -> StageReport | None:
        if self._stages is None:
            if self._settings.trial_timeout_s is not None:
                self._watchdog = threading.Timer(self._settings.trial_timeout_s, self._time_is_up, [self._spec.key])
                self._watchdog.daemon = True
                self._watchdog.start()
            context = self._contexts.open(self._spec.run)
            key = context.key(self._spec.config)
            if key != self._spec.key:
                raise UserError(
                    f"the model or data of {self._spec.run.label} differ on {os.uname().nodename} (trial key {key}, expected "
                    f"{self._spec.key}): make the same files visible on every node, then start again"
                )
            self._trial = Trial(self._spec.config, context, self._shared())
            self._stages = iter(self._trial.stages())
        report = next(self._stages, None)
        if report is not None:
            self._metrics |= report.metrics
        return report

    def _shared(self) -> tuple[Need, ...]:
        """For all trials of this search at the seq_len of this one."""
        seq_len = self._spec.config.taylor_seq_len
        return needs_of(
            spec.config
            for spec in self._specs.values()
            if spec.run == self._spec.run and spec.config.taylor_seq_len == seq_len
        )

    def _complete(self, report: StageReport | None) -> dict[str, Any]:
        assert self._trial is not None and self._stages is not None
        for last in self._stages:  # slices that add no item, when there are fewer items than slices
            self._metrics |= last.metrics
        self.cleanup()
        record = self._record("complete")
        self._trial.write_files(self._settings.store.within(f"{TRIALS}/{self._spec.key}"))
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
            record = self._trial.progress.record(status, reason)
        record.resources = self._settings.resources.to_ray()
        return record

    def _time_is_up(self, key: str) -> None:
        with self._ending:
            if self._watchdog is None or self._spec.key != key:
                return  # the trial ended while this waited for the lock
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
                result["slice_index"], result["outcomes"] = self._slice_index, report.outcomes
                result["items_per_task"] = self._trial.context.suite.items_per_task if self._trial else {}
                self._slice_index += 1
            self._stage_index += 1
        return result
