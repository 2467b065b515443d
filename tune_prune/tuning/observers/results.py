"""What is kept of results by the driver: the ledger's missing records, what the preparation found."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.records import Status, TrialRecord
from tune_prune.trial.trial import TrialProgress
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.preparation import PrepareJob, Work
from tune_prune.tuning.worker import WorkerSettings


class LedgerObserver(Observer):
    """Records what no worker can: trials that were stopped (`reasons`, by trial key), and trials whose process died."""

    def __init__(self, settings: WorkerSettings, reasons: Mapping[str, str]) -> None:
        self._settings = settings
        self._reasons = reasons
        self.records: dict[str, TrialRecord] = {}  # of this search, by key

    def on_message(self, work: Work, message: Message) -> None:
        if isinstance(message, TrialMessage) and message.record is not None:
            self.records[message.record.key] = message.record

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, PrepareJob) or not isinstance(last, TrialMessage) or last.record is not None:
            return
        reason = self._reasons.get(work.key)
        if reason is not None:  # else it has ended with the search, and the next start runs it again
            self._write(last.progress, "stopped_early", reason)

    def on_error(self, work: Work, last: Message | None, error: BaseException | None) -> None:
        if isinstance(work, PrepareJob):
            return
        record = self._settings.failure_of_this_search(work.key)
        if record is not None:
            self.records[record.key] = record
            return
        unseen = TrialProgress(work.key, work.run.label, work.config, "", "")
        progress = last.progress if isinstance(last, TrialMessage) else unseen
        self._write(progress, "failed", _death(error, progress))

    def _write(self, progress: TrialProgress, status: Status, reason: str) -> None:
        self.records[progress.key] = self._settings.write_record(progress, status, reason)


class PrepareObserver(Observer):
    """Tells what the jobs have found: a line each to `say`, baselines to `keep`; remembers the first failure."""

    def __init__(
        self, num_jobs: int, say: Callable[[str], None], keep: Callable[[ModelRun, TrialRecord], None]
    ) -> None:
        self._num_jobs = num_jobs
        self._say = say
        self._keep = keep
        self._done = 0
        self.failure: Exception | None = None

    def on_end(self, work: Work, last: Message | None) -> None:
        if not isinstance(work, PrepareJob) or not isinstance(last, JobMessage):
            return
        if last.refused:
            self.failure = self.failure or UserError(last.refused)
            return
        self._done += 1
        self._say(f"[prepare {self._done}/{self._num_jobs}] {work}: {last}")
        if last.baseline is not None:
            self._keep(work.run, last.baseline)

    def on_error(self, work: Work, last: Message | None, error: BaseException | None) -> None:
        if isinstance(work, PrepareJob) and self.failure is None:
            self.failure = RuntimeError(f"{work} failed: {_last_line(error)}")
            self.failure.__cause__ = error


def _death(error: BaseException | None, progress: TrialProgress) -> str:
    """Why a trial was given up, in one line; Ray's traceback is in the trial's folder under tune/."""
    after = f" after the stage {progress.reports[-1].stage}" if progress.reports else ""
    return f"the worker of the trial died{after}, perhaps out of memory: {_last_line(error).split(' Some common causes')[0]}"


def _last_line(error: BaseException | None) -> str:
    return (str(error).strip() or "unknown cause").splitlines()[-1].strip() if error is not None else "unknown cause"
