"""In which order Ray Tune gets its work: preparation jobs first, then every trial whose statistics are there.

Jobs and trials run on the same actors, so that no worker starts and no model is loaded twice. Nothing ever waits on a
device: what is not ready is not handed out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial as RayTrial
from ray.tune.search import Searcher

from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.records import TrialRecord
from tune_prune.pruning.methods import load_method
from tune_prune.tuning.messages import job_message
from tune_prune.tuning.preparation import PrepareJob
from tune_prune.tuning.searcher import OptunaSearcher
from tune_prune.tuning.worker import TrialSpec


def is_job(trial: RayTrial) -> bool:
    """Whether what Ray calls a trial is a preparation job."""
    return "job" in trial.config


class WorkQueue(Searcher):
    """Suggests `{"job": index}` of `jobs`, then `{"key": ...}` of `specs` in their order or, with `adaptive`, of what that
    proposes. Nothing more once a job has failed."""

    def __init__(
        self, jobs: Sequence[PrepareJob], specs: Sequence[TrialSpec], adaptive: OptunaSearcher | None = None
    ) -> None:
        super().__init__(metric="acc_mean", mode="max")
        self._jobs = list(jobs)
        self._unasked = list(range(len(jobs)))
        self._unprepared = {(job.run, job.seq_len) for job in jobs}
        self._waiting = [] if adaptive is not None else list(specs)
        self._adaptive = adaptive
        self._given: dict[str, int] = {}  # Ray's trial id -> job
        self.failed = False

    def suggest(self, trial_id: str) -> Any:
        """The next job or trial; None where all that is left waits for a job."""
        if self.failed:
            return Searcher.FINISHED
        if self._unasked:
            self._given[trial_id] = self._unasked.pop(0)
            return {"job": self._given[trial_id]}
        if self._adaptive is not None:
            return self._adaptive.suggest(trial_id)
        for spec in self._waiting:
            waits = load_method(spec.config.method).statistics
            if not waits or (spec.run, spec.config.seq_len) not in self._unprepared:
                self._waiting.remove(spec)
                return {"key": spec.key}
        return None if self._waiting else Searcher.FINISHED

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if self._adaptive is not None and trial_id not in self._given:
            self._adaptive.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        if trial_id in self._given:
            job = self._jobs[self._given.pop(trial_id)]
            self._unprepared.discard((job.run, job.seq_len))
            message = job_message(result)
            self.failed = self.failed or error or (message is not None and bool(message.refused))
        elif self._adaptive is not None:
            self._adaptive.on_trial_complete(trial_id, result, error)

    def save(self, checkpoint_path: str) -> None:
        """Ray asks for a checkpoint; there is nothing to keep, as every start reads the ledger."""
        Path(checkpoint_path).write_text(json.dumps({"rebuilt_from": "ledger"}))

    def restore(self, checkpoint_path: str) -> None:
        raise RuntimeError("a search is resumed by starting it again: the ledger is the only state")


class StopAtFailure(Stopper):
    """Ends the search when a job of the queue has failed: its trials cannot run, and the others' comparison would lack them."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._queue.failed


class PrepareCallback(Callback):
    """Tells what the jobs have found: a line each to `say`, baselines to `keep`; remembers the first failure."""

    def __init__(
        self,
        jobs: Sequence[PrepareJob],
        say: Callable[[str], None],
        keep: Callable[[ModelRun, TrialRecord], None],
    ) -> None:
        self._jobs = list(jobs)
        self._say = say
        self._keep = keep
        self._done = 0
        self.failure: Exception | None = None

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if not is_job(trial):
            return
        job = self._jobs[trial.config["job"]]
        message = job_message(trial.last_result)
        if message is None:
            return
        if message.refused:
            self.failure = self.failure or UserError(message.refused)
            return
        self._done += 1
        self._say(f"[prepare {self._done}/{len(self._jobs)}] {job}: {message}")
        if message.baseline is not None:
            self._keep(job.run, message.baseline)

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        if is_job(trial) and self.failure is None:
            error = str(trial.get_error()).strip() or "unknown cause"
            self.failure = RuntimeError(f"{self._jobs[trial.config['job']]} failed: {error.splitlines()[-1].strip()}")
