"""What has ended a trial or a Ray, in our terms: Ray's errors as it gives them, without a Ray."""

from __future__ import annotations

import mmap
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError

from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import MachineError, UserError
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.ray_cluster import loss, tuner
from tune_prune.tuning.ray_cluster.trainable import AFTER_A_DEATH
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.stopping import StoppingRule
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work
from tune_prune.tuning.worker import WorkerSettings

RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(), 0, "float32")
SPEC = TrialSpec(RUN, PruningConfig("random", 16, 8), "0123456789abcdef")
OF_THE_MONITOR = (
    "Task was killed due to the node running low on memory.\n"
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io."
)


def of_a_worker(cause: Exception) -> RayTaskError:
    return RayTaskError("step", "Traceback ...", cause)


class Told(Observer):
    def __init__(self) -> None:
        self.errors: list[tuple[Work, Message | None, BaseException]] = []

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self.errors.append((work, last, error))


class TrialOfRay:
    def __init__(self) -> None:
        self.pickled_error_file: str | None = None
        self.last_result: dict[str, Any] = {}
        self.config: dict[str, Any] = {}


class Ended:
    """A trial of Ray's that `error` has ended, and the callback that hears of it."""

    def __init__(self, error: Exception | None, folder: Path, work: Work = SPEC) -> None:
        self.trial = TrialOfRay()
        if error is not None:
            self.trial.pickled_error_file = str(folder / "error.pkl")
            (folder / "error.pkl").write_bytes(cloudpickle.dumps(error))
        self.told = Told()
        self.settings = WorkerSettings(
            experiment_dir=folder, artifact_dir=folder, resources=TrialResources(), trial_timeout_s=7.5
        )
        queue, rule = WorkQueue([], [SPEC]), StoppingRule()
        self.callback = tuner._ObserverCallback(queue, self.told, self.settings, rule, lambda trial: work)


@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        (OutOfMemoryError(OF_THE_MONITOR), "out_of_memory", "Refer to the documentation on how to address"),
        (
            NodeDiedError("The node died. Some common causes include: ..."),
            "lost_worker",
            "perhaps out of memory: The",
        ),
        (of_a_worker(ValueError("no such kernel")), "error", "no such kernel"),
        (of_a_worker(UserError("there is no such text")), "user_error", "there is no such text"),
        (None, "lost_worker", "unknown cause"),
    ],
)
def test_what_has_ended_a_trial_is_in_its_record(
    error: Exception | None, failure: str, reason: str, tmp_path: Path
) -> None:
    ended = Ended(error, tmp_path)
    ended.callback.on_trial_error(0, [], ended.trial)
    ended.callback.on_step_end(0, [])  # where what a callback raised would be raised
    ((work, last, _),) = ended.told.errors
    assert work == SPEC and isinstance(last, TrialMessage) and last.record is not None
    assert (last.record.status, last.record.failure) == ("failed", failure)
    assert reason in last.record.reason and "common causes" not in last.record.reason
    assert ended.settings.ledger.read(SPEC.key) == last.record


def test_a_trial_that_the_time_limit_has_ended_is_hung_whatever_ray_says(tmp_path: Path) -> None:
    ended = Ended(NodeDiedError("The node died."), tmp_path)
    ended.callback._deadline.ended.add(ended.trial)
    ended.callback.on_trial_recover(0, [], ended.trial)
    assert ended.trial.config == {}  # it is not said to be out of memory
    ended.callback._deadline.ended.add(ended.trial)
    ended.callback._on_error(ended.trial, SPEC)
    ((_, last, _),) = ended.told.errors
    assert isinstance(last, TrialMessage) and last.record is not None
    assert last.record.failure == "hung" and "time limit of 7.5 s per trial (--trial-timeout)" in last.record.reason


@pytest.mark.parametrize(
    ("error", "leanly"),
    [
        (OutOfMemoryError(OF_THE_MONITOR), True),
        (NodeDiedError("The node died."), True),
        (of_a_worker(ValueError("x")), False),
    ],
)
def test_only_after_a_death_a_trial_is_tried_in_the_leanest_way(error: Exception, leanly: bool, tmp_path: Path) -> None:
    ended = Ended(error, tmp_path)
    ended.callback.on_trial_recover(0, [], ended.trial)
    assert ended.trial.config.get(AFTER_A_DEATH, False) == leanly


def test_a_full_disk_ends_the_search_and_is_no_trials_failure(tmp_path: Path) -> None:
    ended = Ended(of_a_worker(MachineError("the disk is full")), tmp_path)
    ended.callback.on_trial_error(0, [], ended.trial)
    with pytest.raises(MachineError, match="the disk is full"):
        ended.callback.on_step_end(0, [])
    assert ended.told.errors == [] and ended.settings.ledger.read(SPEC.key) is None


def test_a_job_that_dies_has_no_record(tmp_path: Path) -> None:
    job = PrepareJob(RUN)
    ended = Ended(NodeDiedError("The node died."), tmp_path, job)
    ended.callback.on_trial_error(0, [], ended.trial)
    ((work, last, error),) = ended.told.errors
    assert (work, str(error)) == (job, "The node died.") and ended.settings.ledger.records() == []
    assert last == JobMessage(given_up="given up (The node died.)")


def test_the_text_of_ray_s_memory_monitor_is_that_of_this_ray() -> None:
    """No class tells it from other deaths of an actor."""
    path = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(b"address the out of memory issue") > 0


def test_a_head_is_lost_when_it_was_silent_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is started again in time is not."""
    now, silent = 0.0, [(10, 45), (60, 1000)]  # from, to

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            now += timeout or 0.0
            return False

    def check(address: str) -> None:
        assert address == "head:6379"
        if any(begin < now <= end for begin, end in silent):
            raise UserError("no answer")

    monkeypatch.setattr(loss, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(loss, "address_check", SimpleNamespace(check=check))
    assert loss.silence_of("head:6379", Over()) == "head at head:6379"
    assert now == 60 + loss.SILENCE_S


def test_no_thread_asks_for_a_head_whose_search_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "ASK_EVERY_S", 60.0)
    before = set(threading.enumerate())
    with loss.watched(partial(loss.silence_of, "head:6379")):
        (watch,) = set(threading.enumerate()) - before
    watch.join(10)
    assert not watch.is_alive()
