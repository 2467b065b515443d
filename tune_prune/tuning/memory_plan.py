"""What a trial takes in each way to hold its model (tuning.memory has the formulas), and which way fits what there is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tune_prune.core import machine
from tune_prune.core.errors import UserError
from tune_prune.core.machine import TooLittleMemory, at_least, size
from tune_prune.models.runner.residency import Place, Residency


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a stage takes beside the process and the dense weights."""

    stage: str  # as in records
    way: str  # in which the model is held
    held: int  # while it runs: sums of gradients and hidden states, the pruned projections with their padding, brought layers
    activations: int  # of a batch
    away: int = 0  # hidden states in host memory or in a file, of a trial on a GPU; those in a file on a CPU

    @property
    def total(self) -> int:
        return self.held + self.activations


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one trial that holds its model in one way."""

    way: Residency
    process: int  # without any model
    weights: int  # dense model; 0: they stay in their files
    stages: tuple[StageMemory, ...]

    @property
    def largest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def total(self) -> int:
        """The peak, where the model is computed with."""
        return self.peak(self.largest)

    def peak(self, stage: StageMemory) -> int:
        return self.process + self.weights + stage.total

    @property
    def away(self) -> int:
        """Hidden states that are elsewhere, at most."""
        return max(stage.away for stage in self.stages)

    def fits(self, bounds: Bounds) -> bool:
        return self.total <= bounds.get("device", self.total) and self.away <= bounds.get(self.way.states, self.away)


# Bytes that a trial may take of what it computes on and of where hidden states can wait; no limit where none is named.
Bounds = Mapping[Place, int]


def on_this_machine(trials: int = 1) -> dict[Place, int]:
    """What each of so many trials may take where hidden states can wait, besides the device; on CPUs that is "host" too."""
    return {
        "host": machine.memory().available // trials,
        "file": 0
        if machine.in_memory(tempfile.gettempdir())
        else shutil.disk_usage(tempfile.gettempdir()).free // trials,
    }


def choose(ways: Sequence[MemoryPlan], bounds: Bounds) -> MemoryPlan:
    """The first of `ways` that fits, else the one that takes least where it computes."""
    leanest = min(reversed(ways), key=lambda plan: plan.total)  # of equal ones that with states in a file
    return next((plan for plan in ways if plan.fits(bounds)), leanest)


def choose_within(
    ways: Sequence[MemoryPlan],
    bounds: Bounds,
    limit: int | None,
    what: str,
    folder: str = "",
    others: Sequence[MemoryPlan] = (),
    step: str = "",
) -> MemoryPlan:
    """The same, where `limit` bytes of the device were allowed by hand (None: as the bounds say). Raises UserError where `what`
    needs more than that in its leanest way, or has no place for its hidden states; `folder`: what holds them in a file; `others`,
    `step`: as `advised` takes them."""
    if limit is not None:
        bounds = {**bounds, "device": min(limit, bounds.get("device", limit))}
    plan = choose(ways, bounds)
    if limit is not None and plan.total > limit:
        error = TooLittleMemory(
            f"--memory is {size(limit)}, but {what} needs {size(plan.total)} in its leanest way ({plan.way}; the most in its stage "
            f"{plan.largest.stage}); ",
            f"use --memory {at_least(plan.total)} or more, or a smaller model",
        )
        raise advised(error, ways, others, step, bounds)
    if plan.total <= bounds.get("device", plan.total) and not plan.fits(bounds):
        raise UserError(
            f"{what} fits into memory only layer by layer, with a file of {size(plan.away)} in "
            f"{folder or tempfile.gettempdir()}, where {size(bounds['file'])} are free: set TMPDIR to a folder with more room, or "
            "use fewer or shorter samples"
        )
    return plan


def advised(
    error: TooLittleMemory, ways: Sequence[MemoryPlan], others: Sequence[MemoryPlan], step: str, bounds: Bounds
) -> UserError:
    """The error; where none of `ways` fits but one of `others`, which `step` opens, one whose advice begins with that."""
    if not step or any(way.fits(bounds) for way in ways) or not any(way.fits(bounds) for way in others):
        return error
    return UserError(f"{error.fact}{step}, or {error.step}")
