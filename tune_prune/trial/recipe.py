"""What a trial makes of the dense model: the groups that stay, and the weights that a refit has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.core.hashing import digest
from tune_prune.data import calibration
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.layer_weights import LazyWeights, bring
from tune_prune.pruning import padding
from tune_prune.pruning.compensation import refit
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import Refitted, prune, pruned_weights


@dataclass(frozen=True, eq=False)
class Recipe:
    """`refitted`: weights that take the place of cut ones, by parameter name; `steps`: everything that they depend on besides the
    plan and the dense model, as plain data, empty where nothing is refitted."""

    plan: PruningPlan
    refitted: Refitted = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)

    @property
    def structure(self) -> str:
        """By which measurements are kept: recipes of one structure make the same model."""
        return digest({"structure": self.plan.structure, **self.steps}) if self.steps else self.plan.structure

    def make(self, dense: LoadedModel) -> tuple[PreTrainedModel, int]:
        """The pruned copy of `dense`, and its number of parameters. It is as empty as that one is, or has its weights on the device
        where the residency says so. Where the device wants it its MLPs are filled up (pruning.padding)."""
        model = prune(dense.model, dense.family, self.plan, self.refitted)
        params = sum(p.numel() for p in model.parameters())  # before it is filled up
        if dense.device.type in padding.MULTIPLE:
            padding.pad(model, dense.family, padding.MULTIPLE[dense.device.type])
        if dense.residency.pruned_whole and dense.residency.weights is not None:
            bring(model, self.weights(dense, model), dense.device)
        return model, params

    def weights(self, dense: LoadedModel, model: PreTrainedModel) -> LazyWeights:
        """Those of `model`, which `make` has made, from those of the dense one, which are elsewhere."""
        assert dense.residency.weights is not None
        weights = pruned_weights(dense.model, dense.family, self.plan, dense.residency.weights, self.refitted)
        return padding.padded_weights(model, weights)


def refitted(
    dense: LoadedModel, plan: PruningPlan, config: PruningConfig, windows: Tensor, run: ModelRun
) -> tuple[Recipe, refit.Refit]:
    """The recipe of `plan` with the compensation of `config`, fitted to calibration `windows` of `run`, and what that has done."""
    found = refit.least_squares(dense.model, dense.family, plan, windows, config.damping, dense.residency.forward_only)
    steps = {
        "compensation": config.compensation,
        "version": refit.VERSION,
        "damping": config.damping,
        "windows": list(windows.shape),
        "calibration": calibration.calibration_fingerprint(run.calibration),
        "seed": run.seed,
    }
    return Recipe(plan, found.weights, steps) if found.weights else Recipe(plan), found
