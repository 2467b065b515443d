"""Questions to the nodes of the cluster that this process is connected to: what they are and what they reach, asked before the
first trial; and a function call on any of their workers.

A node that could not run trials as this machine does is named with what it lacks, and no search starts: left out in silence, it
would be paid for and not used. Who wants to do without it ends Ray there.
"""

from __future__ import annotations

import errno
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tune_prune.core import machine
from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.store import Location, open_store
from tune_prune.data.sources import data_fingerprint
from tune_prune.models import catalog, loading
from tune_prune.models.runner.devices import NO_KERNELS_STEP, fast_at_bfloat16
from tune_prune.tuning import gpus as of_this_node
from tune_prune.tuning.gpus import Gpu, visible_gpus
from tune_prune.tuning.memory import on_this_machine
from tune_prune.tuning.resources import Node, TrialResources, slots_on

WAIT_S = 60.0  # a first worker has to import torch; a busy cluster may not have one free at all
PROBE_TIMEOUT_S = 120.0  # likewise, of a node
COMPARED = (
    "torch",
    "transformers",
    "lm_eval",
    "numpy",
    "ray",
)  # beside this package and Python: what numbers depend on


def alive() -> list[Node]:
    """Return every node, as Ray knows it, by name."""
    nodes = [
        Node(node["NodeID"], f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})", node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.name)


def survey(use_gpus: bool) -> list[Node]:
    """Return every node with what it tells of itself. Trials run on those with GPUs, if they are to be used and there are any.

    Raises UserError for nodes on which trials would run, but whose packages or GPUs do not allow it.
    """
    nodes = alive()
    on_gpus = use_gpus and any(node.resources.get("GPU", 0) > 0 for node in nodes)
    nodes = [replace(node, runs_trials=node.resources.get("GPU" if on_gpus else "CPU", 0) > 0) for node in nodes]
    about = teller()
    answers, problems = _ask(nodes, about, lambda _: (COMPARED,))
    here = about(COMPARED)
    for index, node in enumerate(nodes):
        if node.node_id in answers:
            versions = answers[node.node_id]
            nodes[index] = replace(node, versions=versions)
            if others := [
                f"{name} {versions[name]} (here {here[name]})" for name in here if versions[name] != here[name]
            ]:
                problems[node.name] = (
                    f"has {', '.join(others)}: install the same versions there (pip install -c constraints.txt -e .)"
                )
    _refuse(problems, len(nodes))
    # Ray shows a task the GPUs that it reserves; one that reserves none is to see all, also those that others have reserved.
    everything = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    answers, problems = _ask(nodes, hardware, lambda _: (on_gpus,), runtime_env=everything)
    for index, node in enumerate(nodes):
        if node.node_id in answers:
            memory, file_room, gpus, bfloat16 = answers[node.node_id]
            nodes[index] = replace(node, memory=memory, file_room=file_room, gpus=tuple(gpus), bfloat16=bfloat16)
            if on_gpus and not gpus:
                problems[node.name] = (
                    "offers GPUs but its torch sees none: install a torch build for them there, or use --gpus-per-trial 0"
                )
            elif problem := next((gpu.problem for gpu in gpus if gpu.problem), None):
                problems[node.name] = (
                    f"offers GPUs that it cannot use: {problem}; {NO_KERNELS_STEP} (--gpus-per-trial 0)"
                )
    _refuse(problems, len(nodes))
    return nodes


def check_reach(nodes: Sequence[Node], folder: Location, models: Sequence[tuple[ModelRun, str, str]]) -> None:
    """Have every node that runs trials read what this process writes to `folder`, write to it, and find each model with its data by
    their fingerprints. Leaves nothing behind. Raises UserError for nodes that cannot."""
    made = [path for path in (folder, *folder.parents) if not path.exists()] if isinstance(folder, Path) else []
    store, token = open_store(folder), uuid.uuid4().hex
    question = f".node-check-{token}"
    names = {node.node_id: f"{question}-{node.node_id}" for node in nodes}
    store.put(question, token)
    try:
        answers, problems = _ask(nodes, reach, lambda node: (folder, question, names[node.node_id], token, models))
        for node in nodes:
            problem = answers.get(node.node_id)
            if node.node_id in answers and problem is None and store.get(names[node.node_id]) is None:
                problem = _not_shared(folder, "what it writes is not seen here")
            if problem is not None:
                problems[node.name] = problem
    finally:
        store.put_all(dict.fromkeys((question, *names.values())))
        for path in made:
            try:
                path.rmdir()
            except OSError as error:  # Another search has put something there, or removed the folder.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
    _refuse(problems, len(nodes))


def fetch_weights(runs: Sequence[ModelRun], resources: TrialResources) -> None:
    """Have every node on which a trial fits download the weights of hub models that its cache lacks: in a trial it would be the
    trial's time. Raises UserError for nodes that cannot."""
    runs = [run for run in runs if catalog.resolve(run.model, run.revision).kind == "hub"]
    nodes = [node for node in alive() if slots_on(resources, node.resources)]
    if runs:
        answers, problems = _ask(nodes, fetch, lambda _: (runs,), timeout_s=None)
        problems |= {node.name: answers[node.node_id] for node in nodes if answers.get(node.node_id)}
        _refuse(problems, len(nodes))


