"""A search on Ray Tune, by Ray's public API alone. This module and nodes.py are the only ones that import ray.

`connected` gives this process a Ray: a local one of its own (local_ray.py), or the cluster at `--address`. `run` works a queue
off on it, as `tune_prune.tuning.inline` does without Ray: `PruneTrainable` wraps `tune_prune.tuning.stages.StageRunner`, and a
step of Ray Tune is a stage. A start is always a fresh Tuner over what the ledger lacks. Ray Tune's own restore is never used,
because it runs finished trials again.
"""

from __future__ import annotations

import _thread
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayError, RayTaskError
from ray.tune import Callback, Stopper
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from tune_prune.core import ending, machine, temporary, terminal
from tune_prune.core.errors import MachineError, NotStarted, UserError
from tune_prune.core.store import TUNE
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.trial.failures import Hung, LostWorker
from tune_prune.tuning import address as address_check
from tune_prune.tuning import local_ray, nodes
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.observers.results import end, end_by_error, last_line
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.resources import trial_slots
from tune_prune.tuning.stages import StageRunner
from tune_prune.tuning.stopping import StoppingRule
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work
from tune_prune.tuning.worker import WorkerSettings

# --- the Ray of this process

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
WaitForLoss = Callable[[threading.Event], str]  # waits until Ray has lost a part, or that event; says which part


class RayLost(MachineError):
    """The Ray that a search was on has ended."""


@contextmanager
def connected(address: str | None, num_cpus: int | None = None) -> Iterator[None]:
    """A Ray to work with: one that is already up in this process, the cluster at `address`, or a local one: that which has begun to
    start, else one of `num_cpus` (None: all of this machine) that ends here.

    Leaves a Ray that was up before as it was. Raises UserError when the cluster at `address` cannot be joined, NotStarted when a
    local Ray does not start, RayLost where a Ray ends before its time, and ever after in this process.
    """
    # Ray Tune prints a traceback for each failed trial; the ledger has them.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    if _dead.is_set():
        raise RayLost(
            "the Ray of this Python process has died: restart Python; inline=True (--inline) does without Ray there"
        )
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        if address is None:
            local = stack.enter_context(local_ray.begun(num_cpus))
            stack.enter_context(_shut_down())
            with terminal.waiting("starting: Ray, whose workers run the trials ..."):
                local.wait_until_up()
                # Watched before it is joined: a Ray that dies now would be waited for for a minute.
                stack.enter_context(_watched(local.wait_for_loss))
                _join_local(local.address)
        else:
            stack.enter_context(_shut_down())
            with terminal.waiting("starting: joining the Ray cluster ..."):
                _join(address)
            stack.enter_context(_watched(partial(_silence_of, str(ray.get_runtime_context().gcs_address))))
        yield


def _join_local(address: str) -> None:
    try:
        with _own_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of Ray 2.55, about a switch that is set
            ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, RayError) as error:
        raise NotStarted(f"Ray did not answer ({last_line(error)}; {machine.load()}); {local_ray.INSTEAD}") from error


def _join(address: str) -> None:
    """Join the cluster at `address`. Raises UserError where this process cannot."""
    address_check.check(address)
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}}
    try:
        with _own_signals(), _silent():
            ray.init(address=address, runtime_env=environment, **QUIET)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise UserError(
            f"the Ray cluster at {address} cannot be joined ({last_line(error)}): this machine must be one of its nodes "
            "(`ray start --address=HOST:PORT`, with --num-cpus=0 to run no trials here); where the cluster asks for a token, "
            "set RAY_AUTH_MODE=token and copy ~/.ray/auth_token of its head; leave --address out to use this machine alone"
        ) from error
    if local_ray.RESOURCE in ray.cluster_resources():
        raise UserError(
            f"--address is {address}, which is the Ray of another search; start a cluster with `ray start --head`, or leave "
            "--address out to use this machine alone"
        )


@contextmanager
def _shut_down() -> Iterator[None]:
    """Within it this process has a Ray, which it leaves at the end."""
    try:
        yield
    except RayLost:
        raise  # A shutdown would wait for what is no more.
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray is started or joined within, and puts a handler of its own in the place of ours, which exits. Ours comes back, and hears
    what has come in the meantime."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, ours)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, ours)


