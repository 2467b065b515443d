"""Followers of a search while it runs; the same observers follow one on Ray and one in this process.

The driver tells `Observers`, which tells everybody. What keeps results (records, baselines) is an `Observer` of the messages
themselves. What shows a search to others (the JSON log, status.json, TensorBoard, trackers) is a `Reader` of one stream of events,
those of `--log-json`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tune_prune.core.records import StageReport
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.work import PrepareJob, Work


class Observer:
    """Follows a search: each piece of work is a trial or a preparation job. A subclass overrides what it cares for."""

    title = "a file of the search"  # what people call what it shows

    def on_begin(self) -> None:
        """Hear that nothing is handed out yet."""

    def on_start(self, work: Work) -> None:
        """Hear that work begins; once more where its process died and it is tried again."""

    def on_message(self, work: Work, message: Message) -> None:
        """Hear that a stage of a trial, or a job, is done."""

    def on_end(self, work: Work, last: Message | None) -> None:
        """Hear that work has ended, by itself or stopped by the rule of the search, after the message `last`."""

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        """Hear that work has ended by an error, or with its process.

        `last` has the failed record of a trial (`TrialMessage.record`), and is the last message of a job.
        """

    def on_tick(self, running: int) -> None:
        """Hear now and then how many pieces are being worked on."""

    def on_finish(self) -> None:
        """Hear that nothing more is handed out."""


class Observers(Observer):
    """Tells all that follow a search: first the `keepers`, without which it cannot go on, then the `views`, of which one that
    raises is a warning to `warn`, once, and is told what comes all the same."""

    def __init__(self, keepers: Sequence[Observer], views: Sequence[Observer], warn: Callable[[str], None]) -> None:
        self._keepers, self._views, self._warn = list(keepers), list(views), warn
        self._failed: set[Observer] = set()

    def _tell(self, event: str, *arguments: Any) -> None:
        for keeper in self._keepers:
            getattr(keeper, event)(*arguments)
        for view in self._views:
            try:
                getattr(view, event)(*arguments)
            except Exception as error:  # noqa: BLE001  # said
                if view not in self._failed:
                    self._failed.add(view)
                    self._warn(f"{view.title}: not written ({type(error).__name__}: {error}); the search goes on")

    def on_begin(self) -> None:
        self._tell("on_begin")

    def on_start(self, work: Work) -> None:
        self._tell("on_start", work)

    def on_message(self, work: Work, message: Message) -> None:
        self._tell("on_message", work, message)

    def on_end(self, work: Work, last: Message | None) -> None:
        self._tell("on_end", work, last)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self._tell("on_error", work, last, error)

    def on_tick(self, running: int) -> None:
        self._tell("on_tick", running)

    def on_finish(self) -> None:
        self._tell("on_finish")


@dataclass(frozen=True)
class Event:
    """Says what has happened: job_start, job_end, trial_start, stage or trial_end, with the fields of docs/watching.md."""

    name: str
    fields: Mapping[str, Any]
    work: Work
    time: datetime = field(default_factory=lambda: datetime.now(UTC))


class Reader(Observer, ABC):
    """Follows a search by its events alone; a subclass overrides `read`."""

    def __getstate__(self) -> Mapping[str, Any]:
        return {}  # Ray pickles what it calls, and uses no copy; streams and threads have none

    @abstractmethod
    def read(self, event: Event) -> None:
        """Take in one event."""

    def on_start(self, work: Work) -> None:
        self._tell("job_start" if isinstance(work, PrepareJob) else "trial_start", work)

    def on_message(self, work: Work, message: Message) -> None:
        if isinstance(message, TrialMessage) and message.stage is not None:
            self._tell("stage", work, index=message.index, **_machine(message), **_stage(message.stage))

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, PrepareJob):
            job = last if isinstance(last, JobMessage) else JobMessage()
            baseline = None if job.baseline is None else job.baseline.metrics
            stages = [_stage(report) for report in job.reports]
            self._tell("job_end", work, stages=stages, baseline=baseline, reason=job.refused or job.given_up)
        elif isinstance(last, TrialMessage) and (record := last.record).ended:
            outcome: dict[str, Any] = {"status": record.status, "metrics": record.metrics}
            outcome |= {"reason": record.reason, "failure": record.failure, "seconds": record.elapsed_time_s}
            outcome |= {"peak_memory_bytes": record.peak_memory_bytes, **_machine(last)}
            self._tell("trial_end", work, **outcome)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        if isinstance(work, PrepareJob):
            reason = f"{type(error).__name__}: {(str(error).strip() or ' ').splitlines()[-1]}"
            self._tell("job_end", work, stages=[], baseline=None, reason=reason)
        else:
            self.on_end(work, last)

    def _tell(self, name: str, work: Work, **fields: Any) -> None:
        about: dict[str, Any] = {"model": work.run.label}
        if isinstance(work, PrepareJob):
            about["job"] = str(work)
        else:
            about |= {"key": work.key, "name": work.config.name, "config": work.config.to_dict()}
        self.read(Event(name, about | fields, work))


def _machine(message: TrialMessage) -> dict[str, str]:
    return {"host": message.record.host, "device": message.record.device_name}


def _stage(report: StageReport) -> dict[str, Any]:
    return report.to_dict() | {"metrics": report.metrics}
