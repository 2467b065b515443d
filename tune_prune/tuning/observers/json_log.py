"""A search as JSON lines, for machines that follow it: one object per line, with the fields of docs/watching.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TextIO

from tune_prune.core.files import to_json
from tune_prune.core.records import PER_ITEM, StageReport
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.work import PrepareJob, Work


class JsonLog(Observer):
    """Writes events to `stream`, each at once; None: nowhere."""

    title = "--log-json"

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getstate__(self) -> Mapping[str, Any]:
        return {"_stream": None}  # Ray pickles what it calls, and uses no copy

    def event(self, event: str, /, **fields: Any) -> None:
        if self._stream is not None:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._stream.write(to_json({"event": event, "time": time, **fields}, indent=None, plain_ascii=True))
            self._stream.flush()

    def on_start(self, work: Work) -> None:
        self.event("job_start" if isinstance(work, PrepareJob) else "trial_start", **_named(work))

    def on_message(self, work: Work, message: Message) -> None:
        if isinstance(message, TrialMessage) and message.stage is not None:
            where = {"host": message.progress.host, "device": message.progress.device_name}
            self.event("stage", **_named(work), index=message.index, **where, **_stage(message.stage))

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, PrepareJob) and isinstance(last, JobMessage):
            baseline = None if last.baseline is None else last.baseline.metrics
            stages = [_stage(report) for report in last.reports]
            refused = last.refused or last.given_up
            self.event("job_end", **_named(work), stages=stages, baseline=baseline, reason=refused)
        elif isinstance(last, TrialMessage) and (record := last.record) is not None:
            told: dict[str, Any] = {"status": record.status, "metrics": last.progress.metrics}
            told |= {"reason": record.reason, "failure": record.failure}
            told |= {"seconds": record.elapsed_time_s, "peak_memory_bytes": record.peak_memory_bytes}
            self.event("trial_end", **_named(work), **told)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        if isinstance(work, PrepareJob):
            self.event("job_end", **_named(work), stages=[], baseline=None, reason=_said(error))
        else:
            self.on_end(work, last)


def _named(work: Work) -> dict[str, Any]:
    if isinstance(work, PrepareJob):
        return {"model": work.run.label, "job": str(work)}
    return {"model": work.run.label, "key": work.key, "name": work.config.name, "config": work.config.to_dict()}


def _stage(report: StageReport) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name not in PER_ITEM}


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or ' ').splitlines()[-1]}"
