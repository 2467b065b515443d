"""A local Ray in a process of its own: `python -m tune_prune.tuning.ray_cluster.head NUM_CPUS FOLDER`, for local.py.

Says on its output, in a line of JSON, where Ray listens or why it does not start; in another one, which of its processes has died.
Ends Ray and itself when its input is closed, at any time, whatever has ended the search; then FOLDER and what workers have left in
the temporary directory goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tune_prune.core import machine, temporary
from tune_prune.core.errors import MachineError, UserError
from tune_prune.tuning.ray_cluster.local import INSTEAD

ATTEMPTS = 2
LOCAL_OBJECT_STORE_BYTES = 256 * 2**20  # only records travel; weights are read from disk by each worker
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
MOST_PRESTARTED = 8  # workers that import torch before anything is asked of them
LOOK_EVERY_S = 0.5
GONE_S = 5.0  # for processes that were killed


def main() -> None:
    folder = Path(sys.argv[2])
    temporary.hold(folder)
    _keep_orphans()
    threading.Thread(target=_end_with_the_search, args=[folder], daemon=True).start()
    try:
        said = {"address": start(int(sys.argv[1]), folder)}
    except UserError as error:
        said = {"user_error": str(error)}
    except MachineError as error:
        said = {"machine_error": str(error)}
    # Slurm sends it to every process of a job. The search ends Ray when it has said what it has to say.
    signal.signal(signal.SIGTERM, lambda *_: None)
    print(json.dumps(said), flush=True)
    if "address" in said:
        print(json.dumps({"lost": _first_to_die()}), flush=True)
    threading.Event().wait()


def start(num_cpus: int, folder: Path) -> str:
    """Start a local Ray with its files in `folder`, tried twice; its address. Raises UserError and MachineError."""
    import ray  # takes a while

    # Ray opens its own folder to everybody, at several moments; the one around it is this user's alone.
    where = str(folder / "r")
    options = QUIET | {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": where}
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
                    f"Ray cannot start with its files in {folder.parent} ({error}); set RAY_TMPDIR to a short writable path, "
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


def _first_to_die() -> str:
    """Waits until one of Ray's processes has died, and says which."""
    from ray._private import worker

    node: Any = worker._global_node
    while not (dead := node.dead_processes()):
        time.sleep(LOOK_EVERY_S)
    return {"gcs_server": "control store (GCS)"}.get(dead[0][0], dead[0][0])


def _keep_orphans() -> None:
    """Have processes whose parent ends become children of this one, so that none is missed at the end."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def _end_with_the_search(folder: Path) -> None:
    """Wait for the end of the input; then end all processes and this one, wherever it is."""
    sys.stdin.read()
    # Ray's threads here print a traceback when the processes they talk to are no more; the terminal is the search's.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    this = psutil.Process()
    _each(psutil.Process.suspend, this.children())  # so that they start no others while those that there are are found
    ended = this.children(recursive=True)
    _each(psutil.Process.kill, ended)
    psutil.wait_procs(ended, timeout=GONE_S)
    temporary.remove(folder)
    temporary.sweep()  # what workers had made
    os._exit(0)


def _each(act: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            act(process)


if __name__ == "__main__":
    main()
