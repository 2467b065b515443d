"""The plan of a search as text for the screen: configurations, data, stages, resources, each model's budget, the cost."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from tune_prune.analysis.cost import between, duration
from tune_prune.core.config import ModelRun, alignment, group_labels
from tune_prune.core.process import machine
from tune_prune.core.process.machine import size
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.core.store import Location, ObjectPath
from tune_prune.core.values.hyperparameters import HYPERPARAMETERS, Hyperparameter
from tune_prune.core.values.kinds import texts_of
from tune_prune.data.sources import uses_embedded_data
from tune_prune.planning.plan import Plan
from tune_prune.planning.recoveries import expected
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import in_pass_order, load_statistic, parse

NVIDIA = Path("/dev/nvidiactl")  # there where a driver is loaded


def describe(plan: Plan) -> str:
    """The plan as text for the screen."""
    space, first = plan.space, plan.models[0]
    total, recover = plan.trials_per_model * len(plan.models), plan.settings.recover
    if recover is not None:
        total = sum(len(expected(plan, (config for config, _ in model.trials))) for model in plan.models)
    done = total - plan.left
    protocol = first.run.protocol
    items = "all items" if protocol.limit is None else f"at most {protocol.limit} items each"
    methods = space.values["method"]
    groups = [len(space.values[name]) for name in ("seq_len", "seed", "calibration")]
    used = in_pass_order(parse(name)[0] for method in methods for name in load_method(method).statistics)
    statistics = [load_statistic(name) for name in used]
    passes = _list([f"{prod(groups)} {statistic.label} passes" for statistic in statistics])
    if passes:
        per = [
            name
            for name, count in zip(("seq_len", "draw", "text"), groups, strict=True)
            if count > 1 or name == "seq_len"
        ]
        each = f"one {'of each ' if len(statistics) > 1 else ''}per {_list(per)}"
        passes += f" a model, {each}; " if space.search == "grid" else " a model at most, as seq_len are visited; "
    rows = [
        (
            "experiment",
            f"{shown_path(plan.experiment_dir)}" + (f"  ({done} of {total} trials are in its ledger)" if done else ""),
        ),
        ("search", f"{_search(plan)}, {'at most ' if plan.settings.draws or recover else ''}{total} trials"),
        ("", "; ".join(f"{row.name} {_list(space.values[row.name])}" for row in _searched(plan))),
        *_shapes(plan),
        *(("recovery", f"up to {recover} {one} trained, once all others are measured") for one in _trained(plan)),
        *(("weights", f"{model.run.label}: {model.found_as}") for model in plan.models if model.found_as),
        *(("" if index else "calibration", line) for index, line in enumerate(_calibration(plan))),
        (
            "evaluation",
            f"perplexity on {perplexity_text_of(first.run)}; {len(protocol.tasks)} zero-shot tasks, {items}",
        ),
        ("", ", ".join(protocol.tasks)),
        (
            "stages",
            ", ".join([*(statistic.stage for statistic in statistics), *_model_stages(plan), "zero-shot "])
            + " / ".join(f"{100 * f:.4g}%" for f in protocol.slices),
        ),
        ("shared", f"{passes}1 dense baseline a model"),
        ("resources", _resources(plan)),
        *(("GPU", line) for line in _unseen_gpu(plan)),
        *(("dtype", line) for line in _dtype(plan)),
        *(("nodes" if index == 0 else "", line) for index, line in enumerate(_nodes(plan))),
        *(("" if index else "memory", line) for index, line in enumerate(_memory(plan))),
    ]
    lines = [f"{name:<12} {text}" for name, text in rows]
    return "\n".join([*lines, "", *_aligned(_models(plan)), "", *_cost(plan)])


def _model_stages(plan: Plan) -> list[str]:
    """Those between the statistics and the zero-shot slices."""
    usual = {switch: {HYPERPARAMETERS[switch].default} for switch in RECIPE_STAGES.values()}
    wanted = {switch: set(plan.space.values[switch]) != found for switch, found in usual.items()}
    return [stage for stage in MODEL_STAGES[:-1] if wanted.get(RECIPE_STAGES.get(stage, ""), True)]


def _trained(plan: Plan) -> list[str]:
    """Which may be trained by --recover; nothing without it."""
    several = len(plan.space.values["pruning_ratio"]) > 1
    each = f"of each model{' and pruning ratio' * several} that may still be the best are"
    return [] if plan.settings.recover is None else [each]


def _searched(plan: Plan) -> list[Hyperparameter]:
    """Those that every space names, and of the others those with several values or one off its default; shapes have lines of
    their own, and a single ratio is in the table of models."""
    usual = {"shape": (plan.space.values["shape"][0],), "pruning_ratio": plan.space.values["pruning_ratio"][:1]}
    return [
        row
        for name, row in HYPERPARAMETERS.items()
        if row.required or plan.space.values[name] != usual.get(name, (row.default,))
    ]


def _search(plan: Plan) -> str:
    """How the configurations are searched, and how many they are."""
    space = plan.space
    lists = [
        f"{len(space.values[row.name])} {'methods' if row.name == 'method' else row.name}" for row in _searched(plan)
    ]
    points = space.size * len(space.values["pruning_ratio"])
    if space.search == "optuna":
        of = [name for name in ("pruning_ratio", "recovery") if len(space.values[name]) > 1]
        each = " and ".join(["a model", *(HYPERPARAMETERS[name].label.lower() for name in of)])
        goal = "" if plan.objective == "accuracy" else f", by {plan.objective}"
        return (
            f"optuna (TPE) on {space.name}: {space.num_trials} of {max(plan.group_sizes)} configurations {each}{goal}"
        )
    product = prod(len(values) for values in space.values.values())
    found = str(points) if product == points else f"{product} points, {points} distinct"
    return f"grid over {space.name}: {' x '.join(lists)} = {found} configurations a model"


def perplexity_text_of(run: ModelRun) -> str:
    """What perplexity is measured on, in words."""
    text = "the embedded text" if uses_embedded_data(run) else "WikiText-2 test"
    return text if (most := run.protocol.perplexity_tokens) is None else f"the first {most:,} tokens of {text}"


def _calibration(plan: Plan) -> list[str]:
    """The texts, and how many draws of samples there are of each."""
    run, kind = plan.models[0].run, HYPERPARAMETERS["calibration"].kind
    texts = list(dict.fromkeys(run.of(config).calibration for config, _ in plan.models[0].trials))
    shown = []
    for text in texts:
        parts = texts_of(text)
        each = f" (equal parts of {len(parts)} texts, in turn)" if len(parts) > 1 else ""
        shown.append("+".join(str(shown_path(part)) for part in parts) + each)
    if len(texts) == 1:
        return [f"{shown[0]}, {_draws(plan)}"]
    return [
        f"{len(texts)} texts, each with {_draws(plan)}",
        *(f"{kind.short(t)}: {s}" for t, s in zip(texts, shown, strict=True)),
    ]


def _draws(plan: Plan) -> str:
    """How many draws of calibration samples there are, and their seeds."""
    seeds = [plan.settings.seed if seed is None else seed for seed in plan.space.values["seed"]]
    if plan.settings.draws is not None:
        by = "" if plan.settings.draws_by == "accuracy" else f" by {plan.settings.draws_by}"
        return f"seed {seeds[0]}; up to {len(seeds)} draws (seeds {_list(seeds)}) of what may still be the best{by}"
    return f"seed {_list(seeds)}" if len(seeds) == 1 else f"{len(seeds)} draws, seeds {_list(seeds)}"


def _models(plan: Plan) -> list[tuple[str, ...]]:
    """The table of models and pruning ratios: what is removed of each, and what a KV group and an MLP channel cost."""
    ratios = plan.space.values["pruning_ratio"]
    cuts = {(model.run.label, ratio): (model.run.label, ratio, "none") for model in plan.models for ratio in ratios}
    labels = group_labels(cuts.values())
    remove = f"remove {ratios[0]:.4g}" if len(ratios) == 1 else "remove"
    table: list[tuple[str, ...]] = [
        ("model", "parameters", remove, "removable", "layers", "KV group", "MLP channel", "dtype")
    ]
    for model in plan.models:
        g = model.geometry
        removable = " / ".join(f"{shapes.removal_bounds(g, shape).most:,}" for shape in model.shapes)
        layers = (
            str(g.num_layers),
            f"{max(g.kv_heads)} x {max(g.group_cost):,}",
            f"{max(g.mlp_width)} x {max(g.channel_cost):,}",
            model.run.dtype,
        )
        for ratio, target in model.targets.items():
            table.append(
                (labels[cuts[model.run.label, ratio]], f"{g.total_params:,}", f"{target:,}", removable, *layers)
            )
    return table


def _shapes(plan: Plan) -> list[tuple[str, str]]:
    """What the pruned layers will look like, a line for each shape, unless all are free."""
    if plan.space.values["shape"] == ("free",):
        return []
    lines = []
    for index, shape in enumerate(plan.space.values["shape"]):
        if shape == "free":
            lines.append("free: each layer has its own widths")
        elif shape == "uniform":
            heads = {model.run.label: _list(model.geometry.uniform_kv_heads) for model in plan.models}
            lines.append(
                f"uniform: one MLP width for all layers, and one of {_by_model('{} KV groups', heads)} in each"
            )
        else:
            blocks = {model.run.label: str(alignment(model.shapes[index])) for model in plan.models}
            multiples = _by_model("{}", blocks)
            lines.append(f"aligned: MLP widths in multiples of {multiples}, at least one KV group in every layer")
    return [("" if index else "shape", line) for index, line in enumerate(lines)]


def _by_model(text: str, values: Mapping[str, str]) -> str:
    """`text` with its value filled in; with each model's where they differ."""
    if len(set(values.values())) == 1:
        return text.format(next(iter(values.values())))
    return "; ".join(f"{text.format(value)} ({label})" for label, value in values.items())


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _cost(plan: Plan) -> list[str]:
    """A line for each stage, with the peak of a worker's memory and how it holds the model, and the whole in one line."""
    cost = plan.cost
    if cost is not None and not cost.wall_seconds:
        return ["cost         nothing is left to compute"]
    about = cost is not None and any("~" in note for note in cost.notes)
    stages = {} if cost is None else {stage.stage: stage for stage in cost.stages()}
    table = [("stage", "times", "tokens", "FLOPs", "time", "memory", "way")]
    for name in stages or in_order(stage.stage for model in plan.models for stage in model.memory.stages):
        numbers = ("-", "-", "-", "-")
        if stage := stages.get(name):
            tokens = f"{'~' if about and name == 'zero_shot' else ''}{stage.tokens:,}" if stage.tokens else "-"
            flops = f"{stage.flops:.1e}" if stage.flops else "-"
            numbers = (str(stage.runs), tokens, flops, duration(stage.seconds))
        table.append((name.replace("_", "-"), *numbers, *_held(plan, name)))
    if cost is None:
        return [*_aligned(table), "cost         not predicted: no worker of the cluster was free to measure its speed"]
    workers = f"{cost.slots} worker{'s' if cost.slots > 1 else ''}"
    gpus = f", {cost.gpu_hours:.2g} GPU-hours" if cost.gpu_hours else ""
    total = f"cost         about {between(cost.wall_range)} on {workers}{gpus}, measured at {cost.load}"
    return [*_aligned(table), "; ".join([total, *cost.notes])]


