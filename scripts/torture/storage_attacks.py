"""Attacks on where the results lie.

damage      files of the experiment and of its cache are changed, cut, exchanged or removed between starts, each of which counts as
            a kill
drivers     three starts at once want the same experiment; the one that has it is killed
disk        a disk that is full again and again (which is counted), as it grows by a little only when that has stopped the search
            (a tmpfs: needs root)
s3          a search on a real S3 server (moto's, on loopback), killed at any moment
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from torture.attacked import (
    GRID,
    PARTIAL,
    START_S,
    TRACEBACK,
    Attacked,
    Setting,
    exit_code_of,
    forked,
    kill,
    moment,
    wait_until,
)
from tune_prune.core.store import TRIALS

HARMS = ("bit", "cut", "empty", "exchanged", "removed", "unsealed")
MIB = 1 << 20
_S3_SERVER = Path(__file__).parents[2] / "tests" / "s3_server.py"
_SHORT_LEASE = """
import sys
from tune_prune.commands import search
from tune_prune.core import store as object_storage
object_storage.LEASE_S = 3.0  # what a killed search keeps the next one waiting for; a minute otherwise
sys.exit(search.main())
"""
_COPY = "import fsspec, sys; fsspec.filesystem('s3').get(sys.argv[1], sys.argv[2], recursive=True)"


def damage(setting: Setting, number: int) -> Attacked:
    """Damage files, also of a search that is complete already. What is refused must name the file, and is restored, or deleted
    where the sentence says so; everything else is computed again or was of no consequence: the numbers at the end say which."""
    search = Attacked(setting.folder / f"h{number}", (*setting.grid, "--inline"))
    chance = setting.chance
    harmed: tuple[Path, bytes] | None = None
    rounds = 0
    while True:
        before = len(search.output())
        pid = forked(search)
        if harmed is None and chance.random() < 0.6:
            time.sleep(moment(chance, setting.kill_s))
            os.kill(pid, signal.SIGKILL)
            search.kills += 1
        code = exit_code_of(pid)
        printed = search.output()[before:]
        if TRACEBACK in printed:
            search.problems.append(f"a traceback in {search.log}")
        if code == 2 and harmed is not None:
            _mend(search, printed, *harmed)
            harmed = None
            continue
        if code not in (0, -signal.SIGKILL):
            search.wrong(f"exit code {code}")
            break
        if harmed is not None and TRIALS in harmed[0].parts:
            harmed[0].write_bytes(harmed[1])  # of a trial that is finished: the search has no need to read it
        harmed = None
        search.look()
        if rounds < setting.rounds:
            harmed = _harm(search, chance)
            rounds += harmed is not None
            search.kills += harmed is not None
        elif code == 0:
            break
    search.finished(setting.reference, same=True)
    return search


def _harm(search: Attacked, chance: random.Random) -> tuple[Path, bytes] | None:
    """Damage one file; which it is, and what was in it. None where there is none yet."""
    files = [path for path in sorted(search.storage.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    if not files:
        return None
    path = chance.choice(files)
    content, how = path.read_bytes(), chance.choice(HARMS)
    others = [one for one in files if one.suffix == path.suffix and one != path]
    if how == "removed" or (how == "exchanged" and not others):
        path.unlink()
    elif how == "exchanged":
        shutil.copyfile(chance.choice(others), path)
    elif how == "unsealed" and b'"checksum"' in content:
        path.write_bytes(re.sub(rb'\n *"checksum": "[0-9a-f]{64}",', b"", content))
    elif how in ("bit", "unsealed") and content:
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
    else:
        path.write_bytes(content[: chance.randrange(len(content)) if how == "cut" and content else 0])
    search.forget(path)
    with search.log.open("a", encoding="utf-8") as log:
        log.write(f"-- {path.relative_to(search.storage)}: {how}\n")
    return path, content


def _mend(search: Attacked, printed: str, path: Path, content: bytes) -> None:
    refusal = printed.rpartition("error: ")[2]
    if path.name not in refusal and path.parent.name not in refusal:
        search.problems.append(f"{path} was damaged, and refused is: {refusal[-300:]}")
    advice = re.search(r"delete (/\S+?)[;,.]?(?:\s|$)", refusal)
    if advice and Path(advice[1]).is_file():
        Path(advice[1]).unlink()
        search.forget(Path(advice[1]))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def drivers(setting: Setting, number: int) -> Attacked:
    """Check that whoever does not have the experiment leaves with the sentence, before it has written anything."""
    how = setting.chance.choice(["grid", *PARTIAL])
    search = Attacked(setting.folder / f"r{number}", (*setting.grid, *PARTIAL.get(how, ()), "--inline"))
    codes: dict[int, int] = {}
    while 0 not in codes.values():
        codes = {}
        started = [forked(search) for _ in range(3)]

        def ended(started: list[int] = started, codes: dict[int, int] = codes) -> bool:
            for pid in set(started) - set(codes):
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            return len(codes) >= 2

        if not wait_until(ended, START_S):
            search.wrong(f"of three starts {len(codes)} ended in {START_S:.0f} s")
        time.sleep(moment(setting.chance, setting.kill_s))
        ended()
        for pid in set(started) - set(codes):
            os.kill(pid, signal.SIGKILL)
            search.kills += 1
            codes[pid] = exit_code_of(pid)
        if wrong := set(codes.values()) - {0, 2, -signal.SIGKILL}:
            search.wrong(f"exit codes {sorted(wrong)}")
        search.look()
    refusals = re.findall(r"^error: (.*)", search.output(), re.MULTILINE)
    if strange := [one for one in refusals if not one.startswith("another search runs on experiment ")]:
        search.problems.append(f"refused with: {strange[0][:300]}")
    if not refusals and search.kills:
        search.problems.append("three starts at once, and none was refused")
    search.finished(setting.reference, same=how == "grid")
    return search


def disk(setting: Setting, number: int) -> Attacked:
    """Fill the disk; `kills` are the times that the disk was full. What did not fit has left nothing behind, and says so with
    folder and space."""
    search = Attacked(setting.folder / f"d{number}", (*setting.grid, "--inline"))
    search.storage.mkdir(parents=True)
    size = setting.chance.randrange(MIB // 4, MIB)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", search.storage], check=True)
    try:
        while True:
            before = len(search.output())
            code = exit_code_of(forked(search))
            printed = search.output()[before:]
            search.look()
            if code == 0 and "warning" not in printed:
                break
            search.kills += 1
            if code not in (0, 1) or "free some space" not in printed or TRACEBACK in printed:
                search.wrong(f"exit code {code} of a full disk")
                break
            size += setting.chance.randrange(MIB // 16, MIB // 2)
            subprocess.run(["mount", "-o", f"remount,size={size}", search.storage], check=True)
        search.finished(setting.reference, same=True)
        if search.problems:
            shutil.copytree(search.storage, search.folder / "kept")
    finally:
        subprocess.run(["umount", search.storage], check=True)
    return search


def s3(setting: Setting, number: int) -> Attacked:
    folder = setting.folder / f"o{number}"
    orders = folder / "server"
    orders.mkdir(parents=True)
    with subprocess.Popen([sys.executable, _S3_SERVER, orders], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            aws = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
                "XDG_CACHE_HOME": str(folder / "cache"),
            }
            search = Attacked(
                folder, (*GRID, "--inline"), aws, where="s3://bucket/results", program=("-c", _SHORT_LEASE)
            )
            make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
            subprocess.run([sys.executable, "-c", make], env=search.variables(), check=True)
            while True:
                running = search.start()
                with suppress(subprocess.TimeoutExpired):
                    running.wait(5 + moment(setting.chance, 30.0))
                if running.poll() is None:
                    kill(running)
                    search.kills += 1
                code = running.wait()
                _copy(search)
                search.look()
                if code != -signal.SIGKILL:
                    break
            if code:
                search.wrong(f"exit code {code}")
            search.finished(setting.reference, same=True)
        finally:
            kill(server)
    return search


def _copy(search: Attacked) -> None:
    """Copy the bucket to files where the other attacks have theirs."""
    shutil.rmtree(search.storage, ignore_errors=True)
    copied = subprocess.run(
        [sys.executable, "-c", _COPY, f"{search.where}/", str(search.storage)],
        env=search.variables(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if copied.returncode and "FileNotFoundError" not in copied.stderr:  # of a search that had not put anything yet
        search.problems.append(f"the bucket cannot be read: {copied.stderr[-300:]}")
    shutil.rmtree(search.experiment / ".lock", ignore_errors=True)  # a folder's lock is no file of its own
