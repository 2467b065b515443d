"""How work ends for who follows a search, and what the driver keeps of what the preparation found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.records import TrialRecord
from tune_prune.trial.failures import failure_of, is_given_up
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.work import PrepareJob, Work
from tune_prune.tuning.worker import WorkerSettings


class PrepareObserver(Observer):
    """Has baselines kept as jobs find them (`keep`), and remembers the first failure of a job that was not given up."""

    def __init__(self, keep: Callable[[ModelRun, TrialRecord], None]) -> None:
        self._keep = keep
        self.failure: Exception | None = None

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, PrepareJob) and isinstance(last, JobMessage):
            if last.refused:
                self.failure = self.failure or UserError(last.refused)
            elif last.baseline is not None:
                self._keep(work.run, last.baseline)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        if isinstance(work, PrepareJob) and self.failure is None and not is_given_up(error):
            self.failure = RuntimeError(f"{work} failed: {last_line(error)}")
            self.failure.__cause__ = error


class PrepareLines(Observer):
    """Tells what the jobs have found: a line each to `say`."""

    title = "lines of the preparation"

    def __init__(self, num_jobs: int, say: Callable[[str], None]) -> None:
        self._num_jobs = num_jobs
        self._say = say
        self._done = 0

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, PrepareJob) and isinstance(last, JobMessage) and not last.refused:
            self._done += 1
            self._say(f"[prepare {self._done}/{self._num_jobs}] {work}: {last}")
            for note in last.baseline.notes if last.baseline is not None else ():
                self._say(f"note: {work.run.label}: {note}")

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self.on_end(work, last)


class FailuresObserver(Observer):
    """Tells `forget` the key of every trial that has failed."""

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(last, TrialMessage) and last.record.status == "failed":
            self._forget(last.record.key)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self.on_end(work, last)


def end(
    observers: Observer, settings: WorkerSettings, reasons: Mapping[str, str], work: Work, last: Message | None
) -> None:
    """Tell observers that work has ended by itself, or by the rule of the search, whose `reasons` (by trial key) say why;
    and of the record of a trial that was stopped, which the ledger has then. One that has ended with the search has no
    record: the next start runs it again."""
    if isinstance(last, TrialMessage) and not last.ended and (reason := reasons.get(last.record.key)) is not None:
        last = replace(last, record=settings.end(last.record, "stopped_early", reason))
    observers.on_end(work, last)


def end_by_error(
    queue: WorkQueue,
    observers: Observer,
    settings: WorkerSettings,
    work: Work,
    last: Message | None,
    error: BaseException,
) -> None:
    """Tell queue and observers that work has ended by `error` after the message `last`, and of the trials that are not run
    because of it."""
    last = last_message(settings, work, last, error)
    not_run = queue.end(work, last, error)
    observers.on_error(work, last, error)
    for other in not_run:
        reason = f"not run: another trial with the same samples died of what this one needs, too ({last_line(error)})"
        message = TrialMessage(settings.end(settings.not_run(other), "failed", reason, failure_of(error)))
        observers.on_start(other)
        observers.on_message(other, message)
        observers.on_end(other, message)


def last_message(settings: WorkerSettings, work: Work, last: Message | None, error: BaseException) -> Message | None:
    """Return what is said last of work that `error` has ended: of a trial a message with its failed record, which the
    ledger has."""
    if isinstance(work, PrepareJob):
        return JobMessage(given_up=f"given up ({last_line(error)})") if is_given_up(error) else last
    return TrialMessage(settings.failed(work, last.record if isinstance(last, TrialMessage) else None, error))


def last_line(error: BaseException) -> str:
    """Return the only line of an error of Ray's that says something."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