@contextmanager
def _silent() -> Iterator[None]:
    """Show nothing of what is written to the standard error within: Ray's compiled part writes there itself what becomes a
    sentence here."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


# --- a Ray that dies

A_SIGNAL_S = 1.0  # in which a signal that has ended Ray reaches this process, too, and is the reason
ANSWER_S = 5.0
ASK_EVERY_S = 5.0
SILENCE_S = 40.0  # of a cluster's head; one that is started again answers sooner, and after 60 Ray aborts this process
_dead = threading.Event()  # set when the Ray of this process has died, which ray.is_initialized() does not tell


@contextmanager
def _watched(wait: WaitForLoss) -> Iterator[None]:
    """Where `wait`, which is called in a thread, says what has ended, whatever is under way within is interrupted: RayLost. Ray
    itself would wait, for ever or a minute, and then abort the process."""
    lost: list[str] = []
    over = threading.Event()

    def watch() -> None:
        what = wait(over)
        if not over.wait(A_SIGNAL_S):
            lost.append(f"Ray has ended: its {what} died ({machine.load()})")
            _thread.interrupt_main(ending.interrupt_signal() or signal.SIGINT)
            if not over.wait(ANSWER_S):  # Ray's client waits for what is no more, and hears no signal.
                ending.by_force(lost[0])

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if not lost:
            raise
        _dead.set()
        raise RayLost(lost[0]) from None
    finally:
        over.set()


def _silence_of(address: str, over: threading.Event) -> str:
    """Wait until no head of a cluster has answered at `address` for SILENCE_S, or nobody wants to know any more."""
    answered = time.monotonic()
    while time.monotonic() - answered < SILENCE_S and not over.wait(ASK_EVERY_S):
        try:
            address_check.check(address)
            answered = time.monotonic()
        except UserError:
            continue
    return f"head at {address}"


# --- what Ray runs in its workers

_MESSAGE = "message"  # Ray flattens dictionaries in a result, so a message travels whole, as one value.


class PruneTrainable(tune.Trainable):
    """Runs the trial or job that its config names, a stage at a step: `{"key": of a trial}` or `{"job": index}`, with
    "after_a_death" where a worker has died of it. The rest comes through `tune.with_parameters`. Ray reuses an actor for the next
    one, which finds model and data there."""

    def setup(  # type: ignore[override]  # with_parameters adds the last three
        self, config: dict[str, Any], specs: dict[str, TrialSpec], jobs: Sequence[PrepareJob], settings: WorkerSettings
    ) -> None:
        self._specs, self._jobs = specs, jobs
        self._runner = StageRunner(specs, settings)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._runner.begin(work_of(new_config, self._specs, self._jobs), new_config["after_a_death"])
        return True

    def step(self) -> dict[str, Any]:
        return to_result(self._runner.step())


def work_of(config: Mapping[str, Any], specs: Mapping[str, TrialSpec], jobs: Sequence[PrepareJob]) -> Work:
    """Return the work that the config of Ray's trial names."""
    return jobs[config["job"]] if "job" in config else specs[config["key"]]


def to_result(message: Message) -> dict[str, Any]:
    """Return the result of a Ray step."""
    return {_MESSAGE: message, "done": message.ended}


def message_in(result: Mapping[str, Any] | None) -> Message | None:
    """Return the message in a result; None where the result is one of Ray's own."""
    message = (result or {}).get(_MESSAGE)
    return message if isinstance(message, TrialMessage | JobMessage) else None


# --- a search


def run(
    queue: WorkQueue,
    specs: Mapping[str, TrialSpec],
    rule: StoppingRule,
    settings: WorkerSettings,
    observers: Observer,
) -> None:
    """Do everything that `queue` hands out, as much at once as the Ray of this process has room for. Work whose worker dies or
    raises is tried once more in a fresh process. Raises MachineError where no other trial could run either."""

    def work(trial: RayTrial) -> Work:
        return work_of(trial.config, specs, queue.jobs)

    def name(trial: RayTrial) -> str:
        one = work(trial)
        if isinstance(one, PrepareJob):
            return f"prepare-{one.run.label}-{one.name}"
        return f"{one.run.label}-{one.config.name}-{one.key[:6]}"

    folder = settings.experiment_dir
    state = folder / TUNE if isinstance(folder, Path) else temporary.make()
    trainable = tune.with_parameters(PruneTrainable, specs=dict(specs), jobs=queue.jobs, settings=settings)
    searcher = QueueSearcher(queue)
    tuner = tune.Tuner(
        tune.with_resources(trainable, settings.resources.to_ray()),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=-1,  # until the searcher has no more
            scheduler=RuleScheduler(rule),
            max_concurrent_trials=trial_slots(settings.resources, [node.resources for node in nodes.alive()]),
            reuse_actors=True,
            trial_name_creator=name,
            trial_dirname_creator=lambda trial: f"{name(trial)}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=f"{datetime.now():%Y%m%d-%H%M%S}-{settings.search_id}",
            storage_path=str(state),
            callbacks=[_ObserverCallback(searcher, observers, settings, rule, work)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            stop=_StopAtFailure(queue),
            verbose=0,
        ),
    )
    _leave_trackers_out()
    try:
        tuner.fit()
    finally:
        if not isinstance(folder, Path):  # Tune appends to its files, which an object storage does not let it do.
            temporary.remove(state)