def _memory(plan: Plan) -> list[str]:
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
                f"{model.run.label}: {gradients}{own.way}{elsewhere}; of the whole model at once a trial would take "
                f"{size(model.ways[0].total)}"
            )
    for name, ways in plan.gpu_ways.items():
        lines.append(f"on {name}: {'; '.join(f'{label} {way}' for label, way in ways.items())}")
    return lines


def _held(plan: Plan, name: str) -> tuple[str, str]:
    """The peak of a stage, and in which way models are held, of all that differ."""
    found = [(model.memory, stage) for model in plan.models for stage in model.memory.stages if stage.stage == name]
    ways = dict.fromkeys(stage.way for _, stage in found)
    return size(max(memory.peak(stage) for memory, stage in found)), " / ".join(ways)


def _resources(plan: Plan) -> str:
    settings, each = plan.settings, plan.resources
    where = (
        f"cluster {settings.address}"
        if settings.address
        else f"this machine: {machine.cpus()} CPUs, {torch.cuda.device_count()} GPUs"
    )
    at_once = "one after the other in this process" if settings.inline else f"{plan.slots} at once"
    of_each = " of each" if each.gpus > 1 else ""
    return (
        f"{where}; a trial takes {each.cpus:g} CPU, {each.gpus:g} GPU and about {size(plan.memory.total)}{of_each}; {at_once}; "
        f"scheduler {settings.scheduler}{', KL filter' if settings.kl_filter else ''}"
    )


