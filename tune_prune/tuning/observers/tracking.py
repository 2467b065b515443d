"""Trials as runs of an experiment tracker: `search --track mlflow`, `--track wandb`, or both.

Each library is imported only then, in a thread of its own, which gets the trials when they have ended: whatever a tracker does,
no trial waits for it, and none fails by it. Its first failure is a warning.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from tune_prune.core.errors import UserError
from tune_prune.core.terminal import say
from tune_prune.tuning.observers.observer import Event, Observer, Reader
from tune_prune.tuning.work import TrialSpec

WAIT_S = 60.0  # at the end of a search, for what a tracker has not written yet
_LONGEST_TAG = 5000  # characters, by MLflow's rules


@dataclass(frozen=True)
class TrackedTrial:
    """One trial that has ended, as trackers know runs."""

    name: str
    model: str
    params: Mapping[str, Any]  # hyperparameters
    tags: Mapping[str, str]
    curves: Sequence[tuple[str, float, int]]  # name, value, step: items scored, else the index of the stage
    metrics: Mapping[str, float]  # finite ones, at its end
    status: str  # complete, failed or stopped_early
    started: datetime
    ended: datetime


Log = Callable[[TrackedTrial], None]  # writes one run, whole


def trackers(names: Sequence[str], experiment: str) -> list[Observer]:
    """Return an observer for each name. Raises UserError where its package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--track {name} needs the package {name}, which is not installed; pip install 'tune_prune[{name}]'"
            )
    return [TrackingObserver(name, experiment) for name in dict.fromkeys(names)]


def open_mlflow(experiment: str) -> Log:
    """Write runs to the store that MLFLOW_TRACKING_URI names, else to MLflow's own default below this folder."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    known = client.get_experiment_by_name(experiment)
    experiment_id = known.experiment_id if known is not None else client.create_experiment(experiment)
    statuses = {"complete": "FINISHED", "failed": "FAILED", "stopped_early": "KILLED"}

    def log(trial: TrackedTrial) -> None:
        started, ended = (round(time.timestamp() * 1000) for time in (trial.started, trial.ended))
        tags = {f"tune_prune.{name}": value[:_LONGEST_TAG] for name, value in trial.tags.items()}
        run_id = client.create_run(
            experiment_id, started, tags | {"tune_prune.model": trial.model}, trial.name
        ).info.run_id
        last = max((step for _, _, step in trial.curves), default=0)
        points = [*trial.curves, *((name, value, last) for name, value in trial.metrics.items())]
        metrics = [Metric(name, value, ended, step) for name, value, step in dict.fromkeys(points)]
        client.log_batch(run_id, metrics, [Param(name, str(value)) for name, value in trial.params.items()])
        client.set_terminated(run_id, statuses[trial.status], ended)

    return log


def open_wandb(experiment: str) -> Log:
    """Write runs below this folder, offline (`wandb sync` sends them), unless WANDB_MODE or WANDB_API_KEY says otherwise."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    # Nothing is sent that nobody has asked for.
    mode: Literal["offline"] | None = None if {"WANDB_MODE", "WANDB_API_KEY"} & os.environ.keys() else "offline"

    def log(trial: TrackedTrial) -> None:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", experiment),
            name=trial.name,
            group=trial.model,
            config={**trial.params, "model": trial.model},
            tags=[trial.status],
            notes=trial.tags.get("reason"),
            mode=mode,
            reinit="create_new",
        )
        steps: dict[int, dict[str, float]] = {}
        for name, value, step in trial.curves:
            steps.setdefault(step, {})[name] = value
        for step, values in sorted(steps.items()):
            run.log(values, step=step)
        run.summary.update({**trial.metrics, **trial.tags})
        run.finish(exit_code=int(trial.status == "failed"))

    return log


TRACKERS: dict[str, Callable[[str], Log]] = {"mlflow": open_mlflow, "wandb": open_wandb}  # flag, package and extra


class TrackingObserver(Reader):
    """Hands every trial of a search to one tracker, as a run of `experiment`."""

    def __init__(self, name: str, experiment: str) -> None:
        self._name, self._experiment = name, experiment
        self._started: dict[str, datetime] = {}  # by trial key
        self._curves: dict[str, list[tuple[str, float, int]]] = {}
        self._failures = 0

    def on_begin(self) -> None:
        self._trials: queue.SimpleQueue[TrackedTrial | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(self._trials,), name=self._name, daemon=True)
        self._thread.start()

    def read(self, event: Event) -> None:
        if not isinstance(spec := event.work, TrialSpec):
            return
        fields = event.fields
        if event.name == "trial_start":
            self._started[spec.key], self._curves[spec.key] = event.time, []
        elif event.name == "stage":
            step = fields["items_scored"] or fields["index"]
            points = {f"duration_s_{fields['stage']}": fields["duration_s"]} | fields["metrics"]
            self._curves[spec.key] += [(name, value, step) for name, value in _finite(points).items()]
        else:
            tags = {name: fields[name] for name in ("key", "status", "host", "device", "reason", "failure")}
            trial = TrackedTrial(
                name=f"{spec.config.name}-{spec.key[:6]}",
                model=spec.run.label,
                params=spec.config.values(spec.run),
                tags={name: value for name, value in tags.items() if value},
                curves=self._curves.pop(spec.key),
                metrics=_finite(fields["metrics"]),
                status=fields["status"],
                started=self._started.pop(spec.key),
                ended=event.time,
            )
            self._trials.put(trial)

    def on_finish(self) -> None:
        self._trials.put(None)
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            self._warn(f"it has not written everything after {WAIT_S:g} s, and is left behind")

    def _write(self, trials: queue.SimpleQueue[TrackedTrial | None]) -> None:
        """Write what comes, in the thread, until None comes."""
        log: Log | None = None
        while (trial := trials.get()) is not None:
            try:
                log = log or TRACKERS[self._name](self._experiment)
                log(trial)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a tracker raises must not end a search
                self._failures += 1
                if self._failures == 1:
                    self._warn(f"{type(error).__name__}: {' '.join(str(error).split())}; the search goes on")

    def _warn(self, what: str) -> None:
        say(f"warning: --track {self._name}: {what}", sys.stderr)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