def _leave_trackers_out() -> None:
    """Have Ray Tune not import mlflow and wandb, which it does for its statistics of callbacks wherever they are installed: seconds
    of each start, and folders of wandb that stay where its process is killed. So they are not there when Ray's modules look."""
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
    """The queue as Ray asks it, and what is tried once more, which comes first."""

    def __init__(self, queue: WorkQueue) -> None:
        super().__init__(metric="acc_mean", mode="max")
        self.queue = queue
        self._given: dict[str, Work] = {}  # by Ray's trial id
        self._again: list[tuple[Work, bool]] = []  # and whether a worker has died of it
        self._tried_again: set[Work] = set()

    def suggest(self, trial_id: str) -> Any:
        """Return what names the next job or trial; None where what is left waits for a job or might be tried again."""
        after_a_death = False
        work: Work | None
        if self._again:
            work, after_a_death = self._again.pop(0)
        else:
            work = self.queue.next()
        if work is None:
            return Searcher.FINISHED if self.queue.empty and not self._given else None
        self._given[trial_id] = work
        named = {"job": self.queue.jobs.index(work)} if isinstance(work, PrepareJob) else {"key": work.key}
        return named | {"after_a_death": after_a_death}

    def try_again(self, work: Work, error: BaseException) -> bool:
        """Whether `work`, which has ended by `error`, is tried once more: not a trial that would hang as long again."""
        if work in self._tried_again or (isinstance(error, Hung) and isinstance(work, TrialSpec)):
            return False
        self._tried_again.add(work)
        self._again.append((work, isinstance(error, LostWorker | OutOfMemory)))
        return True

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        work = self._given.pop(trial_id, None)  # A death between two trials is told twice.
        if work is not None and not error:  # Else the callback ends it, which is called next and knows why.
            self.queue.end(work, message_in(result))

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


class _StopAtFailure(Stopper):
    """Ends the search when a job of the queue has failed: its trials cannot run, and the others' comparison would lack them."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._queue.failed


class Deadline:
    """Kills the worker of each of Ray's trials that takes longer than `limit_s` seconds (None: no limit), and each that was given a
    next trial and is not ready NEXT_S later.

    The driver keeps these limits, as a worker that is stopped, or hangs in a kernel, cannot keep one itself. Ray has none of its
    own, and waits for ever.
    """

    NEXT_S = 600.0

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._begun: dict[RayTrial, float] = {}
        self._waiting: dict[RayTrial, float] = {}
        self._used: set[Any] = set()  # the workers that have begun a trial
        self.ended: set[RayTrial] = set()  # the trials that took too long

    def begin(self, trial: RayTrial) -> None:
        self._begun[trial] = self._clock()
        self._used.add(trial.temporary_state.ray_actor)

    def done(self, trial: RayTrial) -> None:
        self._begun.pop(trial, None)

    def check(self, trials: Sequence[RayTrial]) -> None:
        """Kill the workers that are late; `trials`: all that Ray has."""
        now = self._clock()
        for trial, since in list(self._begun.items()):
            if self.limit_s is not None and now - since >= self.limit_s:
                self.ended.add(trial)
                self.done(trial)
                self._kill(trial)
        # A trial is pending while a worker, which has another one behind it, is to take it.
        pending = (trial for trial in trials if trial.status == RayTrial.PENDING)
        waiting = [trial for trial in pending if trial.temporary_state.ray_actor in self._used]
        self._waiting = {trial: self._waiting.get(trial, now) for trial in waiting}
        for trial, since in list(self._waiting.items()):
            if now - since >= self.NEXT_S:
                self._kill(trial)

    def _kill(self, trial: RayTrial) -> None:
        actor = trial.temporary_state.ray_actor
        if actor is not None:
            ray.kill(actor)


class _ObserverCallback(Callback):
    """The observers as Ray calls them; and the time limit, which it is asked for as often.

    Ray takes what a callback raises for a failure of the trial, or wraps it; only what the end of a step raises ends the search.
    """

    def __init__(
        self,
        searcher: QueueSearcher,
        observers: Observer,
        settings: WorkerSettings,
        rule: StoppingRule,
        work_of_trial: Callable[[RayTrial], Work],
    ) -> None:
        self._searcher = searcher
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
        self._deadline.check(trials)
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
        error: BaseException
        if trial in self._deadline.ended:
            error = Hung(
                f"stopped by the time limit of {self._settings.trial_timeout_s:g} s per trial (--trial-timeout)"
            )
        else:
            error = cause(trial.get_pickled_error())
        if isinstance(error, MachineError) and not isinstance(error, Hung | LostWorker):
            raise error  # no trial's failure
        if not self._searcher.try_again(work, error):
            last = message_in(trial.last_result)
            end_by_error(self._searcher.queue, self._observers, self._settings, work, last, error)


def cause(error: BaseException | None) -> BaseException:
    """Return what has ended a trial, in our terms, from Ray's `error`."""
    if isinstance(error, RayTaskError):  # Its worker has raised, and lives.
        return error.cause or error
    said = last_line(error or RuntimeError("unknown cause")).split(" Some common causes")[0]
    # No class of error tells a worker that Ray's memory monitor has ended from other deaths.
    return OutOfMemory(said) if "address the out of memory issue" in str(error) else LostWorker(said)