def call(function: Callable[[Any], Any], argument: Any, resources: TrialResources) -> Any:
    """Return `function(argument)` of a worker with a trial's resources; None where none is free in WAIT_S. Raises what it
    raises, and UserError where its worker dies."""
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


def _ask(
    nodes: Sequence[Node],
    question: Callable[..., Any],
    arguments: Callable[[Node], tuple[Any, ...]],
    timeout_s: float | None = PROBE_TIMEOUT_S,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what `question(*arguments(node))` returns on each node that runs trials, by node id; and by name, why others
    do not answer."""
    tasks = {}
    for node in nodes:
        if node.runs_trials:
            place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            task = ray.remote(num_cpus=0)(question).options(scheduling_strategy=place, **options)
            tasks[task.remote(*arguments(node))] = node
    end = None if timeout_s is None else time.monotonic() + timeout_s
    answers, problems = {}, {}
    waiting = list(tasks)
    while waiting:
        arrived, waiting = ray.wait(waiting, timeout=None if end is None else max(0.0, end - time.monotonic()))
        if not arrived:
            break
        node = tasks[arrived[0]]
        try:
            answers[node.node_id] = ray.get(arrived[0])
        except RayError as error:
            last = str(error).strip().splitlines()[-1]
            problems[node.name] = f"cannot run tune_prune ({last}): install the same version there"
    for task in waiting:
        problems[tasks[task].name] = f"did not answer within {timeout_s:g} s: see `ray status`, then try again"
    return answers, problems


def _refuse(problems: Mapping[str, str], count: int) -> None:
    """Raise UserError where there are problems, by name of the node, of `count` nodes."""
    lines = [f"node {name} {problem}" for name, problem in problems.items()]
    if len(lines) == 1:
        raise UserError(f"{lines[0]}; or end Ray there (`ray stop`) to do without it")
    if lines:
        advice = "mend them, or end Ray there (`ray stop`) to do without them"
        raise UserError("\n  ".join([f"{len(lines)} of {count} nodes cannot run trials; {advice}:", *lines]))


def teller() -> Callable[[Sequence[str]], dict[str, str]]:
    """Return the function that a node is asked for its versions."""

    def about(packages: Sequence[str]) -> dict[str, str]:
        """Return versions by package, with a hash of this one's code. Being local it travels as code: a node that has another
        tune_prune, or none, can say so."""
        import hashlib
        import importlib.metadata
        import platform
        from pathlib import Path

        versions = {"tune_prune": "none", "python": platform.python_version()}
        try:
            import tune_prune

            code, root = hashlib.sha256(), Path(tune_prune.__file__).parent
            for path in sorted(root.rglob("*.py")):
                code.update(str(path.relative_to(root)).encode() + path.read_bytes())
            versions["tune_prune"] = f"{tune_prune.__version__} ({code.hexdigest()[:8]})"
        except ImportError:
            pass
        for name in packages:
            try:
                versions[name] = importlib.metadata.version(name).partition("+")[0]  # torch's builds for CPUs and GPUs
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "none"
        return versions

    return about


def _not_shared(folder: Location, why: str) -> str:
    if isinstance(folder, Path):
        return f"does not share the folder {folder} ({why}): set --storage-path to a folder that every node mounts"
    return f"does not reach {folder} as this machine does ({why}): give it the same package and credentials"


def hardware(on_gpus: bool) -> tuple[machine.Memory, int, list[Gpu], bool]:
    """Return the memory of this node, bytes that are free for hidden states in a file, its GPUs, and whether its CPU gains by
    bfloat16."""
    # In a process of its own, as this worker lives on and would hold a part of their memory.
    gpus = of_this_node.call(visible_gpus) if on_gpus else []
    return machine.memory(), on_this_machine()["file"], gpus, not on_gpus and fast_at_bfloat16("cpu")


def reach(
    folder: Location, question: str, answer: str, token: str, models: Sequence[tuple[ModelRun, str, str]]
) -> str | None:
    """Return what does not work on this node, in words, or None. Creates nothing but the answer."""
    try:
        store = open_store(folder)
        if store.get(question) != token.encode():
            return _not_shared(folder, "it does not see what this machine writes")
        store.put(answer, token)
    except (OSError, UserError) as error:
        return _not_shared(folder, f"{type(error).__name__}: {getattr(error, 'strerror', error)}")
    for run, model, data in models:
        try:
            source = catalog.resolve(run.model, run.revision)
            if loading.model_fingerprint(source, loading.load_config(source)) != model:
                return f"has another model in {source.location}: copy this machine's there, or name a folder that every node mounts"
            if data_fingerprint(run) != data:
                return (
                    f"has other texts or tasks than this machine ({run.data_dir or run.calibration}): copy them there"
                )
        except UserError as error:
            return f"lacks what {run.label} needs ({error}): copy it there, or name a folder that every node mounts"
    return None


def fetch(runs: Sequence[ModelRun]) -> str | None:
    """Download weights on this node; return why they cannot be had, in words, or None."""
    try:
        for run in runs:
            loading.fetch_weights(catalog.resolve(run.model, run.revision))
    except UserError as error:
        return f"cannot download weights ({error}): let it reach the hub, or set HF_HOME to a folder that every node mounts"
    return None
