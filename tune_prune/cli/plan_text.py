"""The plan of a search as text for the screen: configurations, data, stages, resources, each model's budget, the cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from tune_prune.analysis.cost import between, duration, passes
from tune_prune.checkpoint.sizes import aligned
from tune_prune.cli.resources_text import (
    dtype_lines,
    held,
    listed,
    memory_lines,
    node_lines,
    resources_line,
    unseen_gpu_lines,
)
from tune_prune.core.config import ModelRun, alignment, group_labels
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.core.store import Location, ObjectPath
from tune_prune.core.values.hyperparameters import HYPERPARAMETERS, Hyperparameter
from tune_prune.core.values.kinds import texts_of
from tune_prune.cost_model.device_speed import REACHED
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.data.sources import perplexity_text_name
from tune_prune.planning.plan import Plan
from tune_prune.planning.recoveries import expected
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import in_pass_order, load_statistic, parse


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
    made = listed([passes(prod(groups), statistic.label) for statistic in statistics])
    if made:
        per = [
            name
            for name, count in zip(("seq_len", "draw", "text"), groups, strict=True)
            if count > 1 or name == "seq_len"
        ]
        each = f"one {'of each ' if len(statistics) > 1 else ''}per {listed(per)}"
        made += f" a model, {each}; " if space.search == "grid" else " a model at most, as seq_len are visited; "
    rows = [
        (
            "experiment",
            f"{shown_path(plan.experiment_dir)}" + (f"  ({done} of {total} trials are in its ledger)" if done else ""),
        ),
        ("search", f"{_search(plan)}, {'at most ' if plan.settings.draws or recover else ''}{total} trials"),
        ("", "; ".join(f"{row.name} {listed(space.values[row.name])}" for row in _searched(plan))),
        *_shapes(plan),
        *(("recovery", f"up to {recover} {one} trained, once all others are measured") for one in _trained(plan)),
        *(("weights", f"{model.run.label}: {model.found_as}") for model in plan.models if model.found_as),
        *(("" if index else "calibration", line) for index, line in enumerate(_calibration(plan))),
        (
            "evaluation",
            f"perplexity on {perplexity_text_of(first.run)}; {len(protocol.tasks)} zero-shot tasks, {items}",
        ),
        ("", ", ".join(protocol.tasks)),
        *(("warning", f"{model.run.label}: {note}") for model in plan.models for note in model.workload.notes),
        (
            "stages",
            ", ".join([*(statistic.stage for statistic in statistics), *_model_stages(plan), "zero-shot "])
            + " / ".join(f"{100 * f:.4g}%" for f in protocol.slices),
        ),
        ("shared", f"{made}1 dense baseline a model"),
        ("resources", resources_line(plan)),
        *(("GPU", line) for line in unseen_gpu_lines(plan)),
        *(("dtype", line) for line in dtype_lines(plan)),
        *(("nodes" if index == 0 else "", line) for index, line in enumerate(node_lines(plan))),
        *(("" if index else "memory", line) for index, line in enumerate(memory_lines(plan))),
    ]
    lines = [f"{name:<12} {text}" for name, text in rows]
    return "\n".join([*lines, "", *aligned(_models(plan)), "", *_cost(plan)])


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
    texts = {"embedded": "the embedded text", "wikitext2": "WikiText-2 test"}
    text = texts.get(perplexity_text_name(run), f"a text that is not WikiText-2 ({TEXT_FILE})")
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
        return f"seed {seeds[0]}; up to {len(seeds)} draws (seeds {listed(seeds)}) of what may still be the best{by}"
    return f"seed {listed(seeds)}" if len(seeds) == 1 else f"{len(seeds)} draws, seeds {listed(seeds)}"


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
    """What the pruned layers will look like, and how fast they are: a line for each kind of shape, unless all models are small and
    all shapes free."""
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    found: dict[tuple[int, str], dict[str, str]] = {}  # place in the list and kind -> model -> the N of its MLP widths
    for model in plan.models:
        for index, shape in enumerate(model.shapes):
            found.setdefault((index, shape.partition("-")[0]), {})[model.run.label] = str(alignment(shape) or 1)
    if list(found) == [(0, "free")] and not large:
        return []
    heads = {model.run.label: listed(model.geometry.uniform_kv_heads) for model in plan.models}
    lines = []
    for (_, kind), multiples in sorted(found.items()):
        of = f" ({', '.join(multiples)})" if len(multiples) < len(plan.models) else ""
        if kind == "free":
            lines.append(f"free: each layer has its own widths{of}{_SLOW if large else ''}")
        elif kind == "uniform":
            any_width = set(multiples.values()) == {"1"}
            width = "width" if any_width else f"width, a multiple of {_by_model('{}', multiples)},"
            groups, slow = _by_model("{} KV groups", heads), _ODD if any_width and large else ""
            lines.append(f"uniform: one MLP {width} for all layers, and one of {groups} in each{of}{slow}")
        else:
            widths = f"MLP widths in multiples of {_by_model('{}', multiples)}, at least one KV group in every layer"
            lines.append(f"aligned: {widths}{of}{_FAST if large else ''}")
    return [("" if index else "shape", line) for index, line in enumerate(lines)]


# Mistral-7B's shape with 20% removed on an H100, beside the dense model (docs/gpu.md)
_SLOW = "; on a GPU it took 2.2 times the dense model's time at 7B, where --shape aligned took 75%"
_FAST = "; on a GPU it took 75% of the dense model's time at 7B, where --shape free took 2.2 times as long"

_ODD = "; on a GPU matrix products of a width that is no multiple of 8 took seven times as long"


def _by_model(text: str, values: Mapping[str, str]) -> str:
    """`text` with its value filled in; with each model's where they differ."""
    if len(set(values.values())) == 1:
        return text.format(next(iter(values.values())))
    return "; ".join(f"{text.format(value)} ({label})" for label, value in values.items())


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
        table.append((name.replace("_", "-"), *numbers, *held(plan, name)))
    if cost is None:
        why = "no worker of the cluster was free to measure its speed"
        if plan.card:
            step = "leave out --dtype" if plan.card.peaks else "name its kind, e.g. --gpu 4090"
            why = f"how fast such a GPU is in {plan.models[0].run.dtype} is not known; {step}"
        return [*aligned(table), f"cost         not predicted: {why}"]
    workers = f"{cost.slots} worker{'s' if cost.slots > 1 else ''}"
    gpus = f", {cost.gpu_hours:.2g} GPU-hours" if cost.gpu_hours else ""
    how = f"measured at {cost.load}"
    if plan.card:
        peak = plan.card.peaks[plan.models[0].run.dtype] / 1e12
        how = f"computed, not measured: at {REACHED:.0%} of {peak:g} TFLOP/s, which small models do not reach"
    total = f"cost         about {between(cost.wall_range)} on {workers}{gpus}, {how}"
    return [*aligned(table), "; ".join([total, *cost.notes])]


def shown_path(path: Location | str) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    if isinstance(path, ObjectPath):
        return str(path)
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
