"""The plan of a search in about ten lines, the answer first: how many ways to prune, how long, and whether it fits.

`commands.plan_details` has the whole of it, for --verbose.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tune_prune.analysis.cost import between
from tune_prune.checkpoint.layers import aligned
from tune_prune.commands.resources_text import fit_line, held_in_words, listed, to_mend
from tune_prune.core.config import OTHER_TEXT, ModelRun, PruningConfig, alignment
from tune_prune.core.kinds import texts_of
from tune_prune.core.machine import size
from tune_prune.core.store import Location, ObjectPath
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.data.sources import perplexity_text_name
from tune_prune.pruning import shapes
from tune_prune.pruning.methods import load_method
from tune_prune.tuning.plan import ModelPlan, Plan
from tune_prune.tuning.rounds import expected, is_withheld

WIDTH, _NAMES = 120, 13  # columns of a line, and of the name before it
NAMED_TESTS = 3  # so many benchmarks have their names in the line of the tests

Row = tuple[str, str]  # its name, and what it says


def describe(plan: Plan) -> str:
    """The plan as text for the screen."""
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
    """A row each, and more where it is wider than a screen: broken between words."""
    found = []
    for name, text in rows:
        parts = [text]
        if "  " not in text:  # else it is a table's
            parts = textwrap.wrap(
                text, WIDTH - _NAMES, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
            )
        found += [f"{name if index == 0 else '':<12} {part}" for index, part in enumerate(parts)]
    return found


def trials(plan: Plan) -> int:
    """How many the search comes to, at most."""
    if plan.settings.recover is None:
        return plan.trials_per_model * len(plan.models)
    return sum(len(expected(plan, (config for config, _ in model.trials))) for model in plan.models)


def ways(plan: Plan) -> int:
    """How many configurations are compared of each model at each pruning ratio, whatever sample text they are given."""
    own = (config for config, _ in plan.models[0].trials if not is_withheld(plan, config))
    return len({replace(config, seed=None, pruning_ratio=PruningConfig.pruning_ratio) for config in own})


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
    """Why there is no prediction, and what gives one."""
    if plan.card is None:
        return "no worker of the cluster was free to measure its speed"
    step = "leave out --dtype" if plan.card.peaks else "name its kind, e.g. --gpu 4090"
    return f"how fast such a GPU is in {plan.models[0].run.dtype} is not known; {step}"


def _models(plan: Plan) -> list[Row]:
    """Parameters, and how many of them go: a sentence for one model, a table of several."""
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
    run, configs = plan.models[0].run, [config for config, _ in plan.models[0].trials]
    recipes = any(config.compensation != "none" or config.recovery != "none" for config in configs)
    if not recipes and not any(load_method(method).statistics for method in plan.space.values["method"]):
        return "none: what is searched reads no data"
    texts = dict.fromkeys(run.of(config).calibration for config in configs)
    shown = listed("+".join(str(shown_path(part)) for part in texts_of(text)) for text in texts)
    counts, lengths = (plan.space.values[name] for name in ("num_samples", "seq_len"))
    return f"{shown}: {_one_of(counts)} samples of {_one_of(lengths)} tokens"


def _one_of(values: Collection[int]) -> str:
    """Few of them by name, of many the ends."""
    ordered = [f"{value:,}" for value in sorted(values)]
    if len(ordered) > 5:
        return f"{ordered[0]} to {ordered[-1]}"
    return " or ".join(filter(None, (", ".join(ordered[:-1]), ordered[-1])))


def tests(run: ModelRun) -> str:
    """What every pruned model is measured on, in words."""
    protocol = run.protocol
    count, most = len(protocol.tasks), protocol.limit
    questions = "all questions" if most is None else f"at most {most:,} question{'s' * (most > 1)} each"
    names = f" ({listed(protocol.tasks)})" if count <= NAMED_TESTS else ""
    toy = "toy " * (
        perplexity_text_name(run) == "embedded"
    )  # their questions are no more than named like the real ones
    return f"perplexity on {perplexity_text_of(run)}; {count} {toy}benchmark{'s' * (count > 1)}{names}, {questions}"


def perplexity_text_of(run: ModelRun) -> str:
    """What perplexity is measured on, in words."""
    texts = {"embedded": "the embedded text", "wikitext2": "WikiText-2 test"}
    text = texts.get(perplexity_text_name(run), OTHER_TEXT.format(file=TEXT_FILE))
    return text if (most := run.protocol.perplexity_tokens) is None else f"the first {most:,} tokens of {text}"


def matters(plan: Plan) -> bool:
    """Whether there is anything to say of the shapes: not of small models with free ones."""
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    return large or any(model.shapes != ("free",) for model in plan.models)


def _shape(plan: Plan) -> list[Row]:
    """A line for each shape, with when to choose another; none where that does not matter."""
    if not matters(plan):
        return []
    large = any(model.geometry.total_params >= shapes.LARGE_PARAMS for model in plan.models)
    told = dict.fromkeys((shape, _of_shape(shape, large)) for model in plan.models for shape in model.shapes)
    rows = [("" if index else "shape", f"{shape}: {says}") for index, (shape, says) in enumerate(told)]
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
