"""A search that is killed again and again, and what must hold of it.

Whenever it has been killed, every complete record that was there before is there still, in the same bytes; when it has come to
its end, all trials are complete, every one was recorded once, all numbers are those of a search that nobody disturbed, and no
process and no temporary file of it is left.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from compare_results import compare, differences

from tune_prune.core.store import LEDGER, TUNE

NAME = "attacked"
MARK = "TUNE_PRUNE_TORTURE"  # in the environment of every process of a search: those that outlive it are found by it
LEFT_S = 30.0  # in which all processes of a search that has ended are gone
START_S = 120.0  # in which a search has its first worker, on a busy machine
_HOW = "notes is [] before and ['a worker died with the model"  # how a trial was run, which is no number of it
TRACEBACK = "Traceback (most recent call last)"

GRID = (
    "--model", "tiny-llama", "--gpus-per-trial", "0", "--limit", "8", "--tasks", "boolq,piqa,openbookqa",
    "--search-space", str(Path(__file__).with_name("space.yaml")),
)  # fmt: skip
SHORT = (*GRID, "--search-space", str(Path(__file__).with_name("short.yaml")))
# Ways to search that do not try everything, or not to the end.
PARTIAL = {
    "race": ("--scheduler", "race"),
    "race-gold": ("--scheduler", "race-gold"),
    "asha": ("--scheduler", "asha"),
    "optuna": ("--search", "optuna", "--num-trials", "9"),
}


@dataclass(frozen=True)
class Setting:
    """A small search that every attack is given, and how it ends where nobody disturbs it."""

    folder: Path  # a short path: Ray's sockets lie below it
    reference: Path  # the experiment of `grid` that nobody disturbed
    chance: random.Random
    grid: Sequence[str] = GRID
    kill_s: float = 8.0  # after a start, or sooner, comes a kill
    most_kills: int = 10**9  # of one search of `workers`
    rounds: int = 12  # of `damage`


@dataclass
class Attacked:
    """A search of the command `flags`, with its results below `folder`."""

    folder: Path
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    where: str = ""  # --storage-path, where that is no folder; what is in it is copied to `storage` to be looked at
    program: Sequence[str] = ("-m", "tune_prune.search")
    kills: int = 0
    problems: list[str] = field(default_factory=list)
    _complete: dict[str, str] = field(default_factory=dict)  # SHA-256 of each complete record's file

    def __post_init__(self) -> None:
        self.storage = self.folder / "storage"
        self.experiment = self.storage / NAME
        self.temporary = self.folder / "t"  # its own temporary files and Ray's, whose sockets want a short path
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log"
        self.arguments = [*self.flags, "--name", NAME, "--storage-path", self.where or str(self.storage)]

    def variables(self) -> dict[str, str]:
        """Return the search's environment."""
        places = dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(self.temporary))
        return {**os.environ, MARK: str(self.folder), **places, **self.environment}

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the command, as a user gives it, with `more` flags, in a session of its own."""
        command = [sys.executable, *self.program, *self.arguments, *more]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, env=self.variables(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def end_of(self, running: subprocess.Popen[bytes], seconds: float, what: str) -> int:
        """Return the exit code of a start; one that is not at its end in time is a problem, and is killed."""
        try:
            return running.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.wrong(f"{what} was not at its end after {seconds:.0f} s")
            kill(running)
            return running.wait()

    def processes(self) -> list[psutil.Process]:
        """Return everything that runs for this search, whoever is its parent by now."""
        mine = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is not ours to look into
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == str(self.folder):
                    mine.append(process)
        return mine

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wrong(self, what: str) -> None:
        """Note a problem, with the end of what the search has printed."""
        self.problems.append(f"{what}: {self.output()[-300:]}")

    def forget(self, path: Path) -> None:
        """Let a record that is damaged on purpose be written again."""
        if path.parent == self.experiment / LEDGER:
            self._complete.pop(path.name, None)

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the trials' records by file; one that cannot be read is a problem."""
        records = {}
        for path in sorted((self.experiment / LEDGER).glob("[!.]*.json")):
            try:
                records[path.name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                self.problems.append(f"{path.name} is not valid: {error}")
        # A failure that was written while its trial was finished does not count.
        return {
            n: record for n, record in records.items() if ".failed." not in n or f"{record['key']}.json" not in records
        }

    def look(self) -> None:
        """Compare what is complete with what was."""
        ledger = self.experiment / LEDGER
        complete = [name for name, record in self.records().items() if record["status"] == "complete"]
        now = {name: hashlib.sha256((ledger / name).read_bytes()).hexdigest() for name in complete}
        for name, digest in self._complete.items():
            if now.get(name) != digest:
                self.problems.append(f"{name} is {'lost' if name not in now else 'written again'}")
        self._complete = now

    def gone(self) -> None:
        """Wait for the end of all its processes. What lives on is a problem, and is ended."""
        wait_until(lambda: not self.processes(), LEFT_S)
        for process in self.processes():
            self.problems.append(f"process {process.pid} is left ({' '.join(process.cmdline())[:80]})")
            process.kill()

    def no_files_left(self) -> None:
        if left := sorted(path.name for path in self.temporary.iterdir()):
            self.problems.append(f"temporary files are left: {', '.join(left[:5])}")

    def no_partial_files(self) -> None:
        """Check that the next start removes the files that killed writers have left among the results, once they are old: here they
        are made so."""
        if left := self.partial_files():
            for path in left:
                os.utime(path, (0, 0))
            if not self.where and (code := self.start().wait()):
                self.wrong(f"exit code {code} of a start after the last")
        if left := self.partial_files():
            self.problems.append(f"partial files are left: {', '.join(path.name for path in left[:5])}")

    def partial_files(self) -> list[Path]:
        """Return hidden files but those of the lock and of Ray Tune."""
        hidden = (path for path in self.storage.rglob(".*") if path.is_file() and TUNE not in path.parts)
        return sorted(path for path in hidden if path.name not in (".lock", ".lock.json"))

    def finished(self, reference: Path, same: bool) -> None:
        """Check a search that has come to its end: against that of `reference`, in all its files where it has tried the `same`
        configurations in an order that nothing changes, else in every number of its trials."""
        self.no_partial_files()
        self.look()
        self.gone()
        self.no_files_left()
        records = list(self.records().values())
        self.problems += [f"{r['config']} {r['status']}: {r['reason']}" for r in records if r["status"] == "failed"]
        if len({record["key"] for record in records}) < len(records):
            self.problems.append("a trial has two records")
        if same:
            for what, row in compare(reference, self.experiment).items():
                self.problems += [f"{what}: {sentence}" for sentence in row["sentences"] if _HOW not in sentence]
            return
        expected = {}
        for path in (reference / LEDGER).glob("[!.]*.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            expected[record["key"]] = record["metrics"]
        for record in records:
            if record["status"] == "complete":
                self.problems += differences(expected[record["key"]], record["metrics"], str(record["config"]))


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def kill(process: psutil.Process | subprocess.Popen[bytes], sign: signal.Signals = signal.SIGKILL) -> None:
    with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended by itself meanwhile
        process.send_signal(sign)


def moment(chance: random.Random, most: float) -> float:
    """Return seconds until something happens: often soon, sometimes late."""
    return min(most, chance.expovariate(3 / most))


def undisturbed(folder: Path, flags: Sequence[str]) -> tuple[Path, float]:
    """Run a search in one go; its experiment, and the seconds that it took."""
    search = Attacked(folder / "reference", (*flags, "--inline"))
    began = time.monotonic()
    if code := exit_code_of(forked(search)):
        raise SystemExit(f"error: the search that nobody disturbs ended with code {code}; see {search.log}")
    return search.experiment, time.monotonic() - began


def exit_code_of(pid: int) -> int:
    """Wait for a child; a signal that has killed it is a negative number."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked(search: Attacked, *more: str) -> int:
    """Fork; return the process id of the child, which runs the command, with `more` flags."""
    command = importlib.import_module("tune_prune.commands.search")
    for name in (
        "commands.results",
        "tuning.preflight",
        "trial.trial",
        "evaluation.zero_shot",
        "checkpoint.save",
        "tuning.inline",
        "tuning.run",
        "tuning.observers.tensorboard",
    ):
        importlib.import_module(f"tune_prune.{name}")
    importlib.import_module("scipy.stats")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.environ.update(search.variables())
    log = os.open(search.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 70
    try:
        code = command.main([*search.arguments, *more])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(code)
