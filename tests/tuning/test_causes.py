"""What has ended a trial, in our terms: Ray's errors as it gives them, without a Ray."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError

from tune_prune.core.errors import UserError
from tune_prune.trial.failures import failure_of
from tune_prune.tuning.ray import cause

OF_THE_MONITOR = (
    "Task was killed due to the node running low on memory.\n"
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io."
)


def of_a_worker(error: Exception) -> RayTaskError:
    return RayTaskError("step", "Traceback ...", error)


@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        (OutOfMemoryError(OF_THE_MONITOR), "out_of_memory", "Refer to the documentation on how to address"),
        (NodeDiedError("The node died. Some common causes include: ..."), "lost_worker", "The node died."),
        (of_a_worker(ValueError("no such kernel")), "error", "no such kernel"),
        (of_a_worker(UserError("there is no such text")), "user_error", "there is no such text"),
        (None, "lost_worker", "unknown cause"),
    ],
)
def test_an_error_of_ray_is_a_class_of_failure_and_a_reason(error: Exception | None, failure: str, reason: str) -> None:
    ended_by = cause(error)
    assert failure_of(ended_by) == failure
    assert reason in str(ended_by) and "common causes" not in str(ended_by)


def test_the_text_of_ray_s_memory_monitor_is_that_of_this_ray() -> None:
    """No class tells it from other deaths of an actor."""
    path = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(b"address the out of memory issue") > 0
