"""Which trial gets which actor, and early stopping of weak trials by asynchronous successive halving (ASHA, Li et al. 2020,
arXiv:1810.05934) per model and pruning ratio.

A trial is compared, at each level, with the trials of its own model and ratio that reached that level: accuracies of
other models and sizes say nothing about it. The levels are the first slice with a quarter of the zero-shot items and its
doublings. Finer slices before it are no levels: ASHA stops about half of the trials at its first level, whether the items
can tell them apart or not. From a sixteenth of the items it spent 27% of the tokens instead of 50% on 200 simulated grids
(made as in scripts/bench_racing.py), but stopped the best configuration in 2.5% of them. A search that is started
again compares with the trials of that start only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from tune_prune.tuning.messages import trial_message
from tune_prune.tuning.queue import is_job
from tune_prune.tuning.worker import TrialSpec, labels_of_groups

REDUCTION_FACTOR = 2  # the better half goes on
SMALLEST_LEVEL = 0.25  # of the items; see above


class PlainScheduler(FIFOScheduler):
    """First come, first served, and an actor that is starting is left to start.

    Ray's own FIFO gives an actor that a trial has left to the oldest waiting trial, and kills the one that is being
    started for it. Where trials are shorter than an actor's start (cached measurements, small models), the search would
    never get to its second actor.
    """

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        # Without a choice Ray goes through the waiting trials in order, past those whose actor is on its way.
        return None


class AshaScheduler(PlainScheduler):
    """One ASHA per model and pruning ratio, on acc_mean."""

    def __init__(self, specs: Mapping[str, TrialSpec]) -> None:
        super().__init__()
        self._groups = labels_of_groups(specs.values())
        self._schedulers = {
            self._groups[spec.key]: AsyncHyperBandScheduler(
                time_attr="evaluated_fraction",
                metric="acc_mean",
                mode="max",
                grace_period=next(part for part in spec.run.protocol.slices if part >= SMALLEST_LEVEL),  # type: ignore[arg-type]
                max_t=1,
                reduction_factor=REDUCTION_FACTOR,
            )
            for spec in specs.values()
        }

    def _of(self, trial: RayTrial) -> AsyncHyperBandScheduler:
        return self._schedulers[self._groups[trial.config["key"]]]

    def on_trial_add(self, tune_controller: Any, trial: RayTrial) -> None:
        if not is_job(trial):
            self._of(trial).on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: RayTrial, result: dict[str, Any]) -> str:
        if is_job(trial):
            return TrialScheduler.CONTINUE
        answer: str = self._of(trial).on_trial_result(tune_controller, trial, _level(result))
        return answer

    def on_trial_complete(self, tune_controller: Any, trial: RayTrial, result: dict[str, Any]) -> None:
        if not is_job(trial):
            self._of(trial).on_trial_complete(tune_controller, trial, _level(result))


def _level(result: dict[str, Any]) -> dict[str, Any]:
    """What Ray's ASHA reads; nothing of a stage before the zero-shot items."""
    message = trial_message(result)
    if message is None or message.slice is None or message.accuracy is None:
        return {}
    return {"evaluated_fraction": message.slice.fraction, "acc_mean": message.accuracy}
