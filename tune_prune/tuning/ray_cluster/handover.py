"""The moment between two trials, when a worker is given its next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayActorError
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial as RayTrial


@contextmanager
def deaths_count_once() -> Iterator[None]:
    """A worker that dies in that moment is one failure of the trial that it was given, which is tried again. Ray Tune (2.60) counts
    the actor's and the call's, so that the trial has failed for good, and gives a trial whose call failed no other actor."""
    counts: Any = TuneController._process_trial_failure
    told: set[RayTrial] = set()  # of whose actor's death we have heard, and not yet of the call's

    def once(controller: TuneController, trial: RayTrial, exception: Exception) -> None:
        died = isinstance(exception, RayActorError)
        if died and trial in told:
            told.remove(trial)
            return
        if died and trial in controller._resetting_trials:
            controller._resetting_trials.remove(trial)
            told.add(trial)
        counts(controller, trial, exception)

    TuneController._process_trial_failure = once  # type: ignore[assignment, method-assign]  # this is what it takes
    try:
        yield
    finally:
        TuneController._process_trial_failure = counts  # type: ignore[method-assign]
