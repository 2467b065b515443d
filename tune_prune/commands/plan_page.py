"""The plan of a search as text: `summary`, about ten lines with the answer first (how many ways to prune, how long, whether it
fits), and `details` for --verbose, which has below them what is searched and what every stage takes.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tune_prune.analysis.cost import between, duration
from tune_prune.checkpoint.layers import aligned
from tune_prune.core import machine
from tune_prune.core.config import BEGUN, OTHER_TEXT, ModelRun, PruningConfig, group_labels
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Shape, texts_of
from tune_prune.core.machine import size
from tune_prune.core.records import in_order
from tune_prune.core.store import Location, ObjectPath
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.data.sources import perplexity_text_name
from tune_prune.models.loading import WIDE
from tune_prune.models.runner.devices import bfloat16_speed, fast_at_bfloat16
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.tuning.cost import REACHED
from tune_prune.tuning.memory import MemoryPlan
from tune_prune.tuning.plan import ModelPlan, Plan

WIDTH, _NAMES = 120, 13  # columns of a line, and of the name before it
NAMED_TESTS = 3  # so many benchmarks have their names in the line of the tests

Row = tuple[str, str]  # its name, and what it says


def summary(plan: Plan, details: bool = True) -> str:
    """Return the plan in about ten lines; `details`: the last one says how to see more."""
    warnings = [(model.run.label, note) for model in plan.models for note in model.workload.warnings]
    more = [("details", "--verbose says what each step takes: time, tokens, memory")] if details else []
    return "\n".join(lines([*_rows(plan, warnings), *more]))


def details(plan: Plan) -> str:
    """Return the whole plan: the lines of `summary`, what is searched, and what a trial and every stage take."""
    space = plan.space
    usual = {"shape": space.values["shape"][:1], "pruning_ratio": space.values["pruning_ratio"][:1]}
    searched = [
        f"{name} {listed(space.values[name])}"
        for name, row in HYPERPARAMETERS.items()
        if row.required or space.values[name] != usual.get(name, (row.default,))
    ]
    rows = [
        *_rows(plan, [(model.run.label, note) for model in plan.models for note in model.workload.notes]),
        *(("weights", f"{model.run.label}: {model.found_as}") for model in plan.models if model.found_as),
        *_named("space", [space.name, *searched]),
        *_named("tasks", [listed(plan.models[0].run.protocol.tasks)]),
        ("resources", _resources(plan)),
        *_named("dtype", _dtypes(plan)),
        *_named("peak", _memory(plan)),
    ]
    nodes = [f"{'' if index else 'nodes':<12} {line}" for index, line in enumerate(_nodes(plan))]
    return "\n".join([*lines(rows), *nodes, "", *aligned(_table_of_models(plan)), "", *_cost(plan)])


def _rows(plan: Plan, notes: Iterable[Row]) -> list[Row]:
    """Return the lines that summary and details share; `notes` are on the accuracies of a model, by label."""
    begun = [model.run.label for model in plan.models if model.run.protocol.bos]
    return [
        ("plan", _ways(plan)),
        ("time", _time(plan)),
        ("memory", fit_line(plan)),
        *_models(plan),
        ("sample text", _sample_text(plan)),
        ("tests", tests(plan.models[0].run)),
        *[("", f"{listed(begun)}: {BEGUN}")] * bool(begun),
        *_shapes(plan),
        *(("warning", f"{label}: {note}") for label, note in notes),
        *(("warning", line) for line in [*_short_of_text(plan), *to_mend(plan)]),
        *_cluster(plan),
        ("results", shown_path(plan.experiment_dir) + _done_so_far(plan)),
    ]


def _named(name: str, texts: Iterable[str]) -> list[Row]:
    return [("" if index else name, text) for index, text in enumerate(texts)]


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


def _done_so_far(plan: Plan) -> str:
    done = trials(plan) - plan.left
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
        around = model.geometry.around_params
        inside = f" ({around:,} around its language model, which stay)" if around else ""
        return [("model", f"{model.geometry.total_params:,} parameters{inside}, {' or '.join(going)} of them to go")]
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


def _shapes(plan: Plan) -> list[Row]:
    """Return a line for each shape, with when to choose another; none for small models whose shapes are all free."""
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    names = dict.fromkeys(shape for model in plan.models for shape in model.shapes)
    if not large and set(names) == {"free"}:
        return []
    rows = [f"{shape}: {_of_shape(shape, large)}" for shape in names]
    return _named("shape", [*rows, "it is a part of the search: choose it now, with --shape"])


def _of_shape(shape: str, large: bool) -> str:
    kind, align, gpus = Shape.read(shape)
    if kind == "free":
        return (
            "any widths, for transformers, vLLM and llama.cpp"
            + "; slow on a GPU, where --shape aligned takes a third of the time" * large
        )
    split = f"for vLLM on {gpus} GPUs; " * (gpus > 1)
    if kind == "aligned":
        return split + "fast on a GPU, quantises well; to load without extra code choose --shape uniform"
    odd = large and align is None
    return split + "loads in whatever loads the family" + "; slow on a GPU, faster with --align 256" * odd


def _short_of_text(plan: Plan) -> list[str]:
    """Say where a repair has fewer tokens than an MLP is wide, by which next to nothing is gained (docs/studies/quality.md)."""
    least = min(plan.space.values["refit_tokens"])
    if "least_squares" not in plan.space.values["compensation"]:
        return []
    widths = {model.run.label: max(model.geometry.mlp_width) for model in plan.models}
    return [
        f"{label}: a repair by {least:,} tokens gains little, as an MLP is wider ({width:,}); set refit_tokens to "
        f"{2 * width:,} or more"
        for label, width in widths.items()
        if least < width
    ]


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


def _table_of_models(plan: Plan) -> list[tuple[str, ...]]:
    """List by model and pruning ratio what is removed, and what a KV group and an MLP channel cost."""
    groups = {(m.run.label, ratio): (m.run.label, ratio, "none") for m in plan.models for ratio in m.targets}
    labels = group_labels(groups.values())
    table: list[tuple[str, ...]] = [
        ("model", "parameters", "to go", "removable", "layers", "KV groups", "MLP channels", "dtype")
    ]
    for model in plan.models:
        g = model.geometry
        removable = " / ".join(f"{shapes.removal_bounds(g, shape).most:,}" for shape in model.shapes)
        groups_of, channels = (
            "whole" if g.whole_attention else f"{max(g.kv_heads)} x {max(g.group_cost):,}",
            f"{max(g.mlp_width)}{' experts' * all(g.mixtures)} x {max(g.channel_cost):,}",
        )
        for ratio, target in model.targets.items():
            sizes = (f"{g.total_params:,}", f"{target:,}", removable, str(g.num_layers), groups_of, channels)
            table.append((labels[groups[model.run.label, ratio]], *sizes, model.run.dtype))
    return table


def _cost(plan: Plan) -> list[str]:
    """Return a line for each stage, with the peak of a worker's memory and how it holds the model, and the whole in one line."""
    cost = plan.cost
    if cost is not None and not cost.wall_seconds:
        return ["cost         nothing is left to compute"]
    about = "~" if cost is not None and any("~" in note for note in cost.notes) else ""
    stages = {} if cost is None else {stage.stage: stage for stage in cost.stages()}
    table = [("stage", "times", "tokens", "FLOPs", "time", "memory", "way")]
    for name in stages or in_order(stage.stage for model in plan.models for stage in model.memory.stages):
        numbers = ("-", "-", "-", "-")
        if stage := stages.get(name):
            tokens = f"{about * (name == 'zero_shot')}{stage.tokens:,}" if stage.tokens else "-"
            flops = f"{stage.flops:.1e}" if stage.flops else "-"
            numbers = (str(stage.runs), tokens, flops, duration(stage.seconds))
        peaks = [
            (model.memory.peak(one), one.way)
            for model in plan.models
            for one in model.memory.stages
            if one.stage == name
        ]
        ways = " / ".join(dict.fromkeys(way for _, way in peaks))
        table.append((name.replace("_", "-"), *numbers, size(max(peak for peak, _ in peaks)), ways))
    if cost is None:
        return [*aligned(table), *lines([("cost", f"not predicted: {unpredicted(plan)}")])]
    workers = f"{cost.slots} worker{'s' if cost.slots > 1 else ''}"
    gpus = f", {cost.gpu_hours:.2g} GPU-hours" if cost.gpu_hours else ""
    how = f"measured at {cost.load}"
    if plan.card:
        peak = plan.card.peaks[plan.models[0].run.dtype] / 1e12
        how = f"computed, not measured: at {REACHED:.0%} of {peak:g} TFLOP/s, which small models do not reach"
    total = f"about {between(cost.wall_range)} on {workers}{gpus}, {how}"
    return [*aligned(table), *lines(_named("cost", [total, *cost.notes]))]


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
        parts.append(f"{size(memory.away)} more {'in main memory' if way.states == 'host' else 'on disk (in TMPDIR)'}")
    return ", ".join(parts)


