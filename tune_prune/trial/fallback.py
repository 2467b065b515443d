"""What a process has learned of what fits into memory: how it holds a model, and how much each stage does at once.

A stage that runs out of memory is tried again with half as much at once, as long as there is a half; then in the next way of
`models.runner.residency.WAYS` that saves something for it. What fits is where the next trial begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from tune_prune.models.runner.residency import RESIDENT, WAYS, Residency

# What a stage does with the model: load it, take gradients, run it forward, or prune and measure a copy.
Use = Literal["load", "gradients", "forward", "measure"]


class Fallback:
    """Of one model in one process. `way`: how it is held; `halvings`: by stage, how often what is done at once was halved."""

    def __init__(self, way: Residency = RESIDENT) -> None:
        self.way = way
        self.halvings: dict[str, int] = {}
        self._fell: dict[str, tuple[Residency, Residency]] = {}  # by stage: what did not fit, and what is tried now

    def begin(self, way: Residency) -> Residency:
        """Hold the model in that one of WAYS or, where something has not fitted before, in the leaner of it and the present one."""
        self.way = max(way, self.way, key=WAYS.index) if self._fell else way
        return self.way

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not fit, in sentences."""
        return tuple(
            f"memory did not suffice for the stage {stage} {first}, so it was made {last}"
            for stage, (first, last) in self._fell.items()
        )

    def ways(
        self, stage: str, use: Use, device: str, most_halvings: Callable[[], int], readable: Callable[[], bool]
    ) -> Iterator[Residency]:
        """How the stage is done: as has been learned and, whenever the next is asked for because that did not fit, with less.
        `most_halvings` of the present way; `readable`: whether weights can stay in their files."""
        while True:
            now = self.held(stage, use, device)
            yield now
            if now.halvings < most_halvings():
                self.halvings[stage] = now.halvings + 1
            else:
                leaner = next(self._leaner(use, device), None)
                if leaner is None or (leaner.from_files and not self.way.from_files and not readable()):
                    return
                self.way = leaner
                self.halvings.pop(stage, None)
            first, _ = self._fell.get(stage, (now, now))
            self._fell[stage] = first, self.held(stage, use, device)

    def held(self, stage: str, use: Use, device: str) -> Residency:
        """The way, as far as that stage asks for it."""
        return replace(_part(self.way, use, device), halvings=self.halvings.get(stage, 0))

    def _leaner(self, use: Use, device: str) -> Iterator[Residency]:
        """Those after the present one that save something; none where that is no such way."""
        own = self.way
        kept = partial(replace, spill_folder=own.spill_folder, block_tokens=own.block_tokens)
        ways = [kept(way, gpus=1 if way.from_files else own.gpus) for way in WAYS]
        if own in ways:
            parts = [_part(way, use, device) for way in ways]
            now = parts.index(_part(own, use, device))  # its first: ways that differ in other parts come back to it
            yield from (way for way in ways[ways.index(own) + 1 :] if parts.index(_part(way, use, device)) > now)


def _part(way: Residency, use: Use, device: str) -> Residency:
    """What of a way the memory of a stage depends on."""
    if device == "cpu" and way.states == "host":
        way = replace(way, states="device")
    if use == "load":
        return Residency(from_files=way.from_files)
    if use == "gradients":
        return replace(way, pruned_whole=False)
    if use == "forward" or not way.pruned_whole:
        return replace(way.forward_only, pruned_whole=False)
    return replace(way, states="device")
