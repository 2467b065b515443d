"""The time limit that the driver keeps, with a clock that the test turns and a process that is really stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.tune.experiment import Trial as RayTrial

from tune_prune.tuning.ray_cluster import deadline
from tune_prune.tuning.ray_cluster.deadline import Deadline


class StandIn:
    """For one of Ray's trials, whose actor is that process."""

    trial_id = "0"
    status = RayTrial.RUNNING

    def __init__(self, pid: int) -> None:
        self.temporary_state = SimpleNamespace(
            ray_actor=SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: str(pid)))
        )


@pytest.fixture
def starting() -> dict[str, dict[str, Any]]:
    """The actors that Ray has begun to start, by their ids."""
    return {}


@pytest.fixture
def stopped(starting: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process that is stopped, which Ray takes for an actor of this node."""
    about = {"State": "ALIVE", "Address": {"NodeID": "here"}}

    def actors(actor_id: str | None = None, job_id: ray.JobID | None = None, actor_state_name: str = "") -> Any:
        if actor_id is not None:
            return {**about, "Pid": int(actor_id)}
        assert (job_id, actor_state_name) == (ray.JobID.from_int(7), "PENDING_CREATION")
        return starting

    context = SimpleNamespace(get_node_id=lambda: "here", get_job_id=lambda: ray.JobID.from_int(7).hex())
    monkeypatch.setattr(deadline, "actors", actors)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.communicate()


def test_a_worker_that_is_late_is_ended_also_when_it_is_stopped(stopped):
    now = 0.0
    limit, trial = Deadline(10, clock=lambda: now), StandIn(stopped.pid)
    limit.begin(trial)
    now = 9.9
    assert limit.check() == [] and stopped.poll() is None
    now = 10.0
    assert limit.check() == [trial] and limit.ended == {trial}
    assert stopped.wait(timeout=10) == -signal.SIGKILL
    assert limit.check() == []
    limit.begin(trial)  # it is tried once more, and has ended by itself before it is late
    now = 20.0
    assert limit.check() == [trial]
    limit.begin(trial)
    limit.done(trial)
    now = 99.0
    assert limit.check() == [] and limit.ended == set()


def test_without_a_limit_nothing_is_late(stopped):
    limit, trial = Deadline(None, clock=lambda: 1e9), StandIn(stopped.pid)
    limit.begin(trial)
    assert limit.check() == [] and stopped.poll() is None


def test_a_worker_that_is_stopped_while_it_starts_is_ended(stopped, starting):
    """With or without a time limit per trial; what waits for resources has no process, and waits on."""
    now = 0.0
    limit = Deadline(None, clock=lambda: now)
    about = {"State": "PENDING_CREATION", "Address": {"NodeID": "here"}}
    starting |= {"late": {**about, "Pid": stopped.pid}, "waits": {**about, "Pid": 0}}
    for moment in (100.0, 400.0, 100.0 + deadline.START_S - 0.1):
        now = moment
        assert limit.check() == []
    assert stopped.poll() is None
    now += deadline.LOOK_EVERY_S
    assert limit.check() == []  # no trial has begun there
    assert stopped.wait(timeout=10) == -signal.SIGKILL
    starting.clear()
    now = 1e6
    assert limit.check() == []


@pytest.mark.parametrize("ready", [True, False])
def test_a_worker_that_is_stopped_between_trials_is_ended(stopped, ready):
    """Ray's trial is pending while the worker, which has one behind it, is to take it; also without a time limit per trial."""
    now = 0.0
    limit, trial = Deadline(None, clock=lambda: now), StandIn(stopped.pid)
    trial.status = RayTrial.PENDING
    for moment in (100.0, 400.0, 100.0 + deadline.START_S - 0.1):
        now = moment
        assert limit.check([trial]) == []
    assert stopped.poll() is None
    if ready:
        trial.status = RayTrial.RUNNING
    now += deadline.LOOK_EVERY_S
    assert limit.check([trial]) == []
    if ready:
        assert stopped.poll() is None
    else:
        assert stopped.wait(timeout=10) == -signal.SIGKILL


def test_a_late_worker_is_ended_until_it_is_dead(stopped, monkeypatch):
    """As where its node did not answer when it was first to be ended."""
    now, state, ends = 0.0, "ALIVE", 0

    def not_yet(actor: dict[str, Any]) -> None:
        nonlocal ends
        ends += 1

    monkeypatch.setattr(deadline, "_end_process", not_yet)
    monkeypatch.setattr(
        deadline, "actors", lambda actor_id=None, **_: {"State": state, "Pid": 1} if actor_id is not None else {}
    )
    limit, trial = Deadline(10, clock=lambda: now), StandIn(stopped.pid)
    limit.begin(trial)
    now = 10.0
    assert limit.check() == [trial] and ends == 1
    limit.done(trial)  # whatever Ray thinks of the trial
    for number in (2, 3):
        now += deadline.LOOK_EVERY_S
        assert limit.check() == [] and ends == number
    state = "DEAD"
    for _ in range(2):
        now += deadline.LOOK_EVERY_S
        assert limit.check() == [] and ends == 3