def _memory(plan: Plan) -> list[str]:
    """Say where the peak of a trial comes from, and what waits elsewhere."""
    memory, largest = plan.memory, plan.memory.largest
    weights = f"the original's weights {size(memory.weights)}" if memory.weights else "weights stay on disk"
    texts = [
        f"{size(memory.total)} a trial: the process {size(memory.process)}, {weights}",
        f"most in stage {largest.stage.replace('_', '-')}: {size(largest.held)}, and {size(largest.activations)} of activations",
    ]
    for model in plan.models:
        if (chosen := model.memory).way != model.ways[0].way:
            copies = ", pruned copies whole in memory" if chosen.way.pruned_whole else ""
            whole = f"with the whole model in memory a trial would take {size(model.ways[0].total)}"
            texts.append(f"{model.run.label}: {held_in_words(chosen)}{copies}; {whole}")
    for name, ways in plan.gpu_ways.items():
        texts.append(f"on {name}: {'; '.join(f'{label} {way}' for label, way in ways.items())}")
    return texts


def _resources(plan: Plan) -> str:
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
    here, texts = plan.settings.address is None and plan.card is None, []
    if here and NVIDIA.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not torch.cuda.is_available():
        cuda = torch.version.cuda
        old = f"its driver may be too old for CUDA {cuda}, see nvidia-smi"
        texts.append(
            f"torch {torch.__version__} does not see this machine's NVIDIA GPU, so trials run on CPUs: "
            f"{old if cuda else 'it is built without CUDA: see pytorch.org'}; to have it so, set CUDA_VISIBLE_DEVICES="
        )
    if plan.without_bfloat16 and plan.settings.dtype is None and _stored_narrow(plan):
        texts.append(
            f"all trials compute in float32, as {listed(plan.without_bfloat16)} cannot compute in bfloat16; leave such GPUs out "
            "with CUDA_VISIBLE_DEVICES, or give --dtype"
        )
    if plan.settings.dtype == "bfloat16" and here and not plan.resources.gpus and not fast_at_bfloat16("cpu"):
        texts.append(f"bfloat16 was asked for, but {_compared()}; leave --dtype out for float32")
    return texts


