"""The plan of a search as text for the screen: `summary`, in about ten lines with the answer first (how many ways to prune, how
long, whether it fits), and `details`, the whole of it for --verbose (configurations, data, stages, resources, each model's
budget, cost).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from tune_prune.analysis.cost import between, duration
from tune_prune.checkpoint.layers import aligned
from tune_prune.core import machine
from tune_prune.core.config import OTHER_TEXT, ModelRun, PruningConfig, alignment, group_labels
from tune_prune.core.hyperparameters import HYPERPARAMETERS, Hyperparameter
from tune_prune.core.kinds import texts_of
from tune_prune.core.machine import size
from tune_prune.core.records import MODEL_STAGES, RECIPE_STAGES, in_order
from tune_prune.core.store import Location, ObjectPath
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.data.sources import perplexity_text_name
from tune_prune.models.loading import WIDE
from tune_prune.models.runner.devices import bfloat16_speed, fast_at_bfloat16
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import in_pass_order, load_statistic, parse
from tune_prune.tuning.cost import REACHED
from tune_prune.tuning.memory import MemoryPlan
from tune_prune.tuning.plan import ModelPlan, Plan

WIDTH, _NAMES = 120, 13  # columns of a line, and of the name before it
NAMED_TESTS = 3  # so many benchmarks have their names in the line of the tests

Row = tuple[str, str]  # its name, and what it says


def summary(plan: Plan) -> str:
    """Return the plan in about ten lines."""
    first, done = plan.models[0], trials(plan) - plan.left
    rows = [
        ("plan", _ways(plan)),
        ("time", _time(plan)),
        ("memory", fit_line(plan)),
        *_models(plan),
        ("sample text", _sample_text(plan)),
        ("tests", tests(first.run)),
        *_shape(plan),
        *(("warning", f"{model.run.label}: {note}") for model in plan.models for note in model.workload.warnings),
        *(("warning", line) for line in to_mend(plan)),
        *_cluster(plan),
        ("results", shown_path(plan.experiment_dir) + done_so_far(plan, done)),
        ("details", "--verbose says what each step takes: time, tokens, memory"),
    ]
    return "\n".join(lines(rows))


def lines(rows: Iterable[Row]) -> list[str]:
    """Return the lines of these rows: several where a text is wider than a screen, broken between words."""
    wrapped = []
    for name, text in rows:
        parts = [text]
        if "  " not in text:  # else it is a table's
            parts = textwrap.wrap(
                text, WIDTH - _NAMES, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
            )
        wrapped += [f"{name if index == 0 else '':<12} {part}" for index, part in enumerate(parts)]
    return wrapped


def trials(plan: Plan) -> int:
    """Return how many trials the search comes to, at most."""
    if plan.settings.recover is None:
        return plan.trials_per_model * len(plan.models)
    return sum(len(plan.expected(model.configs)) for model in plan.models)


def ways(plan: Plan) -> int:
    """Count the configurations that are compared of each model at each pruning ratio, whatever sample text they are given."""
    searched = (config for config in plan.models[0].configs if not plan.is_withheld(config))
    return len({replace(config, seed=None, pruning_ratio=PruningConfig.pruning_ratio) for config in searched})


def done_so_far(plan: Plan, done: int) -> str:
    return f" ({done:,} of {trials(plan):,} trials are done)" if done else ""


def _ways(plan: Plan) -> str:
    settings, values, several = plan.settings, plan.space.values, len(plan.models) > 1
    number = picked = ways(plan)
    count = f"{number:,} way{'s' * (number != 1)}"
    if plan.space.search == "optuna":
        number = max(plan.group_sizes)
        picked = min(plan.space.num_trials or number, number)
        count = f"optuna tries {picked:,} of {number:,} ways"
    by = " and ".join(f"{100 * ratio:.4g}%" for ratio in values["pruning_ratio"])
    if plan.space.search == "optuna" and len(values["recovery"]) > 1:
        by += ", both without and with a short training"
    text = f"{count} to prune {'each' if several else 'it'} by {by}, each tested"
    if settings.draws is not None:
        text += f" once; those that could be the best up to {settings.draws} times, with other sample text"
    elif (runs := len(values["seed"])) > 1:
        text += f" {runs} times, with other sample text"
    if settings.recover is not None:
        each = " and ".join(["model"] * several + ["ratio"] * (len(values["pruning_ratio"]) > 1))
        best = f"most promising{f' of each {each}' * bool(each)}"
        best = f"{best} gets" if settings.recover == 1 else f"{settings.recover} {best} get"
        text += f"; then the {best} a short training"
    total, most = trials(plan), "at most " * bool(settings.draws or settings.recover)
    if total != picked:
        text += f"; {most}{total:,} trials"
    at_once = "one after the other" if plan.slots == 1 else f"{plan.slots} at once"
    label = f"{len(plan.models)} models" if several else plan.models[0].run.label
    return f"{label}: {text}; {at_once}"


def _time(plan: Plan) -> str:
    cost = plan.cost
    if cost is None:
        return f"not known: {unpredicted(plan)}"
    if not cost.wall_seconds:
        return "nothing is left to compute"
    less = ", or less" * any("upper bound" in note for note in cost.notes)
    gpu_hours = f" ({cost.gpu_hours:.2g} GPU-hours)" * bool(cost.gpu_hours)
    where = "by the speed measured here"
    if plan.card:
        where = f"computed for {plan.card.count} x {plan.card.name}, not measured"
    elif plan.settings.address:
        where = "by the speed measured on the cluster"
    return f"{between(cost.wall_range)}{gpu_hours}{less}; {where}"


def unpredicted(plan: Plan) -> str:
    """Say why there is no prediction, and what gives one."""
    if plan.card is None:
        return "no worker of the cluster was free to measure its speed"
    step = "leave out --dtype" if plan.card.peaks else "name its kind, e.g. --gpu 4090"
    return f"how fast such a GPU is in {plan.models[0].run.dtype} is not known; {step}"


def _models(plan: Plan) -> list[Row]:
    """Count the parameters, and how many of them go: a sentence for one model, a table of several."""
    ratios = plan.space.values["pruning_ratio"]
    if len(plan.models) == 1:
        (model,) = plan.models
        going = [f"{model.targets[ratio]:,}" + f" ({100 * ratio:.4g}%)" * (len(ratios) > 1) for ratio in ratios]
        return [("model", f"{model.geometry.total_params:,} parameters, {' or '.join(going)} of them to go")]
    head = ("", "parameters", *(f"to go, {100 * ratio:.4g}%" for ratio in ratios), "memory a trial")
    table = aligned([head, *(_row(model, ratios) for model in plan.models)])
    return [("models" if index == 0 else "", line) for index, line in enumerate(table)]


def _row(model: ModelPlan, ratios: Sequence[float]) -> tuple[str, ...]:
    how = held_in_words(model.memory)
    numbers = [f"{count:,}" for count in (model.geometry.total_params, *(model.targets[ratio] for ratio in ratios))]
    return (model.run.label, *numbers, size(model.memory.total) + f", {how}" * bool(how))


def _sample_text(plan: Plan) -> str:
    run, configs = plan.models[0].run, list(plan.models[0].configs)
    recipes = any(config.compensation != "none" or config.recovery != "none" for config in configs)
    if not recipes and not any(load_method(method).statistics for method in plan.space.values["method"]):
        return "none: what is searched reads no data"
    texts = dict.fromkeys(run.of(config).calibration for config in configs)
    shown = listed("+".join(str(shown_path(part)) for part in texts_of(text)) for text in texts)
    counts, lengths = (plan.space.values[name] for name in ("num_samples", "seq_len"))
    return f"{shown}: {_one_of(counts)} samples of {_one_of(lengths)} tokens"


def _one_of(values: Collection[int]) -> str:
    """Write few values by name, of many the ends."""
    ordered = [f"{value:,}" for value in sorted(values)]
    if len(ordered) > 5:
        return f"{ordered[0]} to {ordered[-1]}"
    return " or ".join(filter(None, (", ".join(ordered[:-1]), ordered[-1])))


def tests(run: ModelRun) -> str:
    """Say in words on what every pruned model is measured."""
    protocol = run.protocol
    count, most = len(protocol.tasks), protocol.limit
    questions = "all questions" if most is None else f"at most {most:,} question{'s' * (most > 1)} each"
    names = f" ({listed(protocol.tasks)})" if count <= NAMED_TESTS else ""
    toy = "toy " * (
        perplexity_text_name(run) == "embedded"
    )  # their questions are no more than named like the real ones
    return f"perplexity on {perplexity_text_of(run)}; {count} {toy}benchmark{'s' * (count > 1)}{names}, {questions}"


def perplexity_text_of(run: ModelRun) -> str:
    """Say in words on what perplexity is measured, e.g. 'WikiText-2 test'."""
    texts = {"embedded": "the embedded text", "wikitext2": "WikiText-2 test"}
    text = texts.get(perplexity_text_name(run), OTHER_TEXT.format(file=TEXT_FILE))
    return text if (most := run.protocol.perplexity_tokens) is None else f"the first {most:,} tokens of {text}"


def matters(plan: Plan) -> bool:
    """Return whether there is anything to say of the shapes: not of small models with free ones."""
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    return large or any(model.shapes != ("free",) for model in plan.models)


def _shape(plan: Plan) -> list[Row]:
    """Return a line for each shape, with when to choose another; none where that does not matter."""
    if not matters(plan):
        return []
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    shapes_told = dict.fromkeys((shape, _of_shape(shape, large)) for model in plan.models for shape in model.shapes)
    rows = [("" if index else "shape", f"{shape}: {says}") for index, (shape, says) in enumerate(shapes_told)]
    return [*rows, ("", "it is a part of the search: choose it now, with --shape")]


def _of_shape(shape: str, large: bool) -> str:
    kind = shape.partition("-")[0]
    if kind == "free":
        return (
            "any widths, for transformers, vLLM and llama.cpp"
            + "; slow on a GPU, where --shape aligned takes a third of the time" * large
        )
    if kind == "aligned":
        return "fast on a GPU, quantises well; to load without extra code choose --shape uniform"
    odd = large and alignment(shape) is None
    return "loads in whatever loads the family" + "; slow on a GPU, faster with --align 256" * odd


def _cluster(plan: Plan) -> list[Row]:
    if not (workers := [node for node in plan.nodes if node.runs_trials]):
        return []
    gpus, many = sum(node.resources.get("GPU", 0) for node in workers), len(workers) > 1
    machines = f"{len(workers)} machine{'s' * many} for trials, {gpus:g} GPU{'s' * (gpus != 1)}"
    return [("cluster", machines + "; all have the same software, models and data" * many)]


def shown_path(path: Location | str) -> str:
    """A path as a person would type it: relative where it lies below the current folder."""
    if isinstance(path, ObjectPath):
        return str(path)
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def details(plan: Plan) -> str:
    """Return the whole plan."""
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
    return "\n".join([*lines(rows), *nodes, "", *aligned(_table_of_models(plan)), "", *_cost(plan)])


def _rows(name: str, texts: list[str]) -> list[Row]:
    return [("" if index else name, text) for index, text in enumerate(texts)]


def _table(rows: list[str], name: str) -> list[str]:
    """Return a table's lines with the name before the first; its columns stay as they are, however wide."""
    return [f"{'' if index else name:<12} {row}" for index, row in enumerate(rows)]