def _unseen_gpu(plan: Plan) -> list[str]:
    """Why trials run on CPUs where there is a GPU, if that is not what somebody has asked for."""
    here = plan.settings.address is None and NVIDIA.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if not here or torch.cuda.is_available():
        return []
    cuda = torch.version.cuda
    why = (
        f"its driver may be too old for CUDA {cuda} (nvidia-smi says what it is for)"
        if cuda
        else "it is built without CUDA"
    )
    return [f"this machine has an NVIDIA GPU that torch {torch.__version__} does not see: {why}"]


def _dtype(plan: Plan) -> list[str]:
    """Which GPUs make it float32 for those that have bfloat16; or what is slow about bfloat16 on a CPU without instructions for it;
    those of a cluster may be others. Measured with AVX2 alone: a product of 128 rows takes 5 times as long as in float32, its
    gradients 100 times."""
    if plan.without_bfloat16 and plan.settings.dtype is None:
        names = _list(plan.without_bfloat16)
        return [
            f"float32, as {names} cannot compute in bfloat16; leave such GPUs out with CUDA_VISIBLE_DEVICES, or give --dtype"
        ]
    there = torch.cpu.get_capabilities()
    slow = there.get("architecture") == "x86_64" and not there.get("avx512_bf16")
    if plan.resources.gpus or plan.settings.address or plan.models[0].run.dtype != "bfloat16" or not slow:
        return []
    return [
        "bfloat16, which this CPU has no instructions for: in float32 (without --dtype) it computes many times faster"
    ]


def _nodes(plan: Plan) -> list[str]:
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
    return [f"{len(plan.nodes)}, all with {versions}; one storage, the same models and data", *_aligned(table)]


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def shown_path(path: Location | str) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    if isinstance(path, ObjectPath):
        return str(path)
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
