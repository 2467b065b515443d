"""CPUs and memory that a process may use, from an affinity mask that was really set and from control groups as the kernel
writes their files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tune_prune.core import machine
from tune_prune.core.machine import Memory

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function ({path: content}) that puts files in the place of proc/ and sys/; 64 CPUs are in the affinity mask."""

    def write(files: dict[str, str]) -> None:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return write


def test_an_affinity_mask_counts() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert machine.cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_without_control_groups_it_is_the_machine(system) -> None:
    assert machine.cpus() == 64
    assert machine.memory() == Memory(PHYSICAL, PHYSICAL)
    system({"proc/meminfo": "MemTotal:  99999 kB\nMemAvailable:   2048 kB\n"})
    assert machine.memory() == Memory(PHYSICAL, 2048 * 1024)


CPU_FILES = {
    "version 2": ({"cpu.max": "250000 100000\n"}, 2),
    "version 2, less than one": ({"cpu.max": "50000 100000\n"}, 1),
    "version 2, around it": ({"../cpu.max": "300000 100000\n", "cpu.max": "max 100000\n"}, 3),
}


@pytest.mark.parametrize(("files", "cpus"), CPU_FILES.values(), ids=CPU_FILES)
def test_cpu_time_of_groups_of_version_2(files: dict[str, str], cpus: int, system) -> None:
    system({"proc/self/cgroup": "0::/job.slice/step\n"})
    system({f"sys/fs/cgroup/job.slice/step/{name}": content for name, content in files.items()})
    assert machine.cpus() == cpus


@pytest.mark.parametrize(("folder", "quota", "cpus"), [("docker/0f", 300_000, 3), ("", -1, 64)])
def test_cpu_time_of_groups_of_version_1(folder: str, quota: int, cpus: int, system) -> None:
    """In a container the group is mounted as the root, its name is that outside."""
    system({"proc/self/cgroup": "5:memory:/docker/0f\n4:cpu,cpuacct:/docker/0f\n0::/\n"})
    group = f"sys/fs/cgroup/cpu/{folder}"
    system({f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": "100000\n"})
    assert machine.cpus() == cpus


VERSION_2 = ("0::/job", "sys/fs/cgroup/job", "memory.max", "memory.current", "inactive_file")
VERSION_1 = (
    "7:memory:/job",
    "sys/fs/cgroup/memory/job",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


@pytest.mark.parametrize(("line", "group", "limit", "usage", "cache"), [VERSION_2, VERSION_1])
def test_memory_of_a_group(line: str, group: str, limit: str, usage: str, cache: str, system) -> None:
    """File cache that the group may lose is free; where the machine itself has less left, that counts."""
    system({"proc/self/cgroup": f"{line}\n", "proc/meminfo": f"MemAvailable: {PHYSICAL // 1024} kB\n"})
    total = PHYSICAL // 2
    used, cached = total // 2, total // 8
    system({f"{group}/{limit}": f"{total}\n", f"{group}/{usage}": f"{used}\n"})
    assert machine.memory() == Memory(total, total - used)
    system({f"{group}/memory.stat": f"anon 5\n{cache} {cached}\nactive_file 7\n"})
    assert machine.memory() == Memory(total, total - used + cached)
    system({"proc/meminfo": "MemAvailable: 1024 kB\n"})
    assert machine.memory() == Memory(total, 2**20)
    system({f"{group}/{limit}": "max\n" if limit == "memory.max" else "9223372036854771712\n"})
    assert machine.memory() == Memory(PHYSICAL, 2**20)


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("", False),
        ("/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n", True),
        ("tmpfs / tmpfs rw 0 0\n/dev/vda /tmp/a\\040b ext4 rw 0 0\n", False),
    ],
)
def test_whether_a_folder_takes_memory(mounts: str, expected: bool, system) -> None:
    system({"proc/mounts": mounts})
    assert machine.in_memory("/tmp/a b/c") is expected
