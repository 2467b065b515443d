"""A search by Ray Tune: the queue, the rule and the observers of a search, as Ray calls them.

A start is always a fresh Tuner over what the ledger does not hold; Ray Tune's own restore is never used, because it runs
finished trials again and loses early-stopping state.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Callback, Stopper
from ray.tune.execution import class_cache
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from tune_prune.core.store import TUNE
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.preparation import PrepareJob, Work
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.ray_cluster.trainable import PruneTrainable, message_in, work_of
from tune_prune.tuning.stopping.rule import StoppingRule
from tune_prune.tuning.worker import TrialSpec, WorkerSettings

CRASHES_PER_TRIAL = 1  # worker killed, node lost, or an exception: tried again once in a fresh process


def run(
    queue: WorkQueue,
    jobs: Sequence[PrepareJob],
    specs: Mapping[str, TrialSpec],
    rule: StoppingRule,
    settings: WorkerSettings,
    observers: Sequence[Observer],
    count: int,
    slots: int,
) -> None:
    """Do everything that `queue` hands out, `count` pieces of `jobs` and `specs` at most, `slots` at once."""

    def name(trial: RayTrial) -> str:
        work = work_of(trial.config, specs, jobs)
        if isinstance(work, PrepareJob):
            return f"prepare-{work.run.label}-{'baseline' if work.seq_len is None else f's{work.seq_len}'}"
        return f"{work.run.label}-{work.config.name}-{work.key[:6]}"

    folder = settings.experiment_dir
    state = str(folder / TUNE) if isinstance(folder, Path) else tempfile.mkdtemp(prefix="tune_prune_tune_")
    # Tune's variable for Lightning makes an environment of its own, which no worker has that has started before.
    class_cache.DEFAULT_ENV_VARS.clear()
    trainable = tune.with_parameters(PruneTrainable, specs=dict(specs), jobs=list(jobs), settings=settings)
    tuner = tune.Tuner(
        tune.with_resources(trainable, settings.resources.to_ray()),
        tune_config=tune.TuneConfig(
            search_alg=QueueSearcher(queue, jobs),
            num_samples=count,
            scheduler=RuleScheduler(rule),
            max_concurrent_trials=slots,
            reuse_actors=True,
            trial_name_creator=name,
            trial_dirname_creator=lambda trial: f"{name(trial)}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=f"{datetime.now():%Y%m%d-%H%M%S}-{settings.search_id}",
            storage_path=state,
            callbacks=[
                _ObserverCallback(observer, lambda trial: work_of(trial.config, specs, jobs)) for observer in observers
            ],
            failure_config=tune.FailureConfig(max_failures=CRASHES_PER_TRIAL),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            stop=_StopAtFailure(queue),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    finally:
        if not isinstance(folder, Path):  # its own files, which it appends to, are on this machine
            shutil.rmtree(state, ignore_errors=True)


class QueueSearcher(Searcher):
    """The queue as Ray asks it."""

    def __init__(self, queue: WorkQueue, jobs: Sequence[PrepareJob]) -> None:
        super().__init__(metric="acc_mean", mode="max")
        self._queue = queue
        self._jobs = list(jobs)
        self._given: dict[str, Work] = {}  # by Ray's trial id

    def suggest(self, trial_id: str) -> Any:
        """What names the next job or trial; None where all that is left waits for a job."""
        work = self._queue.next()
        if work is None:
            return Searcher.FINISHED if self._queue.empty else None
        self._given[trial_id] = work
        return {"job": self._jobs.index(work)} if isinstance(work, PrepareJob) else {"key": work.key}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        message = message_in(result)
        if message is not None:
            self._queue.report(self._given[trial_id], message)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._queue.end(self._given.pop(trial_id), message_in(result), error)

    def save(self, checkpoint_path: str) -> None:
        """Ray asks for a checkpoint; there is nothing to keep, as every start reads the ledger."""
        Path(checkpoint_path).write_text(json.dumps({"rebuilt_from": "ledger"}))

    def restore(self, checkpoint_path: str) -> None:
        raise RuntimeError("a search is resumed by starting it again: the ledger is the only state")


class RuleScheduler(FIFOScheduler):
    """First come, first served, until the rule stops a trial; and an actor that is starting is left to start.

    Ray's own FIFO gives an actor that a trial has left to the oldest waiting trial, and kills the one that is being
    started for it. Where trials are shorter than an actor's start (cached measurements, small models), the search would
    never get to its second actor.
    """

    def __init__(self, rule: StoppingRule) -> None:
        super().__init__()
        self._rule = rule

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        # Without a choice Ray goes through the waiting trials in order, past those whose actor is on its way.
        return None

    def on_trial_result(self, tune_controller: Any, trial: RayTrial, result: dict[str, Any]) -> str:
        message = message_in(result)
        stops = isinstance(message, TrialMessage) and self._rule.stops(message)
        return TrialScheduler.STOP if stops else TrialScheduler.CONTINUE


class _ObserverCallback(Callback):
    """An observer as Ray calls it."""

    def __init__(self, observer: Observer, work_of_trial: Callable[[RayTrial], Work]) -> None:
        self._observer = observer
        self._work = work_of_trial

    def setup(self, *args: Any, **info: Any) -> None:
        self._observer.on_begin()

    def on_step_end(self, iteration: int, trials: list[RayTrial], **info: Any) -> None:
        self._observer.on_tick(sum(trial.status == RayTrial.RUNNING for trial in trials))

    def on_trial_start(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._observer.on_start(self._work(trial))

    def on_trial_result(
        self, iteration: int, trials: list[RayTrial], trial: RayTrial, result: dict[str, Any], **info: Any
    ) -> None:
        message = message_in(result)
        if message is not None:
            self._observer.on_message(self._work(trial), message)

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._observer.on_end(self._work(trial), message_in(trial.last_result))

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        error = trial.get_error()
        if error is not None and not isinstance(error, BaseException):  # its text, where its file could not be written
            error = RuntimeError(error)
        self._observer.on_error(self._work(trial), message_in(trial.last_result), error)

    def on_experiment_end(self, trials: list[RayTrial], **info: Any) -> None:
        self._observer.on_finish()


class _StopAtFailure(Stopper):
    """Ends the search when a job of the queue has failed: its trials cannot run, and the others' comparison would lack them."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._queue.failed
