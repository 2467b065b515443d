"""The time limit of trials and preparation jobs, kept by the driver: a worker that is stopped, or hangs in a kernel, cannot keep
one itself."""

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


class Deadline:
    """Ends the worker of each of Ray's trials that takes longer than `limit_s` seconds; None: no limit.

    Ray has no limit of its own, and asks a worker to end itself, which one that is stopped does not. So its process is killed, on
    its node. Ray sees it die, and tries again as often as `max_failures` of the trial says.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._due: dict[RayTrial, float] = {}
        self.ended: set[RayTrial] = set()

    def begin(self, trial: RayTrial) -> None:
        self.ended.discard(trial)
        if self.limit_s is not None:
            self._due[trial] = self._clock() + self.limit_s

    def done(self, trial: RayTrial) -> None:
        self._due.pop(trial, None)

    def check(self) -> list[RayTrial]:
        """End those that are late, and say which."""
        now = self._clock()
        late = [trial for trial, due in self._due.items() if due <= now]
        for trial in late:
            del self._due[trial]
            actor = trial.temporary_state.ray_actor
            if actor is not None:
                self.ended.add(trial)
                _end_process(actors(actor._actor_id.hex()))
        return late


def _end_process(actor: dict[str, Any]) -> None:
    if actor.get("State") != "ALIVE":
        return
    node, pid = actor["Address"]["NodeID"], actor["Pid"]
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
    else:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=there).remote(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
        psutil.Process(pid).kill()
