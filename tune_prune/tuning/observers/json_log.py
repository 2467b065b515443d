"""A search as JSON lines, for machines that follow it: one event a line, with the fields of docs/watching.md."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TextIO

from tune_prune.core.files import to_json
from tune_prune.tuning.observers.observer import Event, Reader


class JsonLog(Reader):
    """Writes every event to `stream`, each at once; None: nowhere."""

    title = "--log-json"

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def read(self, event: Event) -> None:
        self._write(event.name, event.time, event.fields)

    def event(self, name: str, /, **fields: Any) -> None:
        """Write an event of the command itself, e.g. its plan."""
        self._write(name, datetime.now(UTC), fields)

    def _write(self, name: str, time: datetime, fields: Any) -> None:
        if self._stream is not None:
            line = {"event": name, "time": time.isoformat(timespec="milliseconds"), **fields}
            self._stream.write(to_json(line, indent=None, plain_ascii=True))
            self._stream.flush()
