"""The memory that there is for each trial, on this machine or on the nodes of a cluster, and how models are held within it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tune_prune.core import machine
from tune_prune.core.machine import TooLittleMemory, size
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
) -> tuple[Bounds, str]:
    """Find the room on the GPU with the least memory or, on CPUs, in the host's, and the room that there is where hidden states
    can wait, with the name of the folder of a file of them ("": this machine's for temporary files).

    `told`: the nodes of a cluster, of which the one counts that has least for each of its trials; none: this machine or, where the
    GPU is not `here`, one that has all the room it takes. `work`: pieces of it that can run at once."""
    room, folder = dict[Place, int](), ""
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
    return room, folder


def choose(settings: SearchSettings, model: ModelPlan, within: tuple[Bounds, str]) -> MemoryPlan:
    """Choose how trials of a model hold it. Raises UserError where there is no way."""
    room, folder = within
    return choose_within(model.ways, room, settings.memory, f"a trial of {model.run.label}", folder)


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
    hosts = _hosts(told, resources, at_once)
    if not told:
        hosts = [_Host("", machine.memory(), 0, at_once, machine.cpus())]
    for host in sorted(hosts, key=lambda host: host.memory.available // host.trials):
        fits = host.memory.available // trial_bytes
        if host.trials > fits:
            free = f"{size(host.memory.available)} of {size(host.memory.total)} of memory are free"
            where = f" on node {host.name}" if told else ""
            step = f"let at most {fits} run at once: --cpus-per-trial {math.ceil(host.cpus / max(1, fits))}"
            step = step if fits else "end other programs, or use more memory or a smaller model"
            raise TooLittleMemory(
                f"a trial needs about {size(trial_bytes)}, {host.trials} run at once, and {free}{where}; ",
                f"{step}; or end Ray there (`ray stop`) to do without it" if told else step,
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
