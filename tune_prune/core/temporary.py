"""Temporary folders: each is gone when its process is. What a killed process could not remove, the next one does.

A process holds a folder by an flock of it, which the system lets go when the process ends, whatever has ended it. So a folder that
nobody holds is nobody's, in any container that shares it, whatever process has its number by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tune_prune.core.machine import lives

PREFIX = "tune_prune."

_held: dict[Path, int] = {}  # the open descriptors of this process's own


def make(where: str | None = None) -> Path:
    """Return a new folder in `where` (None: the system's) that only this user can look into, held until `remove` or the end."""
    unseen = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=where))  # by `sweep`, until it is held
    descriptor = os.open(unseen, os.O_RDONLY)
    _lock(descriptor, fcntl.LOCK_SH)
    folder = unseen.rename(unseen.with_name(unseen.name[1:]))
    _held[folder] = descriptor
    return folder


def remove(folder: Path) -> None:
    """Remove a folder that this process holds, and let it go."""
    shutil.rmtree(folder, ignore_errors=True)  # a process that is ending may still write to it
    with contextlib.suppress(KeyError):  # it was let go before
        os.close(_held.pop(folder))


def remove_all() -> None:
    for folder in list(_held):
        remove(folder)


@contextmanager
def folder() -> Iterator[Path]:
    """Make a folder that lasts as long as this context."""
    made = make()
    try:
        yield made
    finally:
        remove(made)


def sweep(where: str | None = None) -> None:
    """Remove the folders of this user in `where` (None: the system's) that nobody holds any more."""
    for path in Path(where or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not _is_held(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, how: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: there `sweep` removes nothing
        fcntl.flock(descriptor, how)


def clear_killed(folder: Path) -> None:
    """Remove what killed processes of this machine have left beside `folder`; an old folder that was not replaced yet is put
    back. Of another machine that shares the folder nobody here knows which processes live."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*-*"):
        kind, _, pid = path.name.removeprefix(f".{folder.name}.").rpartition("-")
        kind, _, host = kind.partition("-")
        if kind not in ("partial", "replaced") or host != platform.node() or not pid.isdecimal():
            continue
        if int(pid) != os.getpid() and lives(int(pid)):  # in a container ids come again
            continue
        if kind == "replaced" and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path)


def is_mount_point(folder: Path) -> bool:
    """Say whether something is mounted at `folder`, so that it cannot be renamed. os.path.ismount sees only mounts of another
    device; Linux lists all, with blanks as \\040 (proc_pid_mountinfo(5))."""
    mounts = Path("/proc/self/mountinfo")
    lines = mounts.read_bytes().splitlines() if mounts.exists() else []
    places = {re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in lines}
    return os.path.ismount(folder) or os.fsencode(os.path.realpath(folder)) in places


@contextmanager
def renamed_at_the_end(folder: Path, replace: bool) -> Iterator[Path]:
    """Return a new folder beside `folder` that takes its place when all went well, and is removed otherwise. Without
    `replace` what is there by then stays, and OSError is raised."""
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
