"""One function call on a worker of the cluster that this process is connected to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from tune_prune.core.errors import UserError
from tune_prune.tuning.ray_cluster.resources import TrialResources

WAIT_S = 60.0  # a first worker has to import torch; a busy cluster may not have one free at all


def call(function: Callable[[Any], Any], argument: Any, resources: TrialResources) -> Any:
    """`function(argument)` on a worker with a trial's resources; None where none is free in time. Raises what it raises, and
    UserError where its worker dies."""
    task = ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=0)(function).remote(argument)
    try:
        return ray.get(task, timeout=WAIT_S)
    except GetTimeoutError:
        ray.cancel(task)
        return None
    except RayTaskError:
        raise
    except RayError as error:
        raise UserError(
            f"a worker of the cluster died ({str(error).strip().splitlines()[0]}); see `ray status`, then try again"
        ) from error
