"""The Ray a search runs on: started here and ended here, or joined; checked before anything expensive starts."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray._private.utils import read_ray_address
from ray._raylet import Config  # type: ignore[attr-defined]  # compiled
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tune_prune.core.errors import MachineError, UserError
from tune_prune.core.store import Location, open_store
from tune_prune.cost_model import machine
from tune_prune.tuning.ray_cluster import address as address_check
from tune_prune.tuning.ray_cluster.head import QUIET, for_this_process
from tune_prune.tuning.ray_cluster.local import INSTEAD, LocalRay

PROBE_TIMEOUT_S = 120.0  # a node's first worker has to import torch


@contextmanager
def connected(address: str | None, num_cpus: int | None = None, local: LocalRay | None = None) -> Iterator[None]:
    """A Ray to work with: one that is already up in this process, the cluster at `address`, or a local one: `local`, else one of
    `num_cpus` that ends here.

    Leaves a Ray that was up before as it was. Raises UserError when nothing answers at `address`, MachineError when a local
    Ray does not start, tried twice.
    """
    logging.getLogger("ray.tune").setLevel(
        logging.CRITICAL
    )  # it prints a traceback per failed trial; the ledger has them
    if ray.is_initialized():
        yield
        return
    with ExitStack() as stack:
        if address is not None:
            _join(address)
        else:
            _join_local(local or stack.enter_context(LocalRay(num_cpus)))
        stack.callback(ray.shutdown)
        yield


def _join_local(local: LocalRay) -> None:
    """Join a Ray that starts or is up in a process of its own."""
    address = local.address()
    Config.initialize("")  # RAY_AUTH_MODE, where ray was imported before it was set
    try:
        with for_this_process():
            ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError) as error:
        raise MachineError(f"Ray did not answer ({str(error).splitlines()[0]}; {machine.load()}); {INSTEAD}") from error
    local.keep_logs()


def _announced() -> str:
    """What "auto" stands for: RAY_ADDRESS, else the address of the last `ray start` on this machine. Without either Ray would go on
    to join whatever Ray runs here, such as another search's own, and wait for minutes for one that is ending."""
    address = os.environ.get("RAY_ADDRESS") or read_ray_address()
    if not address:
        raise UserError(
            "--address is auto, but no Ray cluster was started on this machine; start one with `ray start --head`, name its "
            "HOST:PORT, or leave --address out to use this machine alone"
        )
    return address


def _join(address: str) -> None:
    """Join the cluster at `address`. Raises UserError where none answers."""
    address = _announced() if address == "auto" else address
    address_check.check(address)
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}}
    try:
        ray.init(address=address, runtime_env=environment, **QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}): start one with `ray start --head`, correct "
            "--address, or leave it out to use this machine alone"
        ) from error


def node_resources() -> list[dict[str, float]]:
    """Total CPU and GPU of every node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def check_shared_storage(experiment_dir: Location) -> None:
    """Have every other node put a file into the experiment and read one of this process.

    Raises UserError naming the first node that does not see them, or cannot run this program at all.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    if not nodes:
        return
    token = uuid.uuid4().hex
    store, question = open_store(experiment_dir), f".storage-check-{token}"
    store.put(question, token)
    answers = {node["NodeID"]: f"{question}-{node['NodeID']}" for node in nodes}
    try:
        probes = [
            _probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                experiment_dir, question, answers[node["NodeID"]], token
            )
            for node in nodes
        ]
        for node, problem in _answers(nodes, probes):
            if problem is None and not store.has(answers[node["NodeID"]]):
                problem = "what it wrote is not seen here"
            if problem is not None:
                raise UserError(
                    f"{_name(node)} does not share {experiment_dir} ({problem}): set --storage-path to a folder that every node "
                    "mounts, or a bucket that every node may use"
                )
    finally:
        for name in (question, *answers.values()):
            store.remove(name)


def gpus() -> list[machine.Gpu]:
    """A GPU of every node of the cluster that has any, as the node tells.

    Raises UserError for a node whose GPUs torch cannot use.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) > 0]
    asked = [
        _gpus.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in nodes
    ]
    found = []
    for node, seen in _answers(nodes, asked):
        if not seen:
            raise UserError(
                f"{_name(node)} offers GPUs but its torch sees none: install a torch build for them there, or use "
                "--gpus-per-trial 0"
            )
        found += seen
    return found


def _answers(nodes: list[dict[str, Any]], probes: list[Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each node with what its probe returned. Raises UserError naming the first node whose probe does not answer in time, or
    cannot run."""
    for node, probe in zip(nodes, probes, strict=True):
        try:
            answer = ray.get(probe, timeout=PROBE_TIMEOUT_S)
        except GetTimeoutError:
            raise UserError(
                f"{_name(node)} did not answer within {PROBE_TIMEOUT_S:g} s: see `ray status`, then try again"
            ) from None
        except RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise UserError(f"{_name(node)} cannot run tune_prune ({last}): install the same version there") from error
        yield node, answer


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


@ray.remote(num_cpus=0)
def _probe(experiment_dir: Location, question: str, answer: str, token: str) -> str | None:
    """None, or what does not work on this node. Nothing is created but the answer."""
    try:
        store = open_store(experiment_dir)
        if store.get(question) != token.encode():
            return f"{store.path(question)} reads differently"
        store.put(answer, token)
    except (OSError, UserError) as error:
        return f"{type(error).__name__}: {getattr(error, 'strerror', error)}"
    return None


@ray.remote(num_cpus=0, num_gpus=0.01)  # Ray ends a worker after a task with a share of a GPU
def _gpus() -> list[machine.Gpu]:
    return machine.gpus()
