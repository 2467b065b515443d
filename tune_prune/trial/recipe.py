"""The recipe of a trial's model: the groups of the dense model that stay, and what was done to their weights besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from tune_prune.core.config import NOT_REFITTED, NOT_TRAINED, REFITTED, TRAINED, PruningConfig
from tune_prune.core.hashing import digest
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.layer_weights import Weights
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning import padding
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import NONE, Changes, Sketch, cut


@dataclass(frozen=True, eq=False)
class Recipe:
    """A plan and `changes` to the weights that it leaves; `steps`: everything that the changes depend on besides the plan and the
    dense model, as plain data, empty where nothing was changed."""

    plan: PruningPlan
    changes: Changes = NONE
    steps: Mapping[str, Any] = field(default_factory=dict)

    @property
    def structure(self) -> str:
        """Return the digest by which measurements are kept: recipes of one structure make the same model."""
        return digest({"structure": self.plan.structure, **self.steps}) if self.steps else self.plan.structure

    def notes(self, config: PruningConfig) -> list[str]:
        """Return sentences for users of the model: what `config` has done to its weights besides the cut, and what it has not."""
        done, notes = [], []
        if self.changes.refitted:
            done.append(f"{len(self.changes.refitted)} of its weight matrices {REFITTED}")
        elif config.compensation != "none" and self.plan.removed_params:
            notes.append(NOT_REFITTED)
        if self.changes.updates:
            done.append(f"the model {TRAINED}")
        elif config.recovery != "none" and self.plan.removed_params:
            notes.append(NOT_TRAINED)
        return [" and ".join(done)] * bool(done) + notes

    def sketch(self, dense: LoadedModel) -> Sketch:
        """Return the pruned model of `dense` as it is saved: nothing of it is made yet."""
        return cut(dense.model, dense.family, self.plan, dense.residency.weights, self.changes)

    def make(self, dense: LoadedModel, for_training: bool = False) -> Made:
        """Make the pruned model of `dense`, in memory where that one is or where the residency says so. Where the device wants it
        and it is not made `for_training`, its MLPs are filled up (pruning.padding)."""
        sketch, elsewhere = self.sketch(dense), dense.residency.weights is not None
        params = sum(p.numel() for p in sketch.model.parameters())  # before it is filled up
        params += dense.geometry.around_params
        if not for_training and dense.device.type in padding.MULTIPLE:
            sketch = padding.pad(sketch, dense.family, padding.MULTIPLE[dense.device.type])
        if elsewhere and not dense.residency.pruned_whole:
            return Made(sketch.model, params, sketch.weights)
        return Made(sketch.in_memory(dense.device if elsewhere else None), params)

    def to_train(self, dense: LoadedModel) -> tuple[PreTrainedModel, Residency]:
        """Return the pruned model of `dense`, and how it is held while gradients are taken: layer by layer where those of the dense
        model are."""
        made, held = self.make(dense, for_training=True), dense.residency
        if made.weights is not None:
            return made.model, replace(held, weights=made.weights)
        if held.weights is None:
            return made.model, held
        return made.model, Residency(gradients_by_layer=True, states=held.states)


@dataclass(frozen=True, eq=False)
class Made:
    """A pruned model to be run: its number of parameters without zeros, and its weights by name where they are not in memory."""

    model: PreTrainedModel
    params: int
    weights: Weights | None = None
