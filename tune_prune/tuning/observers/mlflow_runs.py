"""Trials as runs of MLflow, in the store that MLFLOW_TRACKING_URI names, else in MLflow's own default below this folder."""

from __future__ import annotations

import os
from datetime import datetime

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from tune_prune.tuning.observers.tracking import TrackedTrial

_STATUS = {"complete": "FINISHED", "failed": "FAILED", "stopped_early": "KILLED"}
_LONGEST_TAG = 5000  # characters, by MLflow's rules


class MlflowRuns:
    def __init__(self, experiment: str) -> None:
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        self._experiment = known.experiment_id if known is not None else self._client.create_experiment(experiment)

    def log(self, trial: TrackedTrial) -> None:
        tags = {f"tune_prune.{name}": value[:_LONGEST_TAG] for name, value in trial.tags.items()}
        tags["tune_prune.model"] = trial.model
        run = self._client.create_run(self._experiment, _milliseconds(trial.started), tags, trial.name)
        at, run_id = _milliseconds(trial.ended), run.info.run_id
        last = max((step for _, _, step in trial.curves), default=0)
        points = [*trial.curves, *((name, value, last) for name, value in trial.metrics.items())]
        metrics = [Metric(name, value, at, step) for name, value, step in dict.fromkeys(points)]
        self._client.log_batch(run_id, metrics, [Param(name, str(value)) for name, value in trial.params.items()])
        self._client.set_terminated(run_id, _STATUS[trial.status], at)

    def close(self) -> None:
        """Every run is complete."""


def open_tracker(experiment: str) -> MlflowRuns:
    return MlflowRuns(experiment)


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
