"""Notes of killed attempts: beside the stages that they have noted themselves, the seconds of the unfinished one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tune_prune.core.hashing import digest
from tune_prune.core.ledger import read_passes
from tune_prune.core.records import TrialRecord
from tune_prune.tuning.messages import Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.work import PrepareJob, Work
from tune_prune.tuning.worker import WorkerSettings


@dataclass
class _Running:
    record: TrialRecord
    since: float  # the end of its last stage, else its start
    noted_s: float = 0.0  # of a job: what had been computed for it before


class LostWork(Observer):
    """Notes an attempt whose process died, and at the end of a search that is interrupted (`note_all`) those that were running."""

    def __init__(self, settings: WorkerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._running: dict[Work, _Running] = {}

    def on_start(self, work: Work) -> None:
        self._note(work)  # once more: its process died
        if isinstance(work, PrepareJob):
            key, config = f"job-{work.name}-{digest(work.run.label)}", None
        else:
            key, config = work.key, work.config  # which has the model in it
        record = self._settings.begun(key, work.run.label, config)
        self._running[work] = _Running(record, self._clock(), self._noted_s(work))

    def on_message(self, work: Work, message: Message) -> None:
        if isinstance(message, TrialMessage):
            self._running[work] = _Running(message.record, self._clock())

    def on_end(self, work: Work, last: Message | None) -> None:
        self._running.pop(work, None)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self._note(work)

    def note_all(self) -> None:
        """Note all attempts that run, as they are killed with this process or with its Ray."""
        for work in list(self._running):
            self._note(work)

    def _note(self, work: Work) -> None:
        if (lost := self._running.pop(work, None)) is not None:
            noted_s = self._noted_s(work) - lost.noted_s
            self._settings.ledger.note(lost.record, max(0.0, self._clock() - lost.since - noted_s))

    def _noted_s(self, work: Work) -> float:
        """Return the seconds of what a job's attempts have noted themselves; of a trial, messages tell."""
        if not isinstance(work, PrepareJob):
            return 0.0
        if work.samples is None:
            settings = self._settings
            attempts = [attempt for attempt in settings.ledger.attempts([]) if attempt.search_id == settings.search_id]
            return sum(
                stage.duration_s for attempt in attempts if attempt.model == work.run.label for stage in attempt.stages
            )
        made = [entry for entry in read_passes(self._settings.store) if entry["model"] == work.run.label]
        samples = asdict(work.samples).items()
        return sum(entry["duration_s"] for entry in made if all(entry.get(name) == value for name, value in samples))
