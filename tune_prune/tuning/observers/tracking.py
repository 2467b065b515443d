"""Trials as runs of an experiment tracker: `search --track mlflow`, `--track wandb`, or both.

Each library is imported only then, in a thread of its own, which gets the trials when they have ended: whatever a tracker does,
no trial waits for it, and none fails by it. Its first failure is a warning, later ones are counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from tune_prune.core.errors import UserError
from tune_prune.core.records import TrialRecord
from tune_prune.core.terminal import say
from tune_prune.trial.trial import TrialProgress
from tune_prune.tuning.messages import Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.work import TrialSpec, Work

TRACKERS = {"mlflow": "mlflow_runs", "wandb": "wandb_runs"}  # flag, package and extra -> module beside this one
WAIT_S = 60.0  # at the end of a search, for what a tracker has not written yet


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


class Tracker(Protocol):
    def log(self, trial: TrackedTrial) -> None:
        """Write one run, whole."""

    def close(self) -> None:
        """Nothing more comes."""


def trackers(names: Sequence[str], experiment: str) -> list[Observer]:
    """An observer for each name. UserError where its package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--track {name} needs the package {name}, which is not installed; pip install 'tune_prune[{name}]'"
            )
    return [TrackingObserver(name, experiment) for name in dict.fromkeys(names)]


@dataclass
class _Seen:
    started: datetime
    curves: list[tuple[str, float, int]] = field(default_factory=list)


class TrackingObserver(Observer):
    """The runs of `experiment` in one tracker."""

    def __init__(self, name: str, experiment: str) -> None:
        self._name, self._experiment = name, experiment
        self._seen: dict[str, _Seen] = {}  # by trial key
        self._trials: queue.SimpleQueue[TrackedTrial | None] | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0

    def __getstate__(self) -> Mapping[str, Any]:
        return {}  # Ray pickles what it calls, and uses no copy

    def on_begin(self) -> None:
        self._trials = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(self._trials,), name=self._name, daemon=True)
        self._thread.start()

    def on_start(self, work: Work) -> None:
        if isinstance(work, TrialSpec):
            self._seen[work.key] = _Seen(datetime.now(UTC))

    def on_message(self, work: Work, message: Message) -> None:
        if isinstance(work, TrialSpec) and isinstance(message, TrialMessage) and message.stage is not None:
            report = message.stage
            step = report.items_scored or message.index
            points = {f"duration_s_{report.stage}": report.duration_s} | report.metrics
            self._seen[work.key].curves += [(name, value, step) for name, value in _finite(points).items()]

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, TrialSpec) and isinstance(last, TrialMessage) and last.record is not None:
            self._hand_over(work, last.progress, last.record)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self.on_end(work, last)

    def on_finish(self) -> None:
        if self._trials is None or self._thread is None:
            return
        self._trials.put(None)
        self._thread.join(WAIT_S)
        if self._thread.is_alive():
            self._warn(f"it has not written everything after {WAIT_S:g} s, and is left behind")
        elif self._failures > 1:
            self._warn(f"{self._failures} runs could not be written")

    def _hand_over(self, spec: TrialSpec, progress: TrialProgress, record: TrialRecord) -> None:
        assert self._trials is not None
        seen = self._seen.pop(spec.key)
        tags = {"key": spec.key, "status": record.status, "host": progress.host, "device": progress.device_name}
        tags |= {"reason": record.reason, "failure": record.failure}
        self._trials.put(
            TrackedTrial(
                name=f"{spec.config.name}-{spec.key[:6]}",
                model=spec.run.label,
                params=spec.config.values(spec.run),
                tags={name: value for name, value in tags.items() if value},
                curves=seen.curves,
                metrics=_finite(progress.metrics),
                status=record.status,
                started=seen.started,
                ended=datetime.now(UTC),
            )
        )

    def _write(self, trials: queue.SimpleQueue[TrackedTrial | None]) -> None:
        """The thread's."""
        tracker: Tracker | None = None
        while (trial := trials.get()) is not None:
            try:
                if tracker is None:
                    module = importlib.import_module(f"{__package__}.{TRACKERS[self._name]}")
                    tracker = module.open_tracker(self._experiment)
                tracker.log(trial)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a tracker raises must not end a search
                self._failures += 1
                if self._failures == 1:
                    self._warn(f"{type(error).__name__}: {' '.join(str(error).split())}; the search goes on")
        if tracker is not None:
            tracker.close()

    def _warn(self, what: str) -> None:
        say(f"warning: --track {self._name}: {what}", sys.stderr)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
