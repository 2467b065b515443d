"""What a trial makes of the dense model: the groups that stay, and what was done to their weights besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from tune_prune.core.config import NOT_REFITTED, NOT_TRAINED, REFITTED, TRAINED, PruningConfig
from tune_prune.core.hashing import digest
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.layer_weights import LazyWeights, bring
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning import padding
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import NONE, Changes, prune, pruned_weights


@dataclass(frozen=True, eq=False)
class Recipe:
    """`changes`: to the weights that are left; `steps`: everything that these depend on besides the plan and the dense model, as
    plain data, empty where nothing was changed."""

    plan: PruningPlan
    changes: Changes = NONE
    steps: Mapping[str, Any] = field(default_factory=dict)

    @property
    def structure(self) -> str:
        """By which measurements are kept: recipes of one structure make the same model."""
        return digest({"structure": self.plan.structure, **self.steps}) if self.steps else self.plan.structure

    def notes(self, config: PruningConfig) -> list[str]:
        """Sentences for who uses the model: what `config` has done to its weights besides the cut, and what it has not."""
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

    def make(self, dense: LoadedModel) -> tuple[PreTrainedModel, int]:
        """The pruned copy of `dense`, and its number of parameters. It is as empty as that one is, or has its weights on the device
        where the residency says so. Where the device wants it its MLPs are filled up (pruning.padding)."""
        model = prune(dense.model, dense.family, self.plan, self.changes)
        params = sum(p.numel() for p in model.parameters())  # before it is filled up
        if dense.device.type in padding.MULTIPLE:
            padding.pad(model, dense.family, padding.MULTIPLE[dense.device.type])
        if dense.residency.pruned_whole and dense.residency.weights is not None:
            bring(model, self.weights(dense, model), dense.device)
        return model, params

    def weights(self, dense: LoadedModel, model: PreTrainedModel) -> LazyWeights:
        """Those of `model`, which `make` has made, from those of the dense one, which are elsewhere."""
        return padding.padded_weights(model, self._cut(dense))

    def to_train(self, dense: LoadedModel) -> tuple[PreTrainedModel, Residency]:
        """A pruned copy of `dense` as it is saved, not filled up, and how it is held while gradients are taken: layer by layer
        where those of the dense model are."""
        model, held = prune(dense.model, dense.family, self.plan, self.changes), dense.residency
        if held.weights is None:
            return model, held
        if not held.pruned_whole:
            return model, replace(held, weights=self._cut(dense))
        bring(model, self._cut(dense), dense.device)
        return model, Residency(gradients_by_layer=True, states=held.states, spill_folder=held.spill_folder)

    def _cut(self, dense: LoadedModel) -> LazyWeights:
        assert dense.residency.weights is not None
        return pruned_weights(dense.model, dense.family, self.plan, dense.residency.weights, self.changes)
