"""The local Ray of a search, as this process sees it: it starts in a process of its own (head.py), while this one imports and
plans. Nothing here imports ray."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil

from tune_prune.core import machine, temporary
from tune_prune.core.errors import NotStarted, UserError
from tune_prune.tuning.ray_cluster.loss import check_alive

INSTEAD = "try again when the machine is less busy, or add --inline, which runs the trials in this process without Ray"
_HEAD = "tune_prune.tuning.ray_cluster.head"
# The longest name of a temporary directory below which the paths of Ray's sockets are short enough
_LONGEST = 107 - len("/tune_prune.12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")


class LocalRay:
    """A Ray of `num_cpus` (None: all of this machine) that begins to start at once, its files in a temporary folder of its own.
    Used as a context, it ends with it, however far it has come, and its folder goes; it ends with this process as well, killed or
    not."""

    def __init__(self, num_cpus: int | None = None) -> None:
        # Both processes have to agree on it, before either imports ray; it is what Ray chooses for a Ray of its own.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        # It listens on 127.0.0.1, to which no proxy of a user's cluster leads: its processes would wait for each other for ever.
        os.environ.update(RAY_grpc_enable_http_proxy="0")
        path = os.pathsep.join(
            entry or os.getcwd() for entry in sys.path
        )  # Ray and its workers import what this one does
        where = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        if len(where) > _LONGEST and "RAY_TMPDIR" not in os.environ and os.access("/tmp", os.W_OK):
            where = "/tmp"
        _remove_abandoned(where)
        self._folder = temporary.make(where)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _HEAD, str(num_cpus or machine.cpus()), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process, which ends Ray
            text=True,
        )

    def address(self) -> str:
        """Where it listens, as soon as it is up. Raises UserError or NotStarted where it does not start."""
        line = self._next_line()
        if not line:
            raise NotStarted(
                f"Ray ended while it started (exit code {self._process.wait()}; {machine.load()}); {INSTEAD}"
            )
        said = json.loads(line)
        if "address" not in said:
            raise (UserError if "user_error" in said else NotStarted)(*said.values())
        return str(said["address"])

    def wait_for_loss(self) -> str:
        """Waits until one of Ray's processes dies before its time, and says which; also where this object ends it."""
        line = self._next_line()
        return str(json.loads(line)["lost"]) if line else "first process"

    def _next_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        temporary.remove(self._folder)


@contextmanager
def started_early(wanted: bool) -> Iterator[LocalRay | None]:
    """Within it a local Ray starts and is there, if one is `wanted` and this process has none. Raises RayLost where it had one
    that has died."""
    if wanted:
        check_alive()
    ray = sys.modules.get("ray")
    if not wanted or (ray is not None and ray.is_initialized()):
        yield None
        return
    with LocalRay() as local:
        yield local


def _remove_abandoned(where: str) -> None:
    """End what is left of searches that were killed together with their first process of Ray, and remove their folders."""
    abandoned = temporary.abandoned(where)
    if abandoned:
        _end_processes(abandoned)
    for folder in abandoned:
        shutil.rmtree(folder, ignore_errors=True)


def _end_processes(folders: list[Path]) -> None:
    """Kill the processes of this user that are Ray's own and have their files in one of these folders, which they name."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        command = " ".join(process.info["cmdline"] or ())  # None: it has ended
        own = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
        if own and "/ray/" in command and any(f"{folder}/" in command for folder in folders):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
