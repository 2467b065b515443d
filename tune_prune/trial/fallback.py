"""A process learns what fits into memory: how it holds a model, and how much each stage does at once.

A stage that runs out of memory is tried again with half as much at once, as long as there is a half; then in the next way of
`models.runner.residency.WAYS` that saves something for it. What fits is where the next trial begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from tune_prune.models import loading
from tune_prune.models.catalog import ModelSource
from tune_prune.models.loading import LoadedModel, map_model, readable_in_place
from tune_prune.models.runner.out_of_memory import first_that_fits
from tune_prune.models.runner.residency import RESIDENT, WAYS, Place, Residency, to_bring_layers

# What a stage does with the model: load it, take gradients, run it forward, train a pruned copy, or prune and measure one.
Use = Literal["load", "gradients", "forward", "train", "measure"]


class Fallback:
    """Memory of how one model fitted in one process. `way`: how it is held; `halvings`: by stage, how often what is done at
    once was halved."""

    def __init__(self, way: Residency = RESIDENT) -> None:
        self.way = way
        self.halvings: dict[str, int] = {}
        self._fell: dict[str, tuple[Residency, Residency]] = {}  # by stage: what did not fit, and what is tried now
        self._died: tuple[Residency, Residency] | None = None  # before and after the death of a worker

    def plan(self, way: Residency) -> None:
        """Hold the model in that one of WAYS or, where something has not fitted before, in the leaner of it and the present one."""
        self.way = max(way, self.way, key=WAYS.index) if self._fell or self._died else way

    def after_a_death(self, readable: Callable[[], bool]) -> None:
        """Hold the model in the way that takes least: a worker died with it, and nobody says why, but kernels and containers kill
        what takes too much memory. `readable`: whether weights can stay in their files."""
        before = self.way
        states: Place = "file" if before.states == "file" else "host"
        if before.from_files or readable():
            self.way = Residency(from_files=True, states=states)
        else:
            self.way = Residency(gradients_by_layer=True, states=states, gpus=before.gpus)
        if self.way != before:
            self._died = before, self.way

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences on what did not fit."""
        died = [f"a worker died with the model {self._died[0]}, so it is {self._died[1]}"] if self._died else []
        fell = (
            f"memory did not suffice for the stage {stage} {first}, so it was made {last}"
            for stage, (first, last) in self._fell.items()
        )
        return (*died, *fell)

    def ways(
        self, stage: str, use: Use, most_halvings: Callable[[], int], readable: Callable[[], bool]
    ) -> Iterator[Residency]:
        """Yield how the stage is done: as has been learned and, whenever the next is asked for because that did not fit, with less.
        `most_halvings` of the present way; `readable`: whether weights can stay in their files."""
        while True:
            now = self._of_stage(stage, use)
            yield now
            if now.halvings < most_halvings():
                self.halvings[stage] = now.halvings + 1
            else:
                leaner = next(self._leaner(use), None)
                if leaner is None or (leaner.from_files and not self.way.from_files and not readable()):
                    return
                self.way = leaner
                self.halvings.pop(stage, None)
            first, _ = self._fell.get(stage, (now, now))
            self._fell[stage] = first, self._of_stage(stage, use)

    def step(self, source: ModelSource) -> str:
        """Say what would let the model be held with less; "" where its weights can stay in their files."""
        return to_bring_layers(readable_in_place(source), self.way.gpus)

    def _of_stage(self, stage: str, use: Use) -> Residency:
        return replace(_part(self.way, use), halvings=self.halvings.get(stage, 0))

    def _leaner(self, use: Use) -> Iterator[Residency]:
        """Yield the ways after the present one that save something; none where that is no such way."""
        present = replace(self.way, block_tokens=None)
        ways = [replace(way, gpus=1 if way.from_files else present.gpus) for way in WAYS]
        if present not in ways:
            return
        parts = [_part(way, use) for way in ways]
        now = parts.index(_part(present, use))  # its first: ways that differ in other parts come back to it
        for way, part in zip(ways, parts, strict=True):
            if ways.index(way) > ways.index(present) and parts.index(part) > now:
                yield replace(way, block_tokens=self.way.block_tokens)


def _part(way: Residency, use: Use) -> Residency:
    """Return the part of a way that the memory of a stage depends on."""
    if use == "load":
        return Residency(from_files=way.from_files)
    if use == "train":
        return way
    if use == "gradients":
        return replace(way, pruned_whole=False)
    if use == "measure" and way.pruned_whole:
        return replace(way, states="device")
    return replace(way.forward_only, pruned_whole=False)


def load(
    source: ModelSource, dtype: torch.dtype, device: str, label: str, fallback: Fallback, leaner: bool = True
) -> LoadedModel:
    """Load a model as `fallback` holds it or, where that does not fit and `leaner` ways will do, without its weights. Raises
    UserError where it is not available, OutOfMemory where it fits in no way."""

    def in_its_way(_: Residency) -> LoadedModel:
        way = fallback.way
        return (map_model if way.from_files else loading.load_model)(source, dtype, device, way)

    ways = fallback.ways("loading", "load", lambda: 0, lambda: leaner and readable_in_place(source))
    step = partial(fallback.step, source) if leaner else str
    return first_that_fits(f"loading of {label}", ways, in_its_way, torch.device(device), step)
