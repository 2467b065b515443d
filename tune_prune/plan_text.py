"""The plan of a search as text for the screen: configurations, data, stages, resources and each model's budget."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tune_prune.preflight import Plan
from tune_prune.pruning.methods import load_method
from tune_prune.trial import uses_embedded_data


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
    kinds = {kind for method in space.method for kind in load_method(method).removals}
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
        ("calibration", f"{shown_path(first.run.calibration)}, seed {first.run.seed}"),
        (
            "evaluation",
            f"perplexity on {'the embedded text' if uses_embedded_data(first.run) else 'WikiText-2 test'}; "
            f"{len(protocol.tasks)} zero-shot tasks, {items}",
        ),
        ("", ", ".join(protocol.tasks)),
        (
            "stages",
            "importance, removal, pruning, perplexity, zero-shot " + " / ".join(f"{f:.0%}" for f in protocol.slices),
        ),
        (
            "shared",
            f"{len(space.seq_len)} gradient passes and {len(space.seq_len) * len(kinds)} removal passes a model, one per seq_len"
            f"{' and kind' if len(kinds) > 1 else ''}; 1 dense baseline a model",
        ),
        ("resources", _resources(plan)),
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
                f"{g.prunable_params:,}",
                str(g.num_layers),
                f"{max(g.kv_heads)} x {max(g.group_cost):,}",
                f"{max(g.mlp_width)} x {max(g.channel_cost):,}",
                model.run.dtype,
            )
        )
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines.append("")
    lines += [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join(lines)


def _resources(plan: Plan) -> str:
    settings, each = plan.settings, plan.resources
    where = (
        f"cluster {settings.address}"
        if settings.address
        else f"this machine: {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs"
    )
    memory = plan.trial_bytes
    size = f"{memory / 2**30:.1f} GiB" if memory >= 2**30 else f"{memory / 2**20:.0f} MiB"
    return (
        f"{where}; a trial takes CPU {each.cpus:g}, GPU {each.gpus:g} and about {size}; {plan.slots} at once; "
        f"scheduler {settings.scheduler}"
    )


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def shown_path(path: Path | str) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
