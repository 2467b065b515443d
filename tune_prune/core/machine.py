"""Resources that this process may use of its machine: CPUs, memory, GPUs, and the load that it shares them with.

os.cpu_count() and the physical memory are the whole machine's. A process has less of it in a container, in a job of a batch
system or under taskset: the CPUs of its affinity mask, and the CPU time and memory of every control group (cgroup) that it is
in. Files and units: admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and scheduler/sched-bwc.rst of the Linux kernel.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tune_prune.core.errors import UserError

ROOT = Path("/")  # of proc/ and sys/
UNITS = {"mib": 2**20, "gib": 2**30, "tib": 2**40, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # bytes


@dataclass(frozen=True)
class Memory:
    """Bytes: `total` of the machine, or of the tightest control group; `available` of it, with what the system would give up."""

    total: int
    available: int


class TooLittleMemory(UserError):
    """It does not fit: `fact` says what, `step` what to do, which who knows more may replace."""

    def __init__(self, fact: str, step: str) -> None:
        super().__init__(fact, step)  # what it is made of again in another process
        self.fact, self.step = fact, step

    def __str__(self) -> str:
        return f"{self.fact}{self.step}"


@dataclass(frozen=True)
class Load:
    """Load of the CPUs."""

    average: float = 0.0  # processes of the whole machine that ran or waited for a CPU
    cpus: int = 1  # that this process may use

    def __str__(self) -> str:
        return f"load {self.average:.1f} of {self.cpus} CPU{'s' * (self.cpus > 1)}"


def cpus() -> int:
    """Count the CPUs that this process may use: those of its affinity mask, as far as its control groups have time for them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu"):
        words = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        # So many microseconds in so many, of all CPUs together; not "max" or -1.
        if len(words) == 2 and words[0].isdigit():
            count = min(count, int(words[0]) // int(words[1]))
    return max(1, count)


def memory() -> Memory:
    """Return the memory of this machine, or of this process's control groups where they are limited to less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = min(total, 1024 * _table(ROOT / "proc/meminfo").get("MemAvailable:", total))
    for group in _control_groups("memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            words, used = _words(group / limit), _words(group / usage)
            if words and words[0].isdigit() and used:
                free = int(words[0]) - int(used[0]) + _table(group / "memory.stat").get(cache, 0)
                total, available = min(total, int(words[0])), min(available, max(0, free))
    return Memory(total, available)


def in_memory(folder: str) -> bool:
    """Say whether what is written to `folder` takes memory, as in a tmpfs, which /tmp is on many systems (proc_mounts(5))."""
    place = Path(folder).resolve()
    mounts = (line.split() for line in _text(ROOT / "proc/mounts").splitlines())
    kinds = {where.replace("\\040", " "): kind for _, where, kind, *_ in mounts}  # of the last that is mounted there
    holding = [where for where in kinds if place.is_relative_to(where)]
    return bool(holding) and kinds[max(holding, key=len)] in ("tmpfs", "ramfs")


def load() -> Load:
    """Return what the CPUs were doing in the last minute."""
    return Load(os.getloadavg()[0], cpus())


def parse_size(text: str) -> int:
    """Return the bytes of an amount of memory such as 20GiB, 24 GB or 900MiB. Raises ValueError for anything else."""
    parts = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-z]+)", text.strip().lower())
    count = float(parts[1]) * UNITS.get(parts[2], 0) if parts else 0.0
    if not 2**20 <= count <= 2**50:
        raise ValueError(f"{text!r} is not an amount of memory of 1 MiB or more, such as 20GiB, 24GB or 900MiB")
    return int(count)


def size(count: float) -> str:
    """Return bytes as text."""
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:.{int(name == 'GiB' or count < unit)}f} {name}"


def at_least(count: int) -> str:
    """Return bytes as text that `parse_size` reads, and never fewer than `count`."""
    return f"{math.ceil(10 * count / 2**30) / 10:g}GiB" if count >= 2**30 else f"{math.ceil(count / 2**20)}MiB"


def _control_groups(controller: str) -> Iterator[Path]:
    """Yield folders of the groups, of either version, that may limit this process, each with those around it; in a container
    they may be mounted as the root."""
    for line in _text(ROOT / "proc/self/cgroup").splitlines():  # "4:cpu,cpuacct:/a/b", of version 2 "0::/a/b"
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = ROOT / "sys/fs/cgroup" / (controller if controllers else "")
        path = PurePosixPath(name)
        for group in (path, *path.parents):
            yield mounted / group.relative_to("/")


def _table(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines "name number ..." by name; nothing where it is not there."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    """Return what the kernel says there; nothing where it has no such file, or shows it to nobody."""
    try:
        return path.read_text()
    except OSError:
        return ""


def lives(pid: int) -> bool:
    """Say whether this machine has a process of that id now, whoever's it is."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True