def _shared(plan: Plan, labels: list[str]) -> list[Row]:
    """Say what is done once for all trials of a model."""
    groups = {name: len(plan.space.values[name]) for name in ("seq_len", "seed", "calibration")}
    per = [name for name, count in groups.items() if count > 1 or name == "seq_len"]
    count = prod(groups.values())
    runs = f"{'' if plan.space.search == 'grid' else 'at most '}{count} run{'s' * (count > 1)}"
    made = f"; {runs} of the sample text for each of: {listed(labels)} (one per {listed(per)})" * bool(labels)
    return [("shared", f"by the trials of a model: the test of the original{made}")]


def _model_stages(plan: Plan) -> list[str]:
    """Return the stages between the statistics and the zero-shot slices, e.g. ['pruning', 'kl', 'perplexity']."""
    usual = {switch: {HYPERPARAMETERS[switch].default} for switch in RECIPE_STAGES.values()}
    wanted = {switch: set(plan.space.values[switch]) != default for switch, default in usual.items()}
    return [stage for stage in MODEL_STAGES[:-1] if wanted.get(RECIPE_STAGES.get(stage, ""), True)]


def _trained(plan: Plan) -> list[Row]:
    """Say which configurations --recover may train; nothing without it."""
    if plan.settings.recover is None:
        return []
    each = "each model" + " and pruning ratio" * (len(plan.space.values["pruning_ratio"]) > 1)
    text = f"once all are tested, up to {plan.settings.recover} of {each} get a short training: the most promising"
    return [("recovery", text)]


