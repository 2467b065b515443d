"""What every attack is given: a small search, and how it ends where nobody disturbs it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from torture.attacked import Attacked

SPACE = Path(__file__).with_name("space.yaml")
GRID = (
    "--model", "tiny-llama", "--gpus-per-trial", "0", "--limit", "8", "--tasks", "boolq,piqa,openbookqa",
    "--search-space", str(SPACE),
)  # fmt: skip
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
    reference: Path  # the experiment of GRID that nobody disturbed
    chance: random.Random
    most_kills: int = 10**9  # of one search of `workers`


def undisturbed(folder: Path) -> Path:
    """The experiment of GRID in one go, computed once for this folder."""
    search = Attacked(folder / "reference", (*GRID, "--inline"))
    done = search.experiment / "global_best_config.json"
    if not done.exists():
        code = search.start().wait()
        if code:
            raise SystemExit(f"error: the search that nobody disturbs ended with code {code}; see {search.log}")
    return search.experiment
