"""What a process has learned of what fits into memory: how it holds a model, and how much each stage does at once.

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
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.mapped_model import map_model, readable_in_place, to_bring_layers
from tune_prune.models.runner.out_of_memory import first_that_fits
from tune_prune.models.runner.residency import RESIDENT, WAYS, Residency

# What a stage does with the model: load it, take gradients, run it forward, or prune and measure a copy.
Use = Literal["load", "gradients", "forward", "train", "measure"]
MEASURING = ("kl", "perplexity", "zero_shot")


class Fallback:
    """Of one model in one process. `way`: how it is held; `halvings`: by stage, how often what is done at once was halved, at first
    as the plan says for the stages in which a model is measured."""

    def __init__(self, way: Residency = RESIDENT) -> None:
        self._fell: dict[str, tuple[Residency, Residency]] = {}  # by stage: what did not fit, and what is tried now
        self._died: tuple[Residency, Residency] | None = (
            None  # the same of the whole model, after the death of a worker
        )
        self.way = RESIDENT
        self.halvings: dict[str, int] = {}
        self.begin(way)

    def begin(self, way: Residency) -> Residency:
        """Hold the model in that one of WAYS or, where something has not fitted before, in the leaner of it and the present one."""
        planned, way = way.halvings, replace(way, halvings=0)
        if self._fell or self._died:
            self.way = max(way, self.way, key=WAYS.index)
        else:
            self.way, self.halvings = way, dict.fromkeys(MEASURING, planned) if planned else {}
        return self.way

    def after_a_death(self, readable: Callable[[], bool]) -> None:
        """A worker died with the model, and nobody says why: kernels and containers kill what takes too much memory. Hold it in the
        way that takes least; `readable`: whether weights can stay in their files."""
        own = self.way
        kept = partial(replace, states=own.states, spill_folder=own.spill_folder, block_tokens=own.block_tokens)
        streamed, by_layer = kept(Residency(from_files=True)), kept(Residency(gradients_by_layer=True, gpus=own.gpus))
        self.way = streamed if own.from_files or readable() else by_layer
        if self.way != own:
            self._died = own, self.way

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not fit, in sentences."""
        died = [f"a worker died with the model {self._died[0]}, so it is {self._died[1]}"] if self._died else []
        fell = (
            f"memory did not suffice for the stage {stage} {first}, so it was made {last}"
            for stage, (first, last) in self._fell.items()
        )
        return (*died, *fell)

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

    def step(self, source: ModelSource) -> str:
        """What would let the model be held with less; "" where its weights can stay in their files."""
        return to_bring_layers(readable_in_place(source), self.way.gpus)

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
    if use == "train":  # gradients of a pruned copy
        return way
    if use == "gradients":
        return replace(way, pruned_whole=False)
    if use == "forward" or not way.pruned_whole:
        return replace(way.forward_only, pruned_whole=False)
    return replace(way, states="device")


def load(
    source: ModelSource, dtype: torch.dtype, device: str, label: str, fallback: Fallback, leaner: bool = True
) -> LoadedModel:
    """A model as `fallback` holds it or, where that does not fit and `leaner` ways will do, without its weights. Raises UserError
    where it is not available, OutOfMemory where it fits in no way."""

    def in_its_way(_: Residency) -> LoadedModel:
        way = fallback.way
        return (map_model if way.from_files else loading.load_model)(source, dtype, device, way)

    ways = fallback.ways("loading", "load", device, lambda: 0, lambda: leaner and readable_in_place(source))
    step = partial(fallback.step, source) if leaner else str
    return first_that_fits(f"loading of {label}", ways, in_its_way, torch.device(device), step)