def _searched(plan: Plan) -> list[Hyperparameter]:
    """Return the hyperparameters that every space names, and of the others those with several values or one off its default;
    shapes and --recover have lines of their own, and a single ratio is in the table of models."""
    usual = {"shape": (plan.space.values["shape"][0],), "pruning_ratio": plan.space.values["pruning_ratio"][:1]}
    if plan.settings.recover is not None:
        usual["recovery"] = plan.space.values["recovery"]
    return [
        row
        for name, row in HYPERPARAMETERS.items()
        if row.required or plan.space.values[name] != usual.get(name, (row.default,))
    ]


def _search(plan: Plan) -> str:
    """Say how the configurations are searched, how many they are, and how many trials that makes."""
    space = plan.space
    most = "at most " * bool(plan.settings.draws or plan.settings.recover)
    total = f"{most}{trials(plan)} trials"
    if space.search == "optuna":
        of = [name for name in ("pruning_ratio", "recovery") if len(space.values[name]) > 1]
        each = " and ".join(["a model", *(HYPERPARAMETERS[name].label.lower() for name in of)])
        goal = "" if plan.objective == "accuracy" else f", by {plan.objective}"
        count = f"{space.num_trials} of {max(plan.group_sizes)} configurations {each}{goal}"
        return f"optuna (TPE) on {space.name}: {count}, {total}"
    points = sum(not plan.is_withheld(config) for config in plan.models[0].configs)
    # What a training reads, of which --recover tries the best of the others only, is no factor of these
    factors = [row for row in _searched(plan) if plan.settings.recover is None or row.switch != "recovery"]
    lists = [f"{len(space.values[row.name])} {'methods' if row.name == 'method' else row.name}" for row in factors]
    product = prod(len(space.values[row.name]) for row in factors)
    found = str(points) if product == points else f"{product} points, {points} distinct"
    return f"grid over {space.name}: {' x '.join(lists)} = {found} configurations a model, {total}"


