"""A search by Ray Tune: the queue, the rule and the observers of a search, as Ray calls them.

A start is always a fresh Tuner over what the ledger does not hold; Ray Tune's own restore is never used, because it runs
finished trials again and loses early-stopping state.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.exceptions import RayTaskError
from ray.tune import Callback, Stopper
from ray.tune.execution import class_cache
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from tune_prune.core import temporary
from tune_prune.core.errors import MachineError
from tune_prune.core.store import TUNE
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.trial.failures import Hung, LostWorker
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.observers.results import end, end_by_error, last_line
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.ray_cluster.deadline import Deadline
from tune_prune.tuning.ray_cluster.handover import deaths_count_once
from tune_prune.tuning.ray_cluster.trainable import AFTER_A_DEATH, PruneTrainable, message_in, work_of
from tune_prune.tuning.stopping import StoppingRule
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work
from tune_prune.tuning.worker import WorkerSettings

CRASHES_PER_TRIAL = 1  # worker killed, node lost, or an exception: tried again once in a fresh process


def run(
    queue: WorkQueue,
    jobs: Sequence[PrepareJob],
    specs: Mapping[str, TrialSpec],
    rule: StoppingRule,
    settings: WorkerSettings,
    observers: Observer,
    count: int,
    slots: int,
) -> None:
    """Do everything that `queue` hands out, `count` pieces of `jobs` and `specs` at most, `slots` at once. Raises MachineError
    where no other trial could run either."""

    def name(trial: RayTrial) -> str:
        work = work_of(trial.config, specs, jobs)
        if isinstance(work, PrepareJob):
            return f"prepare-{work.run.label}-{work.name}"
        return f"{work.run.label}-{work.config.name}-{work.key[:6]}"

    folder = settings.experiment_dir
    state = str(folder / TUNE) if isinstance(folder, Path) else str(temporary.make())
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
                _ObserverCallback(queue, observers, settings, rule, lambda trial: work_of(trial.config, specs, jobs))
            ],
            failure_config=tune.FailureConfig(max_failures=CRASHES_PER_TRIAL),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            stop=_StopAtFailure(queue),
            verbose=0,
        ),
    )
    leave_trackers_out()
    try:
        with deaths_count_once():
            tuner.fit()
    finally:
        if not isinstance(folder, Path):  # its own files, which it appends to, are on this machine
            temporary.remove(Path(state))


def leave_trackers_out() -> None:
    """Ray Tune counts which trackers the callbacks of a search are of, and imports for it every one that is installed: seconds of
    each start, and folders of wandb that stay where its process is killed. So they are not there when Ray looks."""
    names = ("mlflow", "wandb")
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # an import raises ImportError
    try:
        for name in names:
            importlib.import_module(f"ray.air.integrations.{name}")
    finally:
        for name in hidden:
            del sys.modules[name]


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
        work = self._given.pop(trial_id)
        if not error:  # else the callback ends it, which is called next and knows why
            self._queue.end(work, message_in(result))

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
    """The observers as Ray calls them; and the time limit, which it is asked for as often.

    Ray takes what a callback raises for a failure of the trial, or wraps it; only what the end of a step raises ends the search.
    """

    def __init__(
        self,
        queue: WorkQueue,
        observers: Observer,
        settings: WorkerSettings,
        rule: StoppingRule,
        work_of_trial: Callable[[RayTrial], Work],
    ) -> None:
        self._queue = queue
        self._observers = observers
        self._settings = settings
        self._rule = rule
        self._work = work_of_trial
        self._deadline = Deadline(settings.trial_timeout_s)
        self._failure: Exception | None = None

    def setup(self, *args: Any, **info: Any) -> None:
        self._observers.on_begin()

    def on_step_end(self, iteration: int, trials: list[RayTrial], **info: Any) -> None:
        if self._failure is not None:
            raise self._failure
        for trial in self._deadline.check(trials):
            if isinstance(self._work(trial), TrialSpec):  # which would take as long again; a job is tried once more
                trial.max_failures = 0
        self._observers.on_tick(sum(trial.status == RayTrial.RUNNING for trial in trials))

    def on_trial_start(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._deadline.begin(trial)
        self._tell(self._observers.on_start, trial)

    def on_trial_result(
        self, iteration: int, trials: list[RayTrial], trial: RayTrial, result: dict[str, Any], **info: Any
    ) -> None:
        message = message_in(result)
        if message is not None:
            self._tell(self._observers.on_message, trial, message)

    def on_trial_complete(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._deadline.done(trial)
        how = partial(end, self._observers, self._settings, self._rule.reasons)
        self._tell(how, trial, message_in(trial.last_result))

    def on_trial_recover(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._deadline.done(trial)
        if isinstance(self._cause(trial), LostWorker | OutOfMemory):
            trial.config[AFTER_A_DEATH] = True

    def on_trial_error(self, iteration: int, trials: list[RayTrial], trial: RayTrial, **info: Any) -> None:
        self._deadline.done(trial)
        self._tell(partial(self._on_error, trial), trial)

    def on_experiment_end(self, trials: list[RayTrial], **info: Any) -> None:
        self._observers.on_finish()

    def _tell(self, event: Callable[..., None], trial: RayTrial, *more: Any) -> None:
        try:
            event(self._work(trial), *more)
        except Exception as error:  # noqa: BLE001  # raised at the end of the step
            self._failure = self._failure or error

    def _on_error(self, trial: RayTrial, work: Work) -> None:
        error = self._cause(trial)
        if isinstance(error, MachineError) and not isinstance(error, Hung | LostWorker):
            raise error  # no trial's failure
        end_by_error(self._queue, self._observers, self._settings, work, message_in(trial.last_result), error)

    def _cause(self, trial: RayTrial) -> BaseException:
        """What has ended a trial, in our terms."""
        if trial in self._deadline.ended:
            return Hung(
                f"stopped by the time limit of {self._settings.trial_timeout_s:g} s per trial (--trial-timeout)"
            )
        error = RuntimeError("unknown cause")
        if trial.pickled_error_file is not None:
            error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
        if isinstance(error, RayTaskError):  # its worker has raised, and lives
            return error.cause or error
        said = last_line(error).split(" Some common causes")[0]
        # What Ray's memory monitor has to say of a worker that it has ended
        return OutOfMemory(said) if "address the out of memory issue" in str(error) else LostWorker(said)


class _StopAtFailure(Stopper):
    """Ends the search when a job of the queue has failed: its trials cannot run, and the others' comparison would lack them."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._queue.failed
