"""The time limits of trials, preparation jobs and starting workers, kept by the driver: a worker that is stopped, or hangs in a
kernel, cannot keep one itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray._private.state import actors
from ray.tune.experiment import Trial as RayTrial
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

START_S = 600.0  # of a worker, which imports torch and transformers, perhaps from a slow shared folder
LOOK_EVERY_S = 10.0


class Deadline:
    """Ends the worker of each of Ray's trials that takes longer than `limit_s` seconds (None: no limit), and each that has a
    process and is not ready START_S later.

    Ray has no limit of its own, and asks a worker to end itself, which one that is stopped does not. So its process is killed, on
    its node. Ray sees it die, and tries again as often as `max_failures` of the trial says.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._due: dict[RayTrial, float] = {}
        self.ended: set[RayTrial] = set()
        self._starting: dict[str, float] = {}  # actors that have a process, and when they were first seen
        self._looked = clock()

    def begin(self, trial: RayTrial) -> None:
        self.ended.discard(trial)
        if self.limit_s is not None:
            self._due[trial] = self._clock() + self.limit_s

    def done(self, trial: RayTrial) -> None:
        self._due.pop(trial, None)

    def check(self) -> list[RayTrial]:
        """End those that are late, and say which trials are."""
        now = self._clock()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._check_starts(now)
        late = [trial for trial, due in self._due.items() if due <= now]
        for trial in late:
            del self._due[trial]
            actor = trial.temporary_state.ray_actor
            if actor is not None:
                self.ended.add(trial)
                known = actors(actor._actor_id.hex())
                if known.get("State") == "ALIVE":
                    _end_process(known)
        return late

    def _check_starts(self, now: float) -> None:
        """Ray waits for an actor's start for ever. One without a process waits for resources, which may take any time."""
        own = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        pending = actors(job_id=own, actor_state_name="PENDING_CREATION")
        self._starting = {key: self._starting.get(key, now) for key, actor in pending.items() if actor["Pid"]}
        for key, since in self._starting.items():
            if now - since >= START_S:
                _end_process(pending[key])


def _end_process(actor: dict[str, Any]) -> None:
    node, pid = actor["Address"]["NodeID"], actor["Pid"]
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
    else:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=there).remote(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
        psutil.Process(pid).kill()
