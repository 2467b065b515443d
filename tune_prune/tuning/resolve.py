"""Resolves what a command leaves open: the configurations of a search, and each model without its weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig

from tune_prune import embedded
from tune_prune.checkpoint import manifest
from tune_prune.core.config import EvaluationProtocol, ModelRun, TrustingRun
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Shape
from tune_prune.data import calibration, checks
from tune_prune.models import catalog, loading
from tune_prune.models.geometry import Geometry
from tune_prune.pruning import shapes
from tune_prune.tuning import space as search_space
from tune_prune.tuning.plan import SearchSettings
from tune_prune.tuning.space import SearchSpace
from tune_prune.tuning.stopping import FEWEST


def space(settings: SearchSettings) -> SearchSpace:
    """Return the search space with the values of the flags. Raises UserError where they do not fit together."""
    loaded = search_space.load(settings.search_space)
    values, searched_by = dict(loaded.values), settings.search or loaded.search
    seeds = settings.seeds
    if settings.draws is not None:  # the run's own, and those that follow it
        seeds = tuple(range(settings.seed, settings.seed + settings.draws))
    flags: dict[str, tuple[str, tuple[Any, ...] | None]] = {
        "--pruning-ratio": ("pruning_ratio", None if settings.pruning_ratio is None else (settings.pruning_ratio,)),
        "--shape": ("shape", None if settings.shape is None else (settings.shape,)),
        "--seeds" if settings.draws is None else "--draws": ("seed", seeds),
    }
    for flag, (name, asked) in flags.items():
        if asked is None:
            continue
        if name in loaded.given and values[name] != asked:
            mine, says = (", ".join(map(str, listed)) for listed in (asked, values[name]))
            raise UserError(f"{flag} is {mine}, but {loaded.path} says {says}; leave one of them out")
        values[name] = asked
    if settings.recover is not None:
        values["recovery"] = ("none", "lora")
    if "shape" not in loaded.given and settings.shape is None:
        values["shape"] = (shapes.BY_SIZE,)
    values["shape"] = aligned(values["shape"], settings.align, settings.tensor_parallel)
    number = loaded.num_trials if searched_by == "optuna" else None
    searched = replace(loaded, search=searched_by, values=values, num_trials=number)
    if searched.combinations > search_space.MAX_POINTS:
        raise UserError(
            f"{loaded.path} makes {searched.combinations:,} combinations with {len(values['seed']):,} seeds, and "
            f"{search_space.MAX_POINTS:,} is the most that can be planned; ask for fewer"
        )
    _check(settings, loaded, searched)
    if searched_by == "optuna":
        most = searched.largest_group
        number = settings.num_trials or searched.num_trials or min(20, most)
        if number > most:
            each = " with one recovery" if len(values["recovery"]) > 1 else ""
            subject = f"{loaded.path}: num_trials" if settings.num_trials is None else "--num-trials"
            raise UserError(
                f"{subject} is {number}, but search space {searched.name} has only {most} configurations{each}; ask for at most "
                f"{most}, or leave it out and use --search grid"
            )
        searched = replace(searched, num_trials=number)
    if settings.kl_filter:  # of the first draw only
        first = replace(searched, values=values | {"seed": values["seed"][:1]})
        if (most := min(first.largest_group, searched.num_trials or sys.maxsize)) <= FEWEST:
            raise UserError(
                f"--kl-filter compares a trial with at least {FEWEST} before it, but space {searched.name} has {most} trials "
                "of a model at a pruning ratio; leave it out"
            )
    return searched


def aligned(names: tuple[str, ...], align: int | None, gpus: int | None) -> tuple[str, ...]:
    """Return the shapes with the numbers of --align and --tensor-parallel, where they are given, for `aligned` and `uniform`;
    without a shape they are those of `aligned`. Raises UserError where they fit no shape, and where one has another number."""
    asked = {name: Shape("aligned") if name == shapes.BY_SIZE else Shape.read(name) for name in names}
    for flag, field, number in (("--align", "align", align), ("--tensor-parallel", "gpus", gpus)):
        usual = Shape._field_defaults[field]
        other = [name for name, shape in asked.items() if getattr(shape, field) not in (usual, number)]
        if number is not None and other:
            raise UserError(f"{flag} is {number}, but the shape is {other[0]}; leave one of the two numbers out")
    kinds = {shape.kind for shape in asked.values()}
    if align is not None and kinds == {"free"}:
        raise UserError(
            f"--align {align} is for --shape aligned or uniform, but the shape is free; leave one of them out"
        )
    if gpus is None or gpus == 1:
        if align is None:
            return names
    elif "free" in kinds:
        raise UserError(
            f"--tensor-parallel {gpus} needs widths that are multiples of {gpus}, but the shape is free; use --shape aligned"
        )
    numbered = {
        name: name if shape.kind == "free" else str(shape._replace(align=align or shape.align, gpus=gpus or shape.gpus))
        for name, shape in asked.items()
    }
    return tuple(dict.fromkeys(numbered.values()))


def _check(settings: SearchSettings, loaded: SearchSpace, searched: SearchSpace) -> None:
    """Raise UserError for settings that do not go with the search space, or with each other."""
    draws, recover = settings.draws, settings.recover
    texts, recovery = loaded.values["calibration"], loaded.values["recovery"]
    grid, seeds = searched.search == "grid", searched.values["seed"]
    several = draws is None and len(seeds) > 1
    scheduler = "" if settings.scheduler == "none" else f"--scheduler {settings.scheduler}"
    early = scheduler or "--kl-filter" * settings.kl_filter
    keeps = "gold_logprob" if settings.scheduler == "race-gold" else "accuracy"
    best_by = settings.draws_by if settings.objective == "accuracy" else settings.objective
    listed, to_grid = ", ".join(map(str, seeds)), "leave it out, or use --search grid"
    for wrong, sentence in (
        (draws and settings.seeds, f"--draws {draws} follows --seed, but --seeds names others; leave one of them out"),
        (draws and not grid, f"--draws {draws} is for a grid; {to_grid}"),
        (recover and not grid, f"--recover {recover} is for a grid; {to_grid}"),
        (several and not grid, f"{len(seeds)} seeds ({listed}) are for a grid; name one seed, or use --search grid"),
        (
            draws and not HYPERPARAMETERS["seed"].kind.holds(max(seeds, key=lambda seed: seed or 0)),
            f"--draws {draws} needs seeds that follow --seed {settings.seed}, above the largest; use a smaller --seed",
        ),
        (
            not draws and settings.draws_by != "accuracy",
            f"--draws-by {settings.draws_by} says which configurations --draws repeats; add --draws 3, or leave it out",
        ),
        (
            recover and "recovery" in loaded.given and len(recovery) == 1,
            f"--recover {recover} trains the best of the untrained configurations, but {loaded.path} says `recovery: "
            f"{recovery[0]}`; write `recovery: [none, lora]` there, or leave one of them out",
        ),
        (
            settings.calibration and "calibration" in loaded.given and settings.calibration not in texts,
            f"--calibration is {settings.calibration}, but {loaded.path} says {', '.join(map(str, texts))}; leave one of them out, "
            "or list it there, too",
        ),
        (
            grid and settings.num_trials,
            f"--num-trials {settings.num_trials} is for --search optuna, and a grid tries all; leave it out, or use that",
        ),
        (
            several and early,
            f"{early} stops single trials, but a configuration is the mean of {len(seeds)} of them (seeds {listed}); leave one "
            f"of the two out, or give --draws {len(seeds)} in place of the seeds",
        ),
        (
            scheduler and best_by not in (keeps, "accuracy"),
            f"{scheduler} stops trials by {keeps}, which may stop the best by {best_by}; leave one of them out",
        ),
    ):  # fmt: skip
        if wrong:
            raise UserError(sentence)


@dataclass(frozen=True)
class DenseModel:
    """A model before it is loaded, and what all its trials share."""

    source: catalog.ModelSource
    run: ModelRun
    config: PretrainedConfig
    geometry: Geometry
    tokenizer: PreTrainedTokenizerBase


def dense_model(settings: SearchSettings, name: str, fast: Callable[[], bool]) -> DenseModel:
    """Find the model of that name; load its config and tokenizer. `fast` says whether the device gains by bfloat16, where no
    --dtype is given. Raises UserError, also for a pruned model."""
    source = catalog.resolve(name, settings.revision)
    check_revision(settings.revision, name, source)
    config = loading.load_config(source)
    dtype = settings.dtype or loading.default_dtype(loading.stored_as(source, config), fast)
    run = model_run(settings, name, source, dtype)
    manifest.require_dense(source, config)
    (family, geometry), tokenizer = loading.config_geometry(config, source), loading.load_tokenizer(source)
    calibration.bos_of(tokenizer, family.bos, source.label)
    run = replace(run, protocol=replace(run.protocol, bos=family.bos))
    return DenseModel(source, run, config, geometry, tokenizer)


def check_revision(revision: str | None, name: str, source: catalog.ModelSource) -> None:
    """Raise UserError for the revision of a model that has none."""
    if revision is not None and source.kind != "hub":
        kind = {"embedded": "an embedded model", "folder": "a folder model", "gguf": "a GGUF file"}[source.kind]
        raise UserError(f"--revision {revision} is for models of the hub, but {name} is {kind}; leave it out")


def searched_model(
    run: ModelRun, base: str | None, revision: str | None
) -> tuple[catalog.ModelSource, PretrainedConfig]:
    """Return the dense model of a search's `run` and its config: where it was searched, or at `base`. Raises UserError."""
    name = base or run.model
    try:
        source = catalog.resolve(name, revision or run.revision)
    except UserError as error:
        if base is not None:
            raise
        cause = str(error).partition("; ")[0]
        raise UserError(
            f"{run.label}, the model that was searched, is not where it was ({cause}); name where it is now with --base"
        ) from error
    check_revision(revision, name, source)
    return source, loading.load_config(source)


def model_run(settings: SearchSettings, name: str, source: catalog.ModelSource, dtype: str) -> ModelRun:
    """Return what all trials of the model share. Raises UserError for flags that do not fit together."""
    check_revision(settings.revision, name, source)
    data_dir = checks.data_dir(settings.data_dir)
    protocol = EvaluationProtocol(
        limit=settings.limit, seed=settings.seed, perplexity_tokens=settings.perplexity_tokens
    )
    if settings.tasks is not None:
        protocol = replace(protocol, tasks=settings.tasks)
    window = settings.perplexity_window or (embedded.TRAINED_TOKENS if source.kind == "embedded" else None)
    if window is not None:
        protocol = replace(protocol, perplexity_window=window)
    return (TrustingRun if settings.trust_tasks else ModelRun)(
        model=source.name,
        label=source.label,
        revision=settings.revision,
        calibration=calibration.resolve(settings.calibration, data_dir, source.kind == "embedded"),
        data_dir=data_dir,
        protocol=protocol,
        seed=settings.seed,
        dtype=dtype,
    )
