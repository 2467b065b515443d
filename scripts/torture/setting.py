"""What every attack is given: a small search, and how it ends where nobody disturbs it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torture.attacked import Attacked, forked

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
START_S = 120.0  # in which a search has its first worker, on a busy machine


@dataclass(frozen=True)
class Setting:
    """What every attack is given."""

    folder: Path  # a short path: Ray's sockets lie below it
    reference: Path  # the experiment of `grid` that nobody disturbed
    chance: random.Random
    grid: Sequence[str] = GRID
    kill_s: float = 8.0  # after a start, or sooner, comes a kill
    most_kills: int = 10**9  # of one search of `workers`
    rounds: int = 12  # of `damage`


def undisturbed(folder: Path, grid: Sequence[str]) -> tuple[Path, float]:
    """The experiment of `grid` in one go, and the seconds that it takes."""
    search = Attacked(folder / "reference", (*grid, "--inline"))
    pid = forked(search)
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"error: the search that nobody disturbs ended with code {code}; see {search.log}")
    return search.experiment, time.monotonic() - began
