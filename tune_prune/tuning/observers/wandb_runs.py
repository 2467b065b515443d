"""Trials as runs of Weights & Biases: below this folder, offline (`wandb sync` sends them), unless its environment says otherwise
(WANDB_MODE, WANDB_API_KEY)."""

from __future__ import annotations

import os
from typing import Literal

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported
os.environ.setdefault("WANDB_SILENT", "true")

import wandb

from tune_prune.tuning.observers.tracking import TrackedTrial


class WandbRuns:
    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        asked = "WANDB_MODE" in os.environ or "WANDB_API_KEY" in os.environ
        # nothing is sent that nobody has asked for
        self._mode: Literal["offline"] | None = None if asked else "offline"

    def log(self, trial: TrackedTrial) -> None:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self._experiment),
            name=trial.name,
            group=trial.model,
            config={**trial.params, "model": trial.model},
            tags=[trial.status],
            notes=trial.tags.get("reason"),
            mode=self._mode,
            reinit="create_new",
        )
        steps: dict[int, dict[str, float]] = {}
        for name, value, step in trial.curves:
            steps.setdefault(step, {})[name] = value
        for step, values in sorted(steps.items()):
            run.log(values, step=step)
        run.summary.update({**trial.metrics, **trial.tags})
        run.finish(exit_code=int(trial.status == "failed"))

    def close(self) -> None:
        """Every run is complete."""


def open_tracker(experiment: str) -> WandbRuns:
    return WandbRuns(experiment)
