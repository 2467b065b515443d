"""Trials and preparation jobs, one after the other in this process: every `step()` is one stage of
`tune_prune.trial.trial.Trial`, or one job, whole.

The process that computes a trial, not the driver, writes its files and then its ledger record: once the record is there
the trial is done, whatever happens to the driver. The model and data are kept for the next trial.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tune_prune.core.errors import MachineError, UserError, refused
from tune_prune.core.ledger import write_pass
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import TRIALS
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.pruning.statistics import Need
from tune_prune.trial.context import TrialContext
from tune_prune.trial.failures import failure_of
from tune_prune.trial.statistics import needs_of
from tune_prune.trial.trial import Trial, prepare, run_trial
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage, logged_warnings
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work
from tune_prune.tuning.worker import ContextCache, WorkerSettings


class StageRunner:
    """Runs the work that it is given, a stage at a time: `begin`, then `step` until a message has `ended`.

    `specs`: every trial of the search by key, as a pass over the dense model serves those that share it. A UserError (the
    same at every attempt) ends a trial as failed. Any other exception is recorded as well and raised, so that the trial can
    be tried again in a fresh process. What a file system refuses, such as a full disk, is no trial's failure: MachineError.
    """

    def __init__(self, specs: Mapping[str, TrialSpec], settings: WorkerSettings) -> None:
        self._specs = specs
        self._settings = settings
        self._contexts = ContextCache(settings)

    def begin(self, work: Work, after_a_death: bool = False) -> None:
        """Begin that work; `after_a_death`: of the process that did it before."""
        self._after_a_death = after_a_death
        self._job = work if isinstance(work, PrepareJob) else None
        self._trial: Trial | None = None
        self._stages: Iterator[StageReport] | None = None
        if isinstance(work, TrialSpec):
            self._spec = work
            self._opening = self._settings.begun(work.key, work.run.label, work.config)

    def forget_model(self) -> None:
        """Load it anew for the next work; what was learned of how it fits into memory stays."""
        self._trial = self._stages = None
        self._contexts.forget()

    def step(self) -> Message:
        """Run one stage and return its message; raises what the stage raised, unless it is a UserError."""
        try:
            with logged_warnings() as warnings:
                message = self._run_trial() if self._job is None else self._run_job(self._job)
        except Exception as error:
            said = refused(error)
            if said is None:
                raise
            raise MachineError(said[0]) from error  # the next trial would meet it, too
        return replace(message, warnings=tuple(warnings))

    def _run_job(self, job: PrepareJob) -> JobMessage:
        try:
            return run_job(job, self._contexts.open(job.run, self._after_a_death), self._settings)
        except OutOfMemory as error:  # trials with fewer samples may fit; the others are records
            return JobMessage(given_up=str(error))
        except UserError as error:
            return JobMessage(refused=str(error))

    def _run_trial(self) -> TrialMessage:
        try:
            report = self._next_stage()
            if report is None or (report.items_total and report.items_scored >= report.items_total):
                return TrialMessage(self._complete(), report)
            return TrialMessage(self._record, report)
        except UserError as error:
            return TrialMessage(self._fail(str(error), error))
        except Exception as error:
            if refused(error) is None:
                self._fail(f"{type(error).__name__}: {error}", error)
            raise

    @property
    def _record(self) -> TrialRecord:
        """The record of the trial, also where its model could not be opened."""
        return self._opening if self._trial is None else self._trial.record

    def _next_stage(self) -> StageReport | None:
        if self._stages is None:
            context = self._contexts.open(self._spec.run, self._after_a_death)
            key = context.key(self._spec.config)
            if key != self._spec.key:
                raise UserError(
                    f"the model or data of {self._spec.run.label} differ on {os.uname().nodename} (trial key {key}, expected "
                    f"{self._spec.key}): make the same files visible on every node, then start again"
                )
            self._trial = Trial(self._spec.config, context, self._shared(), self._opening)
            self._stages = iter(self._trial.stages())
        report = next(self._stages, None)
        if report is not None:
            self._settings.ledger.note(self._record)
        return report

    def _shared(self) -> tuple[Need, ...]:
        """Return what all trials of this search on the samples of this one need."""
        samples = self._spec.config.samples
        return needs_of(
            spec.config
            for spec in self._specs.values()
            if spec.run == self._spec.run and spec.config.samples == samples
        )

    def _complete(self) -> TrialRecord:
        assert self._trial is not None and self._stages is not None
        for _ in self._stages:  # slices that add no item, when there are fewer items than slices
            pass
        earlier = self._settings.ledger.read(self._spec.key)
        if earlier is not None and earlier.status != "failed":  # of another worker: the files stay those of its record
            return earlier
        files = self._trial.write_files(self._settings.store.within(f"{TRIALS}/{self._spec.key}"))
        return self._settings.end(self._record, "complete", files=files)

    def _fail(self, reason: str, error: Exception) -> TrialRecord:
        return self._settings.end(self._record, "failed", reason, failure_of(error))


def run_job(job: PrepareJob, context: TrialContext, settings: WorkerSettings) -> JobMessage:
    """Do a job in the worker that has its model open; every pass is noted as soon as it is made."""
    if job.samples is not None:
        reports = []
        for what, report in prepare(context, job.samples, job.needs):
            write_pass(settings.store, what, report)
            reports.append(report)
        return JobMessage(tuple(reports))
    key = context.key(None)
    store, begun = settings.store.within(f"{TRIALS}/{key}"), settings.begun(key, context.run.label, None)
    return JobMessage(baseline=run_trial(None, context, store, settings.ledger.note, begun))
