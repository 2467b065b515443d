"""The local Ray of a search: `ray start --head`, which begins to start while this process imports and plans. Nothing here imports
ray."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tune_prune.core import machine, temporary
from tune_prune.core.errors import NotStarted, UserError
from tune_prune.tuning import address as address_check
from tune_prune.tuning import orphans, set_up_ray

INSTEAD = "try again when the machine is less busy, or add --inline, which runs the trials in this process without Ray"
RESOURCE = "tune_prune_local"  # that the Ray of a search has, and no cluster
OBJECT_STORE_BYTES = 256 * 2**20  # Only records travel: each worker reads weights from disk.
LOOK_EVERY_S = 0.2
START_S = 300.0
# The longest name of a temporary directory below which the paths of Ray's sockets are short enough.
_LONGEST = 107 - len("/tune_prune.12345678/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")


class LocalRay:
    """A Ray of `num_cpus` (None: all of this machine) on 127.0.0.1 that begins to start at once, its files in a temporary folder.

    Used as a context, it ends with it, however far it has come, and its folder goes. It ends with this process as well, whatever
    has ended that.
    """

    def __init__(self, num_cpus: int | None = None) -> None:
        set_up_ray(None)
        where = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        if len(where) > _LONGEST and "RAY_TMPDIR" not in os.environ and os.access("/tmp", os.W_OK):
            where = "/tmp"
        temporary.sweep(where)
        # Ray opens its own folder to everybody; the one around it is this user's alone.
        self._folder = temporary.make(where)
        self._orphans = orphans.watch(self._folder)
        with socket.socket() as first, socket.socket() as second:
            for free in (first, second):
                free.bind(("127.0.0.1", 0))
            port, unused = first.getsockname()[1], second.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        # Ray imports what this process does.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        flags = [
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            # Ray's fixed ports may be those of another Ray on this machine.
            f"--ray-client-server-port={unused}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--include-dashboard=false",
        ]
        flags += [f"--num-cpus={num_cpus or machine.cpus()}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        flags += ["--include-log-monitor=false", f'--resources={{"{RESOURCE}": 1}}', "--block"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                # Unbuffered, so that the last line of its log is the reason for which it has ended.
                [sys.executable, "-u", "-m", "ray.scripts.scripts", "start", "--head", *flags],
                env=os.environ | {"RAY_TMPDIR": str(self._folder), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends Ray.
            )

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def wait_until_up(self) -> None:
        """Raises UserError or NotStarted where it does not start."""
        end = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < end:
            try:
                address_check.check(self.address)
                return
            except UserError:
                time.sleep(LOOK_EVERY_S)
        said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        if "AF_UNIX path" in said[-1]:
            raise UserError(
                f"Ray cannot start with its files in {self._folder.parent} ({said[-1]}); set RAY_TMPDIR to a short writable path, "
                "e.g. /tmp/r"
            )
        raise NotStarted(f"Ray did not start ({said[-1]}; {machine.load()}); {INSTEAD}")

    def wait_for_loss(self, over: threading.Event) -> str:
        """Wait until one of Ray's processes dies before its time, and say which; or until nobody wants to know any more."""
        while self._process.poll() is None and not over.wait(LOOK_EVERY_S):
            pass
        died = re.search(r"(\w+) \[exit code", self._log.read_text(errors="replace") if self._log.exists() else "")
        return died[1] if died else "first process"

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        orphans.end(self._orphans)
        self._process.kill()  # Nothing else has, where the process of `orphans` was killed.
        self._process.wait()
        temporary.remove(self._folder)
        temporary.sweep()  # What workers have left goes with them.


_early: LocalRay | None = None


@contextmanager
def started_early(wanted: bool) -> Iterator[None]:
    """Within it a local Ray starts, and `begun` gives it, if one is `wanted` and this process has none."""
    global _early
    ray = sys.modules.get("ray")
    if not wanted or _early is not None or (ray is not None and ray.is_initialized()):
        yield
        return
    with LocalRay() as _early:
        try:
            yield
        finally:
            _early = None


@contextmanager
def begun(num_cpus: int | None) -> Iterator[LocalRay]:
    """The Ray of `started_early`, else one of `num_cpus` that ends here."""
    if _early is not None:
        yield _early
        return
    with LocalRay(num_cpus) as local:
        yield local
