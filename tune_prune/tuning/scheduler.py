"""Early stopping of weak trials: asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934) per model.

A trial is compared, at each slice of the zero-shot items, with the trials of its own model that reached that slice:
accuracies of different models say nothing about each other. A search that is started again compares with the trials of
that start only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler

from tune_prune.tuning.trainable import TrialSpec

REDUCTION_FACTOR = 2  # the better half goes on


class AshaPerModel(FIFOScheduler):
    """One ASHA per model label, on acc_mean, with the slices of the evaluation as its levels."""

    def __init__(self, specs: Mapping[str, TrialSpec]) -> None:
        super().__init__()
        self._labels = {key: spec.run.label for key, spec in specs.items()}
        self._schedulers = {
            spec.run.label: AsyncHyperBandScheduler(
                time_attr="evaluated_fraction",
                metric="acc_mean",
                mode="max",
                grace_period=spec.run.protocol.slices[0],  # type: ignore[arg-type]  # any number works
                max_t=1,
                reduction_factor=REDUCTION_FACTOR,
            )
            for spec in specs.values()
        }

    def _of(self, trial: RayTrial) -> AsyncHyperBandScheduler:
        return self._schedulers[self._labels[trial.config["key"]]]

    def on_trial_add(self, tune_controller: Any, trial: RayTrial) -> None:
        self._of(trial).on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: RayTrial, result: dict[str, Any]) -> str:
        return self._of(trial).on_trial_result(tune_controller, trial, result)

    def on_trial_complete(self, tune_controller: Any, trial: RayTrial, result: dict[str, Any]) -> None:
        self._of(trial).on_trial_complete(tune_controller, trial, result)
