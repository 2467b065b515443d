"""A model and its pruned copy as memory holds them: what has fitted so far is where the next stage begins, and a stage that does
not fit is tried again with less at once, then in a leaner way (`trial.fallback`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from tune_prune.models import loading
from tune_prune.models.loading import map_model, readable_in_place
from tune_prune.models.runner.layer_runner import BLOCK_TOKENS
from tune_prune.models.runner.out_of_memory import first_that_fits, release
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial.fallback import Fallback, Use
from tune_prune.trial.recipe import Made, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


class HeldModel:
    """The dense model `loaded`, and the last copy that was pruned from it."""

    def __init__(
        self,
        label: str,
        loaded: loading.LoadedModel,
        fallback: Fallback | None = None,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """`label`: its name in messages. `fallback`: what this process has learned before of how the model fits into memory.
        `let_go`: called where its weights have to leave the device, as somebody else has them, too."""
        self._label = label
        self.loaded = loaded
        self.fallback = fallback or Fallback(replace(loaded.residency, weights=None, device=None))
        self._let_go = let_go
        self._copy: tuple[str, Made] | None = None  # the pruned model, and its structure

    def cut(self, choose: Callable[[], PruningPlan]) -> tuple[PruningPlan, int]:
        """Return the plan that `choose` finds with the dense model, and the number of parameters of the copy that is made
        by it."""

        def make(_: int) -> tuple[PruningPlan, int]:
            self.drop_copy()
            plan = choose()
            return plan, self._made(Recipe(plan)).params

        return self.fitted("pruning", "measure", make)

    def model_of(self, recipe: Recipe) -> PreTrainedModel:
        """Return the dense model or, where the plan of `recipe` drops something, the copy that it makes; the last copy is kept
        until `drop_copy`."""
        return self._made(recipe).model

    def _made(self, recipe: Recipe) -> Made:
        dense = self.loaded
        if not recipe.plan.removed_params:
            return Made(dense.model, sum(p.numel() for p in dense.model.parameters()), dense.residency.weights)
        if self._copy is None or self._copy[0] != recipe.structure:
            self._copy = None  # before the next one is made
            self._copy = recipe.structure, recipe.make(dense)
        return self._copy[1]

    def drop_copy(self) -> None:
        """Let go of the pruned copy."""
        self._copy = None

    def residency_of(self, recipe: Recipe) -> Residency:
        """Return how the model that `recipe` makes is held: weights that are elsewhere are cut when they are brought."""
        held = self.loaded.residency
        if held.weights is None or (held.pruned_whole and recipe.plan.removed_params):
            return RESIDENT
        return replace(held.forward_only, weights=self._made(recipe).weights)

    def way(self, stage: str, residency: Residency) -> str:
        """Return how a model that is held so goes through a stage, for the record; "" where it is all there."""
        residency = replace(residency, halvings=self.fallback.halvings.get(stage, 0))
        return "" if residency == RESIDENT else str(residency)

    def halvings(self, parts: int, part_tokens: int, residency: Residency) -> int:
        """Return how often a stage can do with half as much at once: of so many parts, or of the batches of a block."""
        if residency.streamed:
            parts = max(parts, (residency.block_tokens or BLOCK_TOKENS) // part_tokens)
        return max(1, parts).bit_length() - 1

    def fitted(self, stage: str, use: Use, run: Callable[[int], T], most_halvings: Callable[[], int] = lambda: 0) -> T:
        """Return what `run` gives, which is told how often to halve what it does at once: as has fitted so far, or else in
        the next way that fits. Raises OutOfMemory where none does. `run` may hold nothing of the model from one time to the
        next."""
        device, source = self.loaded.device, self.loaded.source
        ways = self.fallback.ways(stage, use, most_halvings, lambda: readable_in_place(source))

        def attempt(way: Residency) -> T:
            self._hold(self.fallback.way)
            return run(way.halvings)

        step = partial(self.fallback.step, source)
        return first_that_fits(f"{stage} of {self._label}", ways, attempt, device, step)

    def _hold(self, way: Residency) -> None:
        """Have the model in that way. Weights leave the device where it says so."""
        held = self.loaded.residency
        if way.from_files and not held.from_files:
            source, dtype, device = self.loaded.source, self.loaded.model.dtype, self.loaded.device
            if self._let_go is not None:
                self._let_go()
            self.drop_copy()
            self.loaded = map_model(source, dtype, device.type, way)
            release(device)
        elif replace(held, weights=None, device=None) != way:
            self.drop_copy()  # it may have to be made otherwise
            self.loaded = replace(self.loaded, residency=replace(way, weights=held.weights, device=held.device))
