"""status.json: what a running search says of itself every few seconds, for `search --status` wherever the storage is seen."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from tune_prune.core.files import DamagedFile, to_json
from tune_prune.core.store import STATUS, Store
from tune_prune.tuning.observers.observer import Event, Reader
from tune_prune.tuning.work import Work
from tune_prune.tuning.worker import WorkerSettings

BEAT_S = 10.0  # between two writings, also while a stage takes an hour
SCHEMA_VERSION = 1


class StatusObserver(Reader):
    """Writes the file from a thread of its own, whole or not at all; entered before the first piece of work, left after the last.

    `total` counts trials, of which `done` were finished before this start; `seconds_left` tells how long the rest takes. The search
    may go on with other trials after these, and says itself when it has ended (`ended`).
    """

    title = "status.json"

    def __init__(
        self,
        settings: WorkerSettings,
        total: int,
        done: int,
        slots: int,
        seconds_left: Callable[[], tuple[float, float] | None],
        beat_s: float = BEAT_S,
    ) -> None:
        self._settings = settings
        self._seconds_left = seconds_left
        self._beat_s = beat_s
        self._about: Mapping[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "search_id": settings.search_id,
            "host": platform.node(),
            "pid": os.getpid(),
            "started_at": now(),
            "total": total,
            "slots": slots,
        }
        self._done, self._failed = done, 0
        self._running: dict[Work, dict[str, Any]] = {}
        self._said: Mapping[str, Any] = {}  # replaced as a whole, by the search's thread only
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StatusObserver:
        self._ended = threading.Event()
        self._say("running")
        self._try_to_write()
        self._thread = threading.Thread(target=self._beats, name="status", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()
        if kind is not None:  # else the search says how it has ended
            self._running.clear()
            self._say("stopped")
            self._try_to_write()

    def read(self, event: Event) -> None:
        fields = event.fields
        if event.name.endswith("_start"):
            piece = {"model": fields["model"], "key": fields.get("key"), "config": fields.get("name") or fields["job"]}
            self._running[event.work] = piece | {"since": now(), "after_stage": "", "host": ""}
        elif event.name == "stage" and event.work in self._running:
            self._running[event.work] |= {"after_stage": fields["stage"], "host": fields["host"]}
        elif event.name.endswith("_end"):
            self._running.pop(event.work, None)
            if event.name == "trial_end":
                self._done += 1
                self._failed += fields["status"] == "failed"
        self._say("running")

    def on_finish(self) -> None:
        self._running.clear()
        self._say("running")
        self._write()

    def _say(self, state: str) -> None:
        self._said = {
            "state": state,
            "done": self._done,
            "failed": self._failed,
            "running": [dict(piece) for piece in self._running.values()],
            "eta_seconds": self._seconds_left() if state == "running" else None,
            "eta_at": now(),
        }

    def _beats(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._try_to_write()

    def _try_to_write(self) -> None:
        # What cannot be written now is written at the next beat; that the last cannot be is said by `on_finish`.
        with contextlib.suppress(Exception):
            self._write()

    def _write(self) -> None:
        self._settings.store.put(STATUS, to_json({**self._about, **self._said, "updated_at": now()}))


def ended(store: Store, state: str = "ended") -> None:
    """Say that a search has ended (or was "stopped") which went on after what was observed, or had nothing left to run. A damaged
    file goes: no other is written where nothing runs."""
    try:
        said = store.read(STATUS)
    except DamagedFile:
        return store.remove(STATUS)
    if said is not None and said.get("state") in ("running", "stopped"):
        store.put(STATUS, to_json({**said, "state": state, "updated_at": now()}))


def now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