def _stored_narrow(plan: Plan) -> bool:
    return any(model.stored_as not in WIDE for model in plan.models)


def _dtypes(plan: Plan) -> list[str]:
    """Say which data type trials compute in and why, where that is not plain and `to_mend` says nothing of it: by how weights are
    stored, and by what the device is fast at."""
    if plan.settings.dtype is not None or (plan.without_bfloat16 and _stored_narrow(plan)):
        return []
    texts = []
    for stored, dtype in dict.fromkeys((model.stored_as, model.run.dtype) for model in plan.models):
        if stored not in WIDE and not plan.resources.gpus:
            on_cpu = "" if plan.settings.address else f"; {_compared()}"
            texts.append(f"{dtype}: weights are stored in {stored}{on_cpu}")
        elif stored in WIDE and plan.resources.gpus:
            texts.append("float32, as weights are stored; --dtype bfloat16 takes half the memory and less time")
    return texts


def _compared() -> str:
    return f"this CPU multiplies matrices {bfloat16_speed():.1f} times as fast in bfloat16 as in float32"


def _nodes(plan: Plan) -> list[str]:
    """Say what each node of the cluster has, a line for each below what all have."""
    workers = [node for node in plan.nodes if node.runs_trials]
    if not workers:
        return []
    table: list[tuple[str, ...]] = [("", "CPUs", "memory", "GPUs")]
    for node in plan.nodes:
        gpus, cells = node.resources.get("GPU", 0), ("-", "no trials here")
        if node.memory is not None:
            kinds = ", ".join(sorted({gpu.name for gpu in node.gpus}))
            free = min((gpu.memory.available for gpu in node.gpus), default=0)
            total = min((gpu.memory.total for gpu in node.gpus), default=0)
            cells = (
                f"{size(node.memory.available)} of {size(node.memory.total)} free",
                f"{gpus:g} {kinds}, {size(free)} of {size(total)} free" if kinds else f"{gpus:g}",
            )
        table.append((node.name, f"{node.resources.get('CPU', 0):g}", *cells))
    versions = ", ".join(f"{name} {version}" for name, version in workers[0].versions.items())
    return [f"{len(plan.nodes)}, all with {versions}; one storage, the same models and data", *aligned(table)]


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
