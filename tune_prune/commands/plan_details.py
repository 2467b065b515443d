"""The whole plan of a search as text for the screen, for --verbose: configurations, data, stages, resources, each model's budget,
the cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tune_prune.analysis.cost import between, duration
from tune_prune.checkpoint.layers import aligned
from tune_prune.commands.plan_text import (
    NAMED_TESTS,
    Row,
    done_so_far,
    lines,
    matters,
    shown_path,
    tests,
    trials,
    unpredicted,
)
from tune_prune.commands.resources_text import (
    dtype_lines,
    held,
    listed,
    memory_lines,
    node_lines,
    resources_line,
    to_mend,
    way_lines,
)
from tune_prune.core.config import alignment, group_labels
from tune_prune.core.hyperparameters import HYPERPARAMETERS, Hyperparameter
from tune_prune.core.kinds import texts_of
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import in_pass_order, load_statistic, parse
from tune_prune.tuning.cost import REACHED
from tune_prune.tuning.plan import Plan
from tune_prune.tuning.rounds import is_withheld


def describe(plan: Plan) -> str:
    """The plan as text for the screen."""
    space, first = plan.space, plan.models[0]
    methods = space.values["method"]
    used = in_pass_order(parse(name)[0] for method in methods for name in load_method(method).statistics)
    statistics = [load_statistic(name) for name in used]
    parts = " / ".join(f"{100 * share:.4g}%" for share in first.run.protocol.slices)
    rows = [
        ("experiment", f"{shown_path(plan.experiment_dir)}{done_so_far(plan, trials(plan) - plan.left)}"),
        ("search", _search(plan)),
        *_rows("", [f"{row.name} {listed(space.values[row.name])}" for row in _searched(plan)]),
        *_shapes(plan),
        *_trained(plan),
        *(("weights", f"{model.run.label}: {model.found_as}") for model in plan.models if model.found_as),
        *_rows("sample text", _calibration(plan)),
        ("tests", tests(first.run)),
        *(("", listed(tasks)) for tasks in [first.run.protocol.tasks] if len(tasks) > NAMED_TESTS),
        *(("warning", f"{model.run.label}: {note}") for model in plan.models for note in model.workload.notes),
        *(("warning", line) for line in to_mend(plan)),
        ("stages", listed([*(one.stage for one in statistics), *_model_stages(plan), "zero-shot"])),
        ("", f"zero-shot in parts, so that a trial can be stopped early: {parts} of all questions"),
        *_shared(plan, [one.label for one in statistics]),
        ("resources", resources_line(plan)),
        *_rows("dtype", dtype_lines(plan)),
        *_rows("memory", memory_lines(plan)),
    ]
    nodes = _table(node_lines(plan), "nodes")
    return "\n".join([*lines(rows), *nodes, "", *aligned(_models(plan)), "", *_cost(plan)])


def _rows(name: str, texts: list[str]) -> list[Row]:
    return [("" if index else name, text) for index, text in enumerate(texts)]


def _table(rows: list[str], name: str) -> list[str]:
    """Its columns as they are, however wide."""
    return [f"{'' if index else name:<12} {row}" for index, row in enumerate(rows)]


def _shared(plan: Plan, labels: list[str]) -> list[Row]:
    """What is done once for all trials of a model."""
    groups = {name: len(plan.space.values[name]) for name in ("seq_len", "seed", "calibration")}
    per = [name for name, count in groups.items() if count > 1 or name == "seq_len"]
    count = prod(groups.values())
    runs = f"{'' if plan.space.search == 'grid' else 'at most '}{count} run{'s' * (count > 1)}"
    made = f"; {runs} of the sample text for each of: {listed(labels)} (one per {listed(per)})" * bool(labels)
    return [("shared", f"by the trials of a model: the test of the original{made}")]


def _model_stages(plan: Plan) -> list[str]:
    """Those between the statistics and the zero-shot slices."""
    usual = {switch: {HYPERPARAMETERS[switch].default} for switch in RECIPE_STAGES.values()}
    wanted = {switch: set(plan.space.values[switch]) != found for switch, found in usual.items()}
    return [stage for stage in MODEL_STAGES[:-1] if wanted.get(RECIPE_STAGES.get(stage, ""), True)]


def _trained(plan: Plan) -> list[Row]:
    """Which may be trained by --recover; nothing without it."""
    if plan.settings.recover is None:
        return []
    each = "each model" + " and pruning ratio" * (len(plan.space.values["pruning_ratio"]) > 1)
    text = f"once all are tested, up to {plan.settings.recover} of {each} get a short training: the most promising"
    return [("recovery", text)]


def _searched(plan: Plan) -> list[Hyperparameter]:
    """Those that every space names, and of the others those with several values or one off its default; shapes and --recover have
    lines of their own, and a single ratio is in the table of models."""
    usual = {"shape": (plan.space.values["shape"][0],), "pruning_ratio": plan.space.values["pruning_ratio"][:1]}
    if plan.settings.recover is not None:
        usual["recovery"] = plan.space.values["recovery"]
    return [
        row
        for name, row in HYPERPARAMETERS.items()
        if row.required or plan.space.values[name] != usual.get(name, (row.default,))
    ]


def _search(plan: Plan) -> str:
    """How the configurations are searched, how many they are, and how many trials that makes."""
    space = plan.space
    most = "at most " * bool(plan.settings.draws or plan.settings.recover)
    total = f"{most}{trials(plan)} trials"
    if space.search == "optuna":
        of = [name for name in ("pruning_ratio", "recovery") if len(space.values[name]) > 1]
        each = " and ".join(["a model", *(HYPERPARAMETERS[name].label.lower() for name in of)])
        goal = "" if plan.objective == "accuracy" else f", by {plan.objective}"
        count = f"{space.num_trials} of {max(plan.group_sizes)} configurations {each}{goal}"
        return f"optuna (TPE) on {space.name}: {count}, {total}"
    points = sum(not is_withheld(plan, config) for config, _ in plan.models[0].trials)
    # What a training reads, of which --recover tries the best of the others only, is no factor of these
    factors = [row for row in _searched(plan) if plan.settings.recover is None or row.switch != "recovery"]
    lists = [f"{len(space.values[row.name])} {'methods' if row.name == 'method' else row.name}" for row in factors]
    product = prod(len(space.values[row.name]) for row in factors)
    found = str(points) if product == points else f"{product} points, {points} distinct"
    return f"grid over {space.name}: {' x '.join(lists)} = {found} configurations a model, {total}"


def _calibration(plan: Plan) -> list[str]:
    """The texts, and how often samples are drawn from each."""
    run, kind = plan.models[0].run, HYPERPARAMETERS["calibration"].kind
    texts = list(dict.fromkeys(run.of(config).calibration for config, _ in plan.models[0].trials))
    shown = []
    for text in texts:
        parts = texts_of(text)
        each = f" (equal parts of {len(parts)} texts, in turn)" if len(parts) > 1 else ""
        shown.append("+".join(str(shown_path(part)) for part in parts) + each)
    if len(texts) == 1:
        return [f"{shown[0]}, {_seeds(plan)}"]
    return [
        f"{len(texts)} texts, each with {_seeds(plan)}",
        *(f"{kind.short(t)}: {s}" for t, s in zip(texts, shown, strict=True)),
    ]


def _seeds(plan: Plan) -> str:
    """How often samples are drawn, and by which seeds."""
    seeds = [plan.settings.seed if seed is None else seed for seed in plan.space.values["seed"]]
    if plan.settings.draws is not None:
        by = f" by {plan.settings.draws_by}"
        return f"seed {seeds[0]}; up to seeds {listed(seeds)} for configurations that could still be the best{by}"
    return f"seed {listed(seeds)}" if len(seeds) == 1 else f"seeds {listed(seeds)}: as many runs of each configuration"


def _models(plan: Plan) -> list[tuple[str, ...]]:
    """The table of models and pruning ratios: what is removed of each, and what a KV group and an MLP channel cost."""
    ratios = plan.space.values["pruning_ratio"]
    cuts = {(model.run.label, ratio): (model.run.label, ratio, "none") for model in plan.models for ratio in ratios}
    labels = group_labels(cuts.values())
    remove = f"to go, {100 * ratios[0]:.4g}%" if len(ratios) == 1 else "to go"
    table: list[tuple[str, ...]] = [
        ("model", "parameters", remove, "removable", "layers", "KV groups", "MLP channels", "dtype")
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
    if not matters(plan):
        return []
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    found: dict[tuple[int, str], dict[str, str]] = {}  # place in the list and kind -> model -> the N of its MLP widths
    for model in plan.models:
        for index, shape in enumerate(model.shapes):
            found.setdefault((index, shape.partition("-")[0]), {})[model.run.label] = str(alignment(shape) or 1)
    heads = {model.run.label: listed(model.geometry.uniform_kv_heads) for model in plan.models}
    told = []
    for (_, kind), multiples in sorted(found.items()):
        of = f" ({', '.join(multiples)})" if len(multiples) < len(plan.models) else ""
        if kind == "free":
            told.append(f"free: each layer has its own widths{of}{_SLOW if large else ''}")
        elif kind == "uniform":
            any_width = set(multiples.values()) == {"1"}
            width = "width" if any_width else f"width, a multiple of {_by_model('{}', multiples)},"
            groups, slow = _by_model("{} KV groups", heads), _ODD if any_width and large else ""
            told.append(f"uniform: one MLP {width} for all layers, and one of {groups} in each{of}{slow}")
        else:
            widths = f"MLP widths in multiples of {_by_model('{}', multiples)}, at least one KV group in every layer"
            told.append(f"aligned: {widths}{of}{_FAST if large else ''}")
    return [("" if index else "shape", line) for index, line in enumerate(told)]


# Mistral-7B's shape with 20% removed on an H100, beside the original (docs/gpu.md)
_SLOW = "; on a GPU it took 2.2 times the original's time at 7B, where --shape aligned took 75%"
_FAST = "; on a GPU it took 75% of the original's time at 7B, where --shape free took 2.2 times as long"

_ODD = "; on a GPU matrix products of a width that is no multiple of 8 took seven times as long; --align 256 avoids it"


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
    ways = _table(way_lines(plan), "way")
    if cost is None:
        return [*aligned(table), *ways, *lines([("cost", f"not predicted: {unpredicted(plan)}")])]
    workers = f"{cost.slots} worker{'s' if cost.slots > 1 else ''}"
    gpus = f", {cost.gpu_hours:.2g} GPU-hours" if cost.gpu_hours else ""
    how = f"measured at {cost.load}"
    if plan.card:
        peak = plan.card.peaks[plan.models[0].run.dtype] / 1e12
        how = f"computed, not measured: at {REACHED:.0%} of {peak:g} TFLOP/s, which small models do not reach"
    total = f"about {between(cost.wall_range)} on {workers}{gpus}, {how}"
    return [*aligned(table), *ways, *lines(_rows("cost", [total, *cost.notes]))]