def _calibration(plan: Plan) -> list[str]:
    """The texts, and how often samples are drawn from each."""
    run, kind = plan.models[0].run, HYPERPARAMETERS["calibration"].kind
    texts = list(dict.fromkeys(run.of(config).calibration for config in plan.models[0].configs))
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
    """Say how often samples are drawn, and by which seeds."""
    seeds = [plan.settings.seed if seed is None else seed for seed in plan.space.values["seed"]]
    if plan.settings.draws is not None:
        by = f" by {plan.settings.draws_by}"
        return f"seed {seeds[0]}; up to seeds {listed(seeds)} for configurations that could still be the best{by}"
    return f"seed {listed(seeds)}" if len(seeds) == 1 else f"seeds {listed(seeds)}: as many runs of each configuration"


def _table_of_models(plan: Plan) -> list[tuple[str, ...]]:
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
    """Say what the pruned layers will look like, and how fast they are: a line for each kind of shape, unless all models are
    small and all shapes free."""
    if not matters(plan):
        return []
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    # Place in the list and kind -> model -> the N of its MLP widths
    by_kind: dict[tuple[int, str], dict[str, str]] = {}
    for model in plan.models:
        for index, shape in enumerate(model.shapes):
            by_kind.setdefault((index, shape.partition("-")[0]), {})[model.run.label] = str(alignment(shape) or 1)
    heads = {model.run.label: listed(model.geometry.uniform_kv_heads) for model in plan.models}
    rows = []
    for (_, kind), multiples in sorted(by_kind.items()):
        of = f" ({', '.join(multiples)})" if len(multiples) < len(plan.models) else ""
        if kind == "free":
            rows.append(f"free: each layer has its own widths{of}{_SLOW if large else ''}")
        elif kind == "uniform":
            any_width = set(multiples.values()) == {"1"}
            width = "width" if any_width else f"width, a multiple of {_by_model('{}', multiples)},"
            groups, slow = _by_model("{} KV groups", heads), _ODD if any_width and large else ""
            rows.append(f"uniform: one MLP {width} for all layers, and one of {groups} in each{of}{slow}")
        else:
            widths = f"MLP widths in multiples of {_by_model('{}', multiples)}, at least one KV group in every layer"
            rows.append(f"aligned: {widths}{of}{_FAST if large else ''}")
    return [("" if index else "shape", line) for index, line in enumerate(rows)]


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


NVIDIA = Path("/dev/nvidiactl")  # there where a driver is loaded


