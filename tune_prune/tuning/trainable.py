"""One trial inside a Ray worker: every `step()` is one stage of `tune_prune.trial.trial.Trial`. Or one preparation job, whole.

The worker, not the driver, writes the trial's files and then its ledger record: once the record is there the trial is
done, whatever happens to the driver. An actor is reused for the next trial and keeps its model and data.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ray import tune

from tune_prune.core.errors import UserError
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import TRIALS
from tune_prune.pruning.statistics import Need
from tune_prune.trial.statistics import needs_of
from tune_prune.trial.trial import Trial, TrialProgress
from tune_prune.tuning.messages import JobMessage, Slice, TrialMessage, to_result
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
        self._trial: Trial | None = None
        self._stages: Iterator[StageReport] | None = None
        self._stage_index = self._slice_index = 0
        if self._job is None:
            self._spec = self._specs[config["key"]]
            self._opening = TrialProgress(self._spec.key, self._spec.run.label, self._spec.config)

    def cleanup(self) -> None:
        with self._ending:
            if self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None

    def step(self) -> dict[str, Any]:
        """Run one stage and return its message; raises what the stage raised, unless it is a UserError."""
        return to_result(self._run_trial() if self._job is None else self._run_job(self._job))

    def _run_job(self, job: PrepareJob) -> JobMessage:
        try:
            return run_job(job, self._contexts.open(job.run), self._settings)
        except UserError as error:
            return JobMessage(refused=str(error))

    def _run_trial(self) -> TrialMessage:
        earlier = self._settings.failure_of_this_search(self._spec.key) if self._trial is None else None
        if earlier is not None and earlier.reason.startswith(TIMEOUT_REASON):
            return TrialMessage(self._progress, record=earlier)  # a second attempt would take as long
        try:
            report = self._next_stage()
            message = TrialMessage(self._progress) if report is None else self._message(report)
            if report is None or (report.items_total and report.items_scored >= report.items_total):
                return replace(message, record=self._complete())
            return message
        except UserError as error:
            return TrialMessage(self._progress, record=self._fail(str(error)))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise

    @property
    def _progress(self) -> TrialProgress:
        """Of the trial, also where its model could not be opened."""
        return self._opening if self._trial is None else self._trial.progress

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
        return next(self._stages, None)

    def _shared(self) -> tuple[Need, ...]:
        """For all trials of this search at the seq_len of this one."""
        seq_len = self._spec.config.seq_len
        return needs_of(
            spec.config
            for spec in self._specs.values()
            if spec.run == self._spec.run and spec.config.seq_len == seq_len
        )

    def _message(self, report: StageReport) -> TrialMessage:
        part = None
        if report.items_scored and self._trial is not None:
            fractions, sizes = self._spec.run.protocol.slices, self._trial.context.suite.items_per_task
            part = Slice(self._slice_index, fractions[self._slice_index], report.outcomes, sizes)
            self._slice_index += 1
        self._stage_index += 1
        return TrialMessage(self._progress, report, self._stage_index - 1, part)

    def _complete(self) -> TrialRecord:
        assert self._trial is not None and self._stages is not None
        for _ in self._stages:  # slices that add no item, when there are fewer items than slices
            pass
        self.cleanup()
        self._trial.write_files(self._settings.store.within(f"{TRIALS}/{self._spec.key}"))
        return self._settings.write_record(self._progress, "complete")

    def _fail(self, reason: str) -> TrialRecord:
        self.cleanup()
        return self._settings.write_record(self._progress, "failed", reason)

    def _time_is_up(self, key: str) -> None:
        with self._ending:
            if self._watchdog is None or self._spec.key != key:
                return  # the trial ended while this waited for the lock
            # Python cannot stop a thread that computes, and Ray has no limit of its own: the process has to end.
            try:
                self._fail(f"{TIMEOUT_REASON} of {self._settings.trial_timeout_s:g} s per trial (--trial-timeout)")
            finally:
                os._exit(1)
