"""`tune_prune.tuning.stages.StageRunner` as what Ray Tune runs in its workers: a step is a stage.

What Ray calls a trial is `{"key": ...}`, one of the search, or `{"job": index}`, a preparation job. An actor is reused for
the next one and keeps its model and data. Ray flattens dictionaries in a result, so a message travels whole, as one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import tune

from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.stages import StageRunner
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work
from tune_prune.tuning.worker import WorkerSettings

AFTER_A_DEATH = "after_a_death"  # in the config of a trial whose worker died
_MESSAGE = "message"


class PruneTrainable(tune.Trainable):
    """Runs the trial or job that its config names; the rest comes through `tune.with_parameters`."""

    def setup(  # type: ignore[override]  # with_parameters adds the last three
        self, config: dict[str, Any], specs: dict[str, TrialSpec], jobs: list[PrepareJob], settings: WorkerSettings
    ) -> None:
        self._specs, self._jobs = specs, jobs
        self._runner = StageRunner(specs, settings)
        self._runner.begin(work_of(config, specs, jobs), AFTER_A_DEATH in config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._runner.begin(work_of(new_config, self._specs, self._jobs), AFTER_A_DEATH in new_config)
        return True

    def step(self) -> dict[str, Any]:
        return to_result(self._runner.step())


def work_of(config: Mapping[str, Any], specs: Mapping[str, TrialSpec], jobs: Sequence[PrepareJob]) -> Work:
    """What the config of Ray's trial names."""
    return jobs[config["job"]] if "job" in config else specs[config["key"]]


def to_result(message: Message) -> dict[str, Any]:
    """The result of a Ray step."""
    return {_MESSAGE: message, "done": message.ended}


def message_in(result: Mapping[str, Any] | None) -> Message | None:
    """The message in a result; None where it is one of Ray's own."""
    message = (result or {}).get(_MESSAGE)
    return message if isinstance(message, TrialMessage | JobMessage) else None
