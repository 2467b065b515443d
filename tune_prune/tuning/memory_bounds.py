"""The memory that there is for each trial, on this machine or on the nodes of a cluster, and how models are held within it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tune_prune.core import machine
from tune_prune.core.machine import TooLittleMemory
from tune_prune.models.runner.residency import Place, Residency
from tune_prune.tuning.gpus import Gpu
from tune_prune.tuning.memory import Bounds, MemoryPlan, choose_within, on_this_machine
from tune_prune.tuning.plan import ModelPlan, SearchSettings
from tune_prune.tuning.resources import (
    Node,
    TrialResources,
    plan_resources,
    sharing_trials,
    slots_on,
    trial_slots,
    usable_bytes,
)


@dataclass(frozen=True)
class MemoryBounds:
    """The memory that a trial may take."""

    of: Bounds
    folder: str = ""  # that of a file of hidden states; "": this machine's for temporary files


@dataclass(frozen=True)
class _Host:
    """A machine of a cluster, and how many trials run there at once."""

    name: str
    memory: machine.Memory
    file_room: int
    trials: int
    cpus: int  # that could be taken by trials


def slots(settings: SearchSettings, resources: TrialResources, nodes: Sequence[Mapping[str, float]], work: int) -> int:
    """Count the trials that run at once, of so many pieces of work."""
    return min(trial_slots(resources, nodes), 1 if settings.inline else work)


def bounds(
    settings: SearchSettings,
    nodes: Sequence[Mapping[str, float]],
    told: Sequence[Node],
    share: float | None,
    gpu: machine.Memory | None,
    work: int,
    here: bool = True,
) -> MemoryBounds:
    """Find the room on the GPU with the least memory or, on CPUs, in the host's, and the room that there is where hidden states
    can wait. `told`: the nodes of a cluster, of which the one counts that has least for each of its trials; none: this machine
    or, where the GPU is not `here`, one that has all the room it takes. `work`: pieces of it that can run at once."""
    room: dict[Place, int] = {}
    folder = ""
    if gpu is not None:
        room["device"] = usable_bytes(gpu) // sharing_trials(share or 1.0)
    # Without a share of those that would have a GPU of their own.
    alone = plan_resources(settings.cpus_per_trial, share or float(gpu is not None), nodes)
    if not told:
        room |= on_this_machine(slots(settings, alone, nodes, work)) if here else {}
    elif hosts := _hosts(told, alone, work):
        room["host"] = min(host.memory.available // host.trials for host in hosts)
        room["file"], name = min((host.file_room // host.trials, host.name) for host in hosts)
        folder = f"the folder for temporary files of node {name}"
    if "host" in room:
        room.setdefault("device", room["host"])
    return MemoryBounds(room, folder)


def choose(settings: SearchSettings, model: ModelPlan, within: MemoryBounds) -> MemoryPlan:
    """Choose how trials of a model hold it. Raises UserError where there is no way."""
    what = f"a trial of {model.run.label}"
    return choose_within(model.ways, within.of, settings.memory, what, within.folder)


def kinds_of(gpus: Sequence[Gpu]) -> dict[str, machine.Memory]:
    """Return by name the memory of that GPU of a kind which has least to use."""
    return {gpu.name: gpu.memory for gpu in sorted(gpus, key=lambda gpu: usable_bytes(gpu.memory), reverse=True)}


def ways_of_kinds(
    settings: SearchSettings,
    models: Sequence[ModelPlan],
    nodes: Sequence[Mapping[str, float]],
    told: Sequence[Node],
    resources: TrialResources,
    gpus: Sequence[Gpu],
    work: int,
) -> dict[str, dict[str, Residency]]:
    """Choose by the name of each kind of GPU, of several, and by label, how models are held there: those that fit the smallest
    kind in a lean way may fit another in a faster one, which gives the same numbers."""
    kinds = kinds_of(gpus)
    nodes_gpus = [node.gpus for node in told] or [tuple(gpus)]
    # A trial on several GPUs has those of one node, and goes by the first of them: they have to be of one kind.
    mixed = resources.gpus > 1 and any(len(kinds_of(own)) > 1 for own in nodes_gpus)
    if len(kinds) < 2 or resources.gpus == 0 or mixed:
        return {}
    ways = {}
    for name, memory in kinds.items():
        with_it = [node for node in told if name in {gpu.name for gpu in node.gpus}]
        within = bounds(settings, nodes, with_it, resources.gpus, memory, work)
        ways[name] = {model.run.label: choose(settings, model, within).way for model in models}
    return ways


def check(trial_bytes: int, at_once: int, told: Sequence[Node], resources: TrialResources) -> None:
    """Raise UserError where trials on CPUs do not fit: `at_once` on this machine or, of a cluster, those of a node there."""
    if not told:
        check_memory(trial_bytes, at_once, machine.memory(), machine.cpus())
    for host in sorted(_hosts(told, resources, at_once), key=lambda host: host.memory.available // host.trials):
        try:
            check_memory(trial_bytes, host.trials, host.memory, host.cpus, f"node {host.name}")
        except TooLittleMemory as error:
            raise TooLittleMemory(error.fact, f"{error.step}; or end Ray there (`ray stop`) to do without it") from None


def check_memory(trial_bytes: int, at_once: int, memory: machine.Memory, cpus: int, node: str = "") -> None:
    """Raise UserError where so many trials on so many CPUs do not fit together into the memory that is free on `node`, or here."""
    need, total, free = (f"{size / 2**30:.1f} GiB" for size in (trial_bytes, memory.total, memory.available))
    there = f" on {node}" if node else ""
    if trial_bytes > memory.total:
        raise TooLittleMemory(
            f"a trial needs about {need} of memory and {node or 'this machine'} has {total}; ",
            "use a machine with a larger GPU or more memory, or a smaller model",
        )
    fits = memory.available // trial_bytes
    if fits == 0:
        raise TooLittleMemory(
            f"a trial needs about {need} of memory and {free} of {total} are free{there}; ",
            "end other programs, or wait for them",
        )
    if at_once > fits:
        raise TooLittleMemory(
            f"{at_once} trials at once need about {need} each and {free} of {total} are free{there}; ",
            f"let at most {fits} run at once: --cpus-per-trial {math.ceil(cpus / fits)}",
        )


def _hosts(told: Sequence[Node], resources: TrialResources, work: int) -> list[_Host]:
    """List the nodes on which trials of so many pieces of work run; those on one machine, which share its memory, with the
    trials of all."""
    trials: Counter[str] = Counter()
    for node in told:
        if node.runs_trials:
            trials[node.name] += slots_on(resources, node.resources)
    return [
        _Host(
            node.name,
            node.memory,
            node.file_room,
            min(trials[node.name], work),
            math.ceil(trials[node.name] * resources.cpus),
        )
        for node in told
        if node.runs_trials and node.memory is not None and trials[node.name]
    ]
