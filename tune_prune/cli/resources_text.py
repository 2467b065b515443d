"""What the trials of a plan run on, as text for the screen: resources, GPUs, nodes, and the memory of each stage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tune_prune.checkpoint.sizes import aligned
from tune_prune.core.process import machine
from tune_prune.core.process.machine import size
from tune_prune.models.loading import WIDE
from tune_prune.models.runner.devices import bfloat16_speed, fast_at_bfloat16
from tune_prune.models.runner.residency import Residency
from tune_prune.planning.plan import Plan

NVIDIA = Path("/dev/nvidiactl")  # there where a driver is loaded


def memory_lines(plan: Plan) -> list[str]:
    """Where the peak of a trial comes from, and what waits elsewhere."""
    memory, largest = plan.memory, plan.memory.largest
    lines = [
        f"a trial {size(memory.total)}: process {size(memory.process)}, dense weights {size(memory.weights)}, and in its largest "
        f"stage, {largest.stage.replace('_', '-')}, {size(largest.held)} + activations {size(largest.activations)}"
    ]
    for model in plan.models:
        if (own := model.memory).way != model.ways[0].way:
            elsewhere = f" ({size(own.away)})" if own.away else ""
            gradients = "gradients " if own.way.gradients_by_layer else ""
            lines.append(
                f"{model.run.label}: {gradients}{_way(own.way)}{elsewhere}; of the whole model at once a trial would take "
                f"{size(model.ways[0].total)}"
            )
    for name, ways in plan.gpu_ways.items():
        lines.append(f"on {name}: {'; '.join(f'{label} {_way(way)}' for label, way in ways.items())}")
    return lines


def _way(way: Residency) -> str:
    """That of a whole trial: its stages say for themselves where a pruned copy is."""
    return f"{way}{', pruned copies whole' if way.pruned_whole else ''}"


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


def unseen_gpu_lines(plan: Plan) -> list[str]:
    """Why trials run on CPUs where there is a GPU, if that is not what somebody has asked for."""
    here = (
        plan.settings.address is None
        and plan.card is None
        and NVIDIA.exists()
        and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    )
    if not here or torch.cuda.is_available():
        return []
    cuda = torch.version.cuda
    why = (
        f"its driver may be too old for CUDA {cuda} (nvidia-smi says what it is for)"
        if cuda
        else "it is built without CUDA"
    )
    return [f"this machine has an NVIDIA GPU that torch {torch.__version__} does not see: {why}"]


def dtype_lines(plan: Plan) -> list[str]:
    """Which data type trials compute in and why, where that is not plain: by how weights are stored, and by what the device is fast
    at."""
    narrow = any(model.stored_as not in WIDE for model in plan.models)
    if plan.without_bfloat16 and plan.settings.dtype is None and narrow:
        names = listed(plan.without_bfloat16)
        return [
            f"float32, as {names} cannot compute in bfloat16; leave such GPUs out with CUDA_VISIBLE_DEVICES, or give --dtype"
        ]
    on_cpu_here = not plan.resources.gpus and not plan.settings.address
    if plan.settings.dtype is not None:
        slow = plan.settings.dtype == "bfloat16" and on_cpu_here and not fast_at_bfloat16("cpu")
        return [f"bfloat16, but {_compared()}; leave --dtype out for float32"] if slow else []
    lines = []
    for stored, dtype in dict.fromkeys((model.stored_as, model.run.dtype) for model in plan.models):
        labels = [model.run.label for model in plan.models if model.stored_as == stored]
        of = f" ({', '.join(labels)})" if len(labels) < len(plan.models) else ""
        if stored not in WIDE and not plan.resources.gpus:
            lines.append(f"{dtype}{of}: weights are stored in {stored}" + f"; {_compared()}" * on_cpu_here)
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