def fit_line(plan: Plan) -> str:
    """Say what a trial takes of what there is: a plan exists only where it fits."""
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
    """Say how a trial does without the whole model in memory; empty where it has it there."""
    way, parts = memory.way, []
    if way.streamed:
        parts.append("weights read from disk while it works")
    elif way.gradients_by_layer:
        parts.append("layer by layer")
    if memory.away:
        parts.append(f"{size(memory.away)} more {_PLACES[way.states]}")
    return ", ".join(parts)


_PLACES = {"host": "in main memory", "file": "on disk (in TMPDIR)"}


def memory_lines(plan: Plan) -> list[str]:
    """Say where the peak of a trial comes from, and what waits elsewhere."""
    memory, largest = plan.memory, plan.memory.largest
    weights = f"the original's weights {size(memory.weights)}" if memory.weights else "weights stay on disk"
    lines = [
        f"{size(memory.total)} a trial: the process {size(memory.process)}, {weights}",
        f"most in stage {largest.stage.replace('_', '-')}: {size(largest.held)}, and {size(largest.activations)} of activations",
    ]
    for model in plan.models:
        if (memory_plan := model.memory).way != model.ways[0].way:
            copies = ", pruned copies whole in memory" if memory_plan.way.pruned_whole else ""
            lines.append(
                f"{model.run.label}: {held_in_words(memory_plan)}{copies}; with the whole model in memory a trial would take "
                f"{size(model.ways[0].total)}"
            )
    for name, ways in plan.gpu_ways.items():
        lines.append(f"on {name}: {'; '.join(f'{label} {_way(way)}' for label, way in ways.items())}")
    return lines


def _way(way: Residency) -> str:
    """Name the way of a whole trial: its stages say for themselves where a pruned copy is."""
    return f"{way}{', pruned copies whole' if way.pruned_whole else ''}"


def way_lines(plan: Plan) -> list[str]:
    """Explain the words that the column `way` has."""
    stages = [stage.way for model in plan.models for stage in model.memory.stages]
    return [f"{word}: {means}" for word, means in _WAYS.items() if any(word in way for way in stages)]


_WAYS = {
    "resident": "the whole model is where it computes",
    "by layer": "gradients of one layer after the other, with the weights where it computes",
    "streamed": "weights are read from disk while it works, a layer at a time",
    "states in a file": "what is between two layers waits on disk, in TMPDIR",
}


def held(plan: Plan, name: str) -> tuple[str, str]:
    """The peak of a stage, and in which way models are held, of all that differ."""
    stages = [(model.memory, stage) for model in plan.models for stage in model.memory.stages if stage.stage == name]
    ways = dict.fromkeys(stage.way for _, stage in stages)
    return size(max(memory.peak(stage) for memory, stage in stages)), " / ".join(ways)


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
    """List what makes trials slower than they need be and does not mend itself, each with what does."""
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
    """Return whether there is a GPU that trials do not use, though nobody has asked for that."""
    here = plan.settings.address is None and plan.card is None and NVIDIA.exists()
    return here and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not torch.cuda.is_available()


def _on_cpu_here(plan: Plan) -> bool:
    return not plan.resources.gpus and not plan.settings.address


def dtype_lines(plan: Plan) -> list[str]:
    """Say which data type trials compute in and why, where that is not plain and `to_mend` says nothing of it: by how weights are
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
    """Say what each node of the cluster has, a line for each below what all have."""
    workers = [node for node in plan.nodes if node.runs_trials]
    if not workers:
        return []
    table: list[tuple[str, ...]] = [("", "CPUs", "memory", "GPUs", "clock")]
    for node in plan.nodes:
        cpus, gpus = node.resources.get("CPU", 0), node.resources.get("GPU", 0)
        cells = ("-", "no trials here", "-")
        if node.memory is not None:
            kinds = ", ".join(sorted({gpu.name for gpu in node.gpus}))
            free = min((gpu.memory.available for gpu in node.gpus), default=0)
            total = min((gpu.memory.total for gpu in node.gpus), default=0)
            cells = (
                f"{size(node.memory.available)} of {size(node.memory.total)} free",
                f"{gpus:g} {kinds}, {size(free)} of {size(total)} free" if kinds else f"{gpus:g}",
                f"{node.skew_s:+.0f} s" if node.skew_s else "equal",
            )
        table.append((node.name, f"{cpus:g}", *cells))
    versions = ", ".join(f"{name} {version}" for name, version in workers[0].versions.items())
    return [f"{len(plan.nodes)}, all with {versions}; one storage, the same models and data", *aligned(table)]


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
