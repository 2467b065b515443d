"""A local Ray in a process of its own: `python -m tune_prune.tuning.ray_cluster.head NUM_CPUS`, for local.py.

Says on its output, in a line of JSON, where Ray listens or why it does not start. Ends Ray and itself when its input is
closed, at any time; where nothing was written there, no search has come and Ray's folder goes, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tune_prune.core.errors import MachineError, UserError
from tune_prune.cost_model import machine
from tune_prune.tuning.ray_cluster.local import INSTEAD

ATTEMPTS = 2
LOCAL_OBJECT_STORE_BYTES = 256 * 2**20  # only records travel; weights are read from disk by each worker
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
MOST_PRESTARTED = 8  # workers that import torch before anything is asked of them


def main() -> None:
    end = threading.Thread(target=_end_with_the_search, daemon=True)
    end.start()
    try:
        said = {"address": start(int(sys.argv[1]))}
    except UserError as error:
        said = {"user_error": str(error)}
    except MachineError as error:
        said = {"machine_error": str(error)}
    print(json.dumps(said), flush=True)
    end.join()


def start(num_cpus: int) -> str:
    """Start a local Ray, tried twice; its address. Raises UserError and MachineError."""
    import ray  # takes a while

    options = QUIET | {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    options |= {"object_store_memory": LOCAL_OBJECT_STORE_BYTES}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with for_this_process():
                _prestart(num_cpus)
                ray.init(**options)
            break
        except Exception as error:  # of no narrower type where Ray's processes come too late
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                # Most often a socket path beyond 107 bytes.
                raise UserError(
                    f"Ray cannot start with its files in {_temporary()} ({error}); set RAY_TMPDIR to a short writable path, "
                    "e.g. /tmp/r"
                ) from error
            ray.shutdown()
            if attempt == ATTEMPTS:
                raise MachineError(
                    f"Ray did not start in {ATTEMPTS} attempts ({str(error).partition('.')[0]}; {machine.load()}); {INSTEAD}"
                ) from error
    address: str = ray.get_runtime_context().gcs_address
    return address


def _prestart(num_cpus: int) -> None:
    """Have workers import what trials need as they start, and one for each CPU start with Ray.

    Not on GPUs: a worker must be told which one is its own before anything asks for them, as an import may.
    """
    from ray._private.accelerators import get_accelerator_manager_for_resource

    gpus = get_accelerator_manager_for_resource("GPU")
    if gpus is None or not gpus.get_current_node_num_accelerators():
        os.environ.setdefault("RAY_preload_python_modules", "tune_prune.tuning.ray_cluster.trainable")
    os.environ.setdefault("RAY_prestart_worker_first_driver", str(num_cpus <= MOST_PRESTARTED).lower())


@contextmanager
def for_this_process() -> Iterator[None]:
    """A Ray that is started or joined within serves one search alone. Ray has no options for that, so parts of it are replaced:

    It listens on 127.0.0.1 only; else it takes the machine's outward address, also in place of a loopback one. Ray has this
    switch for macOS and Windows, from the environment as it is imported: too early for a process that may join a cluster.
    It starts no autoscaler, no dashboard process, which it waits for even where no dashboard is wanted, and nothing that
    follows the logs, which nobody reads. Together they are a good third of the CPU time of its start.
    """
    from ray._private import ray_constants
    from ray._private.node import Node

    unneeded = ("start_monitor", "start_api_server", "start_log_monitor")
    replaced: list[tuple[Any, str, Any]] = [(ray_constants, "ENABLE_RAY_CLUSTER", False)]
    replaced += [(Node, name, lambda self, **options: None) for name in unneeded]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _temporary() -> str:
    return os.environ.get("RAY_TMPDIR", tempfile.gettempdir())


def _end_with_the_search() -> None:
    """Wait for the end of the input; then end all processes and this one, wherever it is."""
    joined = sys.stdin.read()
    this = psutil.Process()
    _each(psutil.Process.suspend, this.children())  # so that they start no others while those that there are are found
    _each(psutil.Process.kill, this.children(recursive=True))
    if not joined:
        folder = Path(_temporary(), "ray")
        for session in folder.glob(f"session_*_{os.getpid()}"):
            shutil.rmtree(session, ignore_errors=True)  # a process that is ending may still write to it
        if not (latest := folder / "session_latest").exists():
            latest.unlink(missing_ok=True)  # a link to what is no more
    os._exit(0)


def _each(act: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            act(process)


if __name__ == "__main__":
    main()
