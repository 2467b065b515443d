"""A lock on object storage: an object that says who holds it and until when, renewed while its owner lives.

The objects .lock/00000001.json, .lock/00000002.json, ... are one owner each. Who finds the newest one expired or given back
puts the next, if there is none: of several who try one wins. One that seems expired is watched for a while first, as clocks may
differ or be set: who lives renews it by its own. Records are safe all the same, as none that is finished is ever replaced.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tune_prune.core.errors import UserError
from tune_prune.core.files import number, to_json
from tune_prune.core.process import ending
from tune_prune.core.storage.contract import StorageError, Store, held_by, taken

log = logging.getLogger(__name__)

LEASE_S = 60.0  # what a killed owner keeps others waiting for at most
_LOCKS = ".lock"


class Lease:
    """The lock of the experiment in `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store.within(_LOCKS)
        self._experiment = store.folder
        self._length = LEASE_S
        self._number = 0
        self._about = {"host": platform.node(), "pid": os.getpid(), "owner": uuid.uuid4().hex}
        self._ended = threading.Event()
        self._lost = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises UserError where another search holds it, after waiting for one that may be dead; and where another one has taken
        over, as this process could not renew it in time; what was complete by then is only told."""
        self._take()
        self._owner = threading.get_ident()
        renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        renewal.start()
        complete = False
        try:
            try:
                yield
                complete = True
            finally:
                self._ended.set()
                renewal.join()  # which may still interrupt this one
                self._give_back()
        except (KeyboardInterrupt, SystemExit):  # SystemExit: of Ray's handler of SIGTERM
            if not self._lost:
                raise
        if not self._lost:
            return
        taken_over = (
            f"another search has taken over experiment {self._experiment}, as this one could not renew its lock for "
            f"{self._length:g} s; nothing recorded is lost"
        )
        if not complete:
            raise UserError(f"{taken_over}: wait for its end, or stop it and run the same command again")
        log.warning("%s, and this one is complete: the other one writes its tables again", taken_over)

    def _take(self) -> None:
        last, owner = self._newest()
        first = last, owner["until"]
        if owner["until"] > 0:  # else it was given back
            # Clocks may differ, or be set: who lives renews it within a quarter of its length, by any clock.
            seconds = min(max(owner["until"] - time.time(), self._length / 2), self._length)
            log.warning(
                "%s is locked by a search%s that may have been killed: waiting up to %.0f s",
                self._experiment, held_by(owner), seconds,
            )  # fmt: skip
            end = time.monotonic() + seconds
            while owner["until"] > 0 and (left := end - time.monotonic()) > 0:
                time.sleep(min(self._length / 12, left))
                last, owner = self._newest()
                if owner["until"] > 0 and (last, owner["until"]) != first:  # it lives
                    raise UserError(taken(self._experiment, owner))
        self._number = last + 1
        won = self._store.put_new(_name(self._number), self._content())
        last, owner = self._newest()
        if not won or last != self._number:
            raise UserError(taken(self._experiment, owner))
        for name in self._store.names():
            if name < _name(self._number):
                self._store.remove(name)

    def _renew(self) -> None:
        while not self._ended.wait(self._length / 4):
            try:
                if self._newest()[0] != self._number:
                    self._lost = True
                    if heard := ending.heard():
                        signal.pthread_kill(self._owner, heard)  # also where it waits
                    return
                self._store.put(_name(self._number), self._content())
            except UserError as error:
                log.warning("the lock of %s was not renewed, which is tried again: %s", self._experiment, error)
            except Exception:  # without this thread the search would go on when another one has taken over
                log.exception("the lock of %s was not renewed, which is tried again", self._experiment)

    def _give_back(self) -> None:
        if self._lost:
            return
        try:
            self._store.put(_name(self._number), self._content(until=0.0))
        except UserError as error:  # what has ended the search is what is told
            log.warning("the lock of %s ends by itself in %g s: %s", self._experiment, self._length, error)

    def _content(self, until: float | None = None) -> str:
        return to_json({**self._about, "until": time.time() + self._length if until is None else until})

    def _newest(self) -> tuple[int, Mapping[str, Any]]:
        """The number of the last lock, and what it says; 0 where there is none."""
        names = self._store.names()
        if not names:
            return 0, {"until": 0.0}
        last = names[-1]
        try:
            about = self._store.read(last) or {"until": 0.0}
            return int(last.partition(".")[0]), {**about, "until": number(about["until"])}
        except StorageError:
            raise
        except (KeyError, ValueError):
            raise UserError(
                f"{self._store.path(last)} is no lock of a search; delete it if none runs on {self._experiment}"
            ) from None


def _name(index: int) -> str:
    return f"{index:08d}.json"
