"""What the trials of a plan run on, as text for the screen: resources, GPUs, nodes, and the memory of each stage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tune_prune.checkpoint.layers import aligned
from tune_prune.core import machine
from tune_prune.core.machine import size
from tune_prune.models.loading import WIDE
from tune_prune.models.runner.devices import bfloat16_speed, fast_at_bfloat16
from tune_prune.models.runner.residency import Residency
from tune_prune.tuning.memory import MemoryPlan
from tune_prune.tuning.plan import Plan

NVIDIA = Path("/dev/nvidiactl")  # there where a driver is loaded


def fit_line(plan: Plan) -> str:
    """What a trial takes of what there is: a plan exists only where it fits."""
    memory, gpus, settings = plan.memory, plan.resources.gpus, plan.settings
    need, at_once = size(memory.total), f" a trial, {plan.slots} at once" if plan.slots > 1 else " a trial"
    free = plan.card.memory if plan.card else min(plan.gpu_free.values(), default=0)
    if gpus and free:
        of = f" a trial, {1 / gpus:.0f} on each GPU" if gpus < 1 else f" on each of {gpus:.0f} GPUs" * (gpus > 1)
        fits = f"{need}{of} of {size(free)}: fits"
    elif plan.nodes:
        fits = f"{need} a trial: fits on every machine"
    else:
        fits = f"{need}{at_once}: fits ({size(machine.memory().available)} are free)"
    fits += f", within --memory {size(settings.memory)}" if settings.memory else ""
    how = held_in_words(memory)
    return f"{fits}, {how}" if how and len(plan.models) == 1 else fits


def held_in_words(memory: MemoryPlan) -> str:
    """How a trial does without the whole model in memory; empty where it has it there."""
    way, parts = memory.way, []
    if way.streamed:
        parts.append("weights read from disk while it works")
    elif way.gradients_by_layer:
        parts.append("layer by layer")
    if way.halvings:
        parts.append("in smaller batches")
    if memory.away:
        parts.append(f"{size(memory.away)} more {_PLACES[way.states]}")
    return ", ".join(parts)


_PLACES = {"host": "in main memory", "file": "on disk (in TMPDIR)"}


def memory_lines(plan: Plan) -> list[str]:
    """Where the peak of a trial comes from, and what waits elsewhere."""
    memory, largest = plan.memory, plan.memory.largest
    weights = f"the original's weights {size(memory.weights)}" if memory.weights else "weights stay on disk"
    lines = [
        f"{size(memory.total)} a trial: the process {size(memory.process)}, {weights}",
        f"most in stage {largest.stage.replace('_', '-')}: {size(largest.held)}, and {size(largest.activations)} of activations",
    ]
    for model in plan.models:
        if (own := model.memory).way != model.ways[0].way:
            copies = ", pruned copies whole in memory" if own.way.pruned_whole else ""
            lines.append(
                f"{model.run.label}: {held_in_words(own)}{copies}; with the whole model in memory a trial would take "
                f"{size(model.ways[0].total)}"
            )
    for name, ways in plan.gpu_ways.items():
        lines.append(f"on {name}: {'; '.join(f'{label} {_way(way)}' for label, way in ways.items())}")
    return lines


def _way(way: Residency) -> str:
    """That of a whole trial: its stages say for themselves where a pruned copy is."""
    return f"{way}{', pruned copies whole' if way.pruned_whole else ''}"


def way_lines(plan: Plan) -> list[str]:
    """What the words of the column `way` mean: those that it has."""
    stages = [stage.way for model in plan.models for stage in model.memory.stages]
    return [f"{word}: {means}" for word, means in _WAYS.items() if any(word in way for way in stages)]


_WAYS = {
    "resident": "the whole model is where it computes",
    "by layer": "gradients of one layer after the other, with the weights where it computes",
    "streamed": "weights are read from disk while it works, a layer at a time",
    "at once": "smaller batches",
    "states in host memory": "what is between two layers waits in main memory",
    "states in a file": "what is between two layers waits on disk, in TMPDIR",
}


def held(plan: Plan, name: str) -> tuple[str, str]:
    """The peak of a stage, and in which way models are held, of all that differ."""
    found = [(model.memory, stage) for model in plan.models for stage in model.memory.stages if stage.stage == name]
    ways = dict.fromkeys(stage.way for _, stage in found)
    return size(max(memory.peak(stage) for memory, stage in found)), " / ".join(ways)


def resources_line(plan: Plan) -> str:
    settings, each = plan.settings, plan.resources
    where = f"this machine: {machine.cpus()} CPUs, {torch.cuda.device_count()} GPUs"
    if settings.address:
        where = f"cluster {settings.address}"
    if plan.card:
        where = f"planned for {plan.card}, not for this machine"
    at_once = "one after the other in this process" if settings.inline else f"{plan.slots} at once"
    of_each = " of each" if each.gpus > 1 else ""
    return (
        f"{where}; a trial takes {each.cpus:g} CPU, {each.gpus:g} GPU and about {size(plan.memory.total)}{of_each}; {at_once}; "
        f"scheduler {settings.scheduler}{', KL filter' if settings.kl_filter else ''}"
    )


def to_mend(plan: Plan) -> list[str]:
    """What makes trials slower than they need be, and does not mend itself: each with what does."""
    lines = []
    if _unseen_gpu(plan):
        cuda = torch.version.cuda
        why = (
            f"its driver may be too old for CUDA {cuda}, see nvidia-smi"
            if cuda
            else "it is built without CUDA: see pytorch.org"
        )
        lines.append(
            f"torch {torch.__version__} does not see this machine's NVIDIA GPU, so trials run on CPUs: {why}; to have it so, set "
            "CUDA_VISIBLE_DEVICES="
        )
    narrow = any(model.stored_as not in WIDE for model in plan.models)
    if plan.without_bfloat16 and plan.settings.dtype is None and narrow:
        lines.append(
            f"all trials compute in float32, as {listed(plan.without_bfloat16)} cannot compute in bfloat16; leave such GPUs out "
            "with CUDA_VISIBLE_DEVICES, or give --dtype"
        )
    if plan.settings.dtype == "bfloat16" and _on_cpu_here(plan) and not fast_at_bfloat16("cpu"):
        lines.append(f"bfloat16 was asked for, but {_compared()}; leave --dtype out for float32")
    return lines


def _unseen_gpu(plan: Plan) -> bool:
    """Whether there is a GPU that trials do not use, which nobody has asked for."""
    here = plan.settings.address is None and plan.card is None and NVIDIA.exists()
    return here and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not torch.cuda.is_available()


def _on_cpu_here(plan: Plan) -> bool:
    return not plan.resources.gpus and not plan.settings.address


def dtype_lines(plan: Plan) -> list[str]:
    """Which data type trials compute in and why, where that is not plain and `to_mend` says nothing of it: by how weights are
    stored, and by what the device is fast at."""
    narrow = any(model.stored_as not in WIDE for model in plan.models)
    if plan.settings.dtype is not None or (plan.without_bfloat16 and narrow):
        return []
    lines = []
    for stored, dtype in dict.fromkeys((model.stored_as, model.run.dtype) for model in plan.models):
        labels = [model.run.label for model in plan.models if model.stored_as == stored]
        of = f" ({', '.join(labels)})" if len(labels) < len(plan.models) else ""
        if stored not in WIDE and not plan.resources.gpus:
            lines.append(f"{dtype}{of}: weights are stored in {stored}" + f"; {_compared()}" * _on_cpu_here(plan))
        elif stored in WIDE and plan.resources.gpus:
            lines.append(f"float32{of}, as weights are stored; --dtype bfloat16 takes half the memory and less time")
    return lines


def _compared() -> str:
    return f"this CPU multiplies matrices {bfloat16_speed():.1f} times as fast in bfloat16 as in float32"


def node_lines(plan: Plan) -> list[str]:
    """What each node of the cluster has, a line for each below what all have."""
    workers = [node for node in plan.nodes if node.runs_trials]
    if not workers:
        return []
    table: list[tuple[str, ...]] = [("", "CPUs", "memory", "GPUs", "clock")]
    for node in plan.nodes:
        cpus, gpus = node.resources.get("CPU", 0), node.resources.get("GPU", 0)
        told = ("-", "no trials here", "-")
        if node.memory is not None:
            kinds = ", ".join(sorted({gpu.name for gpu in node.gpus}))
            free = min((gpu.memory.available for gpu in node.gpus), default=0)
            total = min((gpu.memory.total for gpu in node.gpus), default=0)
            told = (
                f"{size(node.memory.available)} of {size(node.memory.total)} free",
                f"{gpus:g} {kinds}, {size(free)} of {size(total)} free" if kinds else f"{gpus:g}",
                f"{node.skew_s:+.0f} s" if node.skew_s else "equal",
            )
        table.append((node.name, f"{cpus:g}", *told))
    versions = ", ".join(f"{name} {version}" for name, version in workers[0].versions.items())
    return [f"{len(plan.nodes)}, all with {versions}; one storage, the same models and data", *aligned(table)]


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
