"""Ends a local Ray, and an engine's benchmark, with the process that has started it, whatever has ended that: `python orphans.py
FOLDER`.

Most of Ray's processes end by themselves when their search is killed, but some of Ray 2.60 wait minutes for the others, and one
that is stopped waits for ever.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

VARIABLES = ("RAY_TMPDIR", "HF_MODULES_CACHE")  # that name the folder by which processes are found
PATIENCE_S = 10.0
LOOK_EVERY_S = 0.05


def watch(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that, at `end` or where this process ends, kills all that were started with `folder` as one of
    their VARIABLES, and removes `folder`."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__, str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )


def end(watching: subprocess.Popen[bytes]) -> None:
    """Have the process of `watch` do its work, and wait for it."""
    assert watching.stdin is not None
    watching.stdin.close()  # This ends the wait of `main`, as the end of this process does.
    watching.wait()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a temporary folder. With this context or with this process it goes, and so do all that `watch` finds by it."""
    made = Path(tempfile.mkdtemp())
    watching = watch(made)
    try:
        yield made
    finally:
        end(watching)


def processes(folder: Path) -> list[psutil.Process]:
    """Return the processes that were started with `folder` as one of their VARIABLES."""
    users = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # It has ended, or is another user's.
            if str(folder) in map(process.environ().get, VARIABLES):
                users.append(process)
    return users


def main(folder: Path) -> None:
    # Slurm and terminals send their signals to every process; the search ends Ray when it has said what it has to say.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    until = time.monotonic() + PATIENCE_S
    # Processes may start others while those that are there are found.
    while (users := processes(folder)) and time.monotonic() < until:
        for process in users:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(
            LOOK_EVERY_S
        )  # psutil.wait_procs would wait for dead ones, too, until somebody asks for their exit status.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
