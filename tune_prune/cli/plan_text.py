"""The plan of a search as text for the screen: configurations, data, stages, resources, each model's budget, the cost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tune_prune.analysis.cost import duration
from tune_prune.core.config import alignment
from tune_prune.cost_model.memory import MemoryPlan
from tune_prune.data.sources import uses_embedded_data
from tune_prune.planning.plan import Plan
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import in_pass_order, load_statistic, parse


def describe(plan: Plan) -> str:
    """The plan as text for the screen."""
    space, first = plan.space, plan.models[0]
    total, done = plan.total_trials, plan.recorded
    protocol = first.run.protocol
    items = "all items" if protocol.limit is None else f"at most {protocol.limit} items each"
    lists = [
        f"{len(values)} {name}"
        for name, values in (("methods", space.method), ("seq_len", space.seq_len), ("num_samples", space.num_samples))
    ]
    used = in_pass_order(parse(name)[0] for method in space.method for name in load_method(method).statistics)
    statistics = [load_statistic(name) for name in used]
    passes = " and ".join(f"{len(space.seq_len)} {statistic.label} passes" for statistic in statistics)
    if passes:
        each = "of each " if len(statistics) > 1 else ""
        passes += " a model" + (
            f", one {each}per seq_len; " if plan.search == "grid" else " at most, as seq_len are visited; "
        )
    if plan.search == "grid":
        search = f"grid over {space.name}: {' x '.join(lists)} = {space.size} configurations a model"
    else:
        search = f"optuna (TPE) on {space.name}: {plan.num_trials} of {space.size} configurations a model"
    rows = [
        (
            "experiment",
            f"{shown_path(plan.experiment_dir)}" + (f"  ({done} of {total} trials are in its ledger)" if done else ""),
        ),
        ("search", search + f", {total} trials"),
        (
            "",
            f"method {', '.join(space.method)}; seq_len {_list(space.seq_len)}; num_samples {_list(space.num_samples)}",
        ),
        *_shape(plan),
        ("calibration", f"{shown_path(first.run.calibration)}, seed {first.run.seed}"),
        (
            "evaluation",
            f"perplexity on {'the embedded text' if uses_embedded_data(first.run) else 'WikiText-2 test'}; "
            f"{len(protocol.tasks)} zero-shot tasks, {items}",
        ),
        ("", ", ".join(protocol.tasks)),
        (
            "stages",
            ", ".join([*(statistic.stage for statistic in statistics), "pruning", "perplexity", "zero-shot "])
            + " / ".join(f"{100 * f:.4g}%" for f in protocol.slices),
        ),
        ("shared", f"{passes}1 dense baseline a model"),
        ("resources", _resources(plan)),
        ("memory", _memory(plan.memory)),
    ]
    lines = [f"{name:<12} {text}" for name, text in rows]
    table = [
        (
            "model",
            "parameters",
            f"remove {plan.pruning_ratio:.4g}",
            "removable",
            "layers",
            "KV group",
            "MLP channel",
            "dtype",
        )
    ]
    for model in plan.models:
        g = model.geometry
        table.append(
            (
                model.run.label,
                f"{g.total_params:,}",
                f"{model.target_params:,}",
                f"{shapes.removal_bounds(g, model.shape).most:,}",
                str(g.num_layers),
                f"{max(g.kv_heads)} x {max(g.group_cost):,}",
                f"{max(g.mlp_width)} x {max(g.channel_cost):,}",
                model.run.dtype,
            )
        )
    lines += ["", *_aligned(table), "", *_cost(plan)]
    return "\n".join(lines)


def _shape(plan: Plan) -> list[tuple[str, str]]:
    """What the pruned layers will look like, unless they are free."""
    if plan.shape == "free":
        return []
    if plan.shape == "uniform":
        by_model = {model.run.label: _list(model.geometry.uniform_kv_heads) for model in plan.models}
        return [
            (
                "shape",
                f"uniform: one MLP width for all layers, and one of {_by_model('{} KV groups', by_model)} in each",
            )
        ]
    by_model = {model.run.label: str(alignment(model.shape)) for model in plan.models}
    return [
        (
            "shape",
            f"aligned: MLP widths in multiples of {_by_model('{}', by_model)}, at least one KV group in every layer",
        )
    ]


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
    """The cost as a table of stages, and the whole in one line."""
    cost = plan.cost
    if cost is None:
        return ["cost         not predicted: no worker of the cluster was free to measure its speed"]
    if not cost.wall_seconds:
        return ["cost         nothing is left to compute"]
    about = any("~" in note for note in cost.notes)
    table = [("stage", "times", "tokens", "FLOPs", "time")]
    for stage in cost.stages():
        tokens = f"{'~' if about and stage.stage == 'zero_shot' else ''}{stage.tokens:,}" if stage.tokens else "-"
        flops = f"{stage.flops:.1e}" if stage.flops else "-"
        table.append((stage.stage, str(stage.runs), tokens, flops, duration(stage.seconds)))
    workers = f"{cost.slots} worker{'s' if cost.slots > 1 else ''}"
    gpus = f", {cost.gpu_hours:.2g} GPU-hours" if cost.gpu_hours else ""
    total = f"cost         about {duration(cost.wall_seconds)} on {workers}{gpus}"
    return [*_aligned(table), "; ".join([total, *cost.notes])]


def _memory(plan: MemoryPlan) -> str:
    """Where the peak of a trial comes from."""
    return (
        f"a trial {_bytes(plan.total)}: process {_bytes(plan.process)}, dense weights {_bytes(plan.weights)}, and either gradients "
        f"{_bytes(plan.accumulators)} + activations {_bytes(plan.statistics_activations)} or pruned {_bytes(plan.pruned)} + "
        f"activations {_bytes(plan.evaluation_activations)}"
    )


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _resources(plan: Plan) -> str:
    settings, each = plan.settings, plan.resources
    where = (
        f"cluster {settings.address}"
        if settings.address
        else f"this machine: {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs"
    )
    return (
        f"{where}; a trial takes CPU {each.cpus:g}, GPU {each.gpus:g} and about {_bytes(plan.memory.total)}; {plan.slots} at once; "
        f"scheduler {settings.scheduler}"
    )


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def shown_path(path: Path | str) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
