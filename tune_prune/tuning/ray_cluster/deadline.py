"""The time limits of trials, preparation jobs and starting workers, kept by the driver: a worker that is stopped, or hangs in a
kernel, cannot keep one itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
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
    process and is not ready START_S later: for its first trial, as it starts, or for a next one that it was given.

    Ray has no limit of its own, and asks a worker to end itself, which one that is stopped does not. So its process is killed, on
    its node, again and again until Ray says that it is dead, and tries again as often as `max_failures` of the trial says.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._due: dict[RayTrial, float] = {}
        self.ended: set[RayTrial] = set()
        self._late: set[str] = set()  # actors of those that are not dead yet
        self._starting: dict[str, float] = {}  # what has a process and is not ready, and when that was first seen
        self._looked = clock()

    def begin(self, trial: RayTrial) -> None:
        self.ended.discard(trial)
        if self.limit_s is not None:
            self._due[trial] = self._clock() + self.limit_s

    def done(self, trial: RayTrial) -> None:
        self._due.pop(trial, None)

    def check(self, trials: Iterable[RayTrial] = ()) -> list[RayTrial]:
        """End those that are late, and say which trials are. `trials`: all that Ray has."""
        now = self._clock()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._check_starts(now, trials)
            self._end_late()
        late = [trial for trial, due in self._due.items() if due <= now]
        for trial in late:
            del self._due[trial]
            actor = trial.temporary_state.ray_actor
            if actor is not None:
                self.ended.add(trial)
                self._late.add(actor._actor_id.hex())
        if late:
            self._end_late()
        return late

    def _end_late(self) -> None:
        for actor in list(self._late):
            known = actors(actor)
            if known.get("State") == "ALIVE":
                _end_process(known)
            else:
                self._late.remove(actor)

    def _check_starts(self, now: float, trials: Iterable[RayTrial]) -> None:
        """Ray waits for ever for an actor's start, and for its answer where it is given a next trial, pending until then. One
        without a process waits for resources, which may take any time."""
        own = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
        pending = actors(job_id=own, actor_state_name="PENDING_CREATION")
        waiting = {key: about for key, about in pending.items() if about["Pid"]}
        for trial in trials:
            actor = trial.temporary_state.ray_actor
            if trial.status == RayTrial.PENDING and actor is not None:
                about = actors(actor._actor_id.hex())
                if about.get("State") == "ALIVE":
                    waiting[f"{actor._actor_id.hex()} {trial.trial_id}"] = about
        self._starting = {key: self._starting.get(key, now) for key in waiting}
        for key, since in self._starting.items():
            if now - since >= START_S:
                _end_process(waiting[key])


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
