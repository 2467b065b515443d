"""The local Ray of a search, as this process sees it: it starts in a process of its own (head.py), while this one imports and
plans. Nothing here imports ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tune_prune.core.errors import MachineError, UserError
from tune_prune.cost_model import machine

INSTEAD = "try again when the machine is less busy, or add --inline, which runs the trials in this process without Ray"
_HEAD = "tune_prune.tuning.ray_cluster.head"


class LocalRay:
    """A Ray of `num_cpus` (None: all of this machine) that begins to start at once. Used as a context, it ends with it, however
    far it has come; it ends with this process as well, killed or not."""

    def __init__(self, num_cpus: int | None = None) -> None:
        # Both processes have to agree on it, before either imports ray; it is what Ray chooses for a Ray of its own.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        path = os.pathsep.join(
            entry or os.getcwd() for entry in sys.path
        )  # Ray and its workers import what this one does
        self._process = subprocess.Popen(
            [sys.executable, "-m", _HEAD, str(num_cpus or machine.cpus())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for this process, which ends Ray
            text=True,
        )

    def address(self) -> str:
        """Where it listens, as soon as it is up. Raises UserError or MachineError where it does not start."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MachineError(
                f"Ray ended while it started (exit code {self._process.wait()}; {machine.load()}); {INSTEAD}"
            )
        said = json.loads(line)
        if "address" not in said:
            raise (UserError if "user_error" in said else MachineError)(*said.values())
        return str(said["address"])

    def keep_logs(self) -> None:
        """Leave its folder behind at its end, as Ray does: a search has been on it."""
        assert self._process.stdin is not None
        self._process.stdin.write("joined")
        self._process.stdin.flush()

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its input


@contextmanager
def started_early(wanted: bool) -> Iterator[LocalRay | None]:
    """Within it a local Ray starts and is there, if one is `wanted` and this process has none."""
    ray = sys.modules.get("ray")
    if not wanted or (ray is not None and ray.is_initialized()):
        yield None
        return
    with LocalRay() as local:
        yield local
