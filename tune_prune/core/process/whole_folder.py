"""A folder that is there whole or not at all: it is written beside its place, and renamed at the end."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tune_prune.core.process.machine import lives


def clear_killed(folder: Path) -> None:
    """Remove what killed processes of this machine have left beside `folder`; an old folder that was not replaced yet is put
    back. Of another machine that shares the folder nobody here knows which processes live."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*-*"):
        kind, _, pid = path.name.removeprefix(f".{folder.name}.").rpartition("-")
        kind, _, host = kind.partition("-")
        if kind not in ("partial", "replaced") or host not in ("", platform.node()) or not pid.isdecimal():
            continue  # without a host: of an older version
        if int(pid) != os.getpid() and lives(int(pid)):  # in a container ids come again
            continue
        if kind == "replaced" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path)


def is_mount_point(folder: Path) -> bool:
    """Whether something is mounted at `folder`, so that it cannot be renamed. os.path.ismount sees only mounts of another device;
    Linux lists all, with blanks as \\040 (proc_pid_mountinfo(5))."""
    mounts = Path("/proc/self/mountinfo")
    lines = mounts.read_bytes().splitlines() if mounts.exists() else []
    places = {re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in lines}
    return os.path.ismount(folder) or os.fsencode(os.path.realpath(folder)) in places


@contextmanager
def renamed_at_the_end(folder: Path, replace: bool) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when all went well, and is removed otherwise. Without `replace` what is
    there by then stays, and OSError is raised."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{folder.name}.partial-{platform.node()}-{os.getpid()}")
    work.mkdir()
    try:
        yield work
        if replace and folder.exists():
            old = folder.with_name(f".{folder.name}.replaced-{platform.node()}-{os.getpid()}")
            folder.rename(old)
            work.rename(folder)
            shutil.rmtree(old)
        else:
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
