"""Resolves what a command leaves open: the configurations of a search, and each model without its weights."""

from __future__ import annotations

import math
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
    _check_decisions(settings, loaded, searched_by)
    _check_scheduler(settings)
    seeds = settings.seeds
    if settings.draws is not None:  # the run's own, and those that follow it
        seeds = tuple(range(settings.seed, settings.seed + settings.draws))
    flags: dict[str, tuple[str, tuple[Any, ...] | None]] = {
        "--pruning-ratio": ("pruning_ratio", None if settings.pruning_ratio is None else (settings.pruning_ratio,)),
        "--shape": ("shape", None if settings.shape is None else (settings.shape,)),
        "--seeds": ("seed", seeds),
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
    texts = values["calibration"]
    if settings.calibration is not None and "calibration" in loaded.given and settings.calibration not in texts:
        raise UserError(
            f"--calibration is {settings.calibration}, but {loaded.path} says {', '.join(texts)}; leave one of them out, or list "
            "it there, too"
        )
    if "shape" not in loaded.given and settings.shape is None:
        values["shape"] = (shapes.BY_SIZE,)
    values["shape"] = aligned(values["shape"], settings.align)
    searched = replace(loaded, search=searched_by, values=values)
    if searched.combinations > search_space.MAX_POINTS:
        raise UserError(
            f"{loaded.path} and the {len(values['seed']):,} seeds of the flags make {searched.combinations:,} combinations, and "
            f"{search_space.MAX_POINTS:,} is the most that can be planned; ask for fewer seeds"
        )
    if searched_by == "grid" and settings.objective != "accuracy":
        raise UserError(
            f"--objective {settings.objective} is for --search optuna, but a grid runs all {searched.size} configurations; leave "
            f"it out, and choose among them with analysis --rule {settings.objective}"
        )
    if settings.draws is None and len(values["seed"]) > 1:
        _check_several_seeds(settings, searched)
    searched = replace(searched, num_trials=_num_trials(settings, searched))
    if settings.kl_filter:
        _check_kl_filter(searched)
    return searched


def aligned(names: tuple[str, ...], align: int | None) -> tuple[str, ...]:
    """Return the shapes with the N of --align, where one is given, for `aligned` and `uniform`; without a shape it is that of
    `aligned`. Raises UserError where it fits none of them, and where one has another N."""
    if align is None:
        return names
    numbered = {"aligned": f"aligned-{align}", "uniform": f"uniform-{align}", shapes.BY_SIZE: f"aligned-{align}"}
    if other := [name for name in names if name[-1].isdigit() and name not in numbered.values()]:
        raise UserError(f"--align is {align}, but the shape is {other[0]}; leave one of the two numbers out")
    if set(names) == {"free"}:
        raise UserError(
            f"--align {align} is for --shape aligned or uniform, but the shape is free; leave one of them out"
        )
    return tuple(dict.fromkeys(numbered.get(shape, shape) for shape in names))


def _refuse(wrong: bool, sentence: str) -> None:
    if wrong:
        raise UserError(sentence)


def _check_decisions(settings: SearchSettings, loaded: SearchSpace, searched_by: str) -> None:
    """Raise UserError for --draws and --recover where they do not fit the search space or other flags."""
    draws, recovery = f"--draws {settings.draws}", loaded.values["recovery"]
    if settings.draws is not None:
        last = settings.seed + settings.draws - 1
        named = f"{draws} takes the seeds that follow --seed, but --seeds names others; leave one of them out"
        _refuse(settings.seeds is not None, named)
        given = f"repeats only promising configurations, but {loaded.path} sets `seed` for all of them"
        _refuse("seed" in loaded.given, f"{draws} {given}; leave one of the two out")
        grid = "is for a grid, as it runs every configuration once before it repeats any"
        _refuse(searched_by == "optuna", f"{draws} {grid}; leave it out, or use --search grid")
        large = f"needs seeds up to {last}, above the largest; use a smaller --seed"
        _refuse(not HYPERPARAMETERS["seed"].kind.holds(last), f"{draws} {large}")
    elif settings.draws_by != "accuracy":
        what = "says which configurations --draws repeats; add --draws 3, or leave it out"
        raise UserError(f"--draws-by {settings.draws_by} {what}")
    if settings.recover is not None:
        recover, grid = f"--recover {settings.recover}", "is for a grid, as it trains the best once all are tested"
        _refuse(searched_by == "optuna", f"{recover} {grid}; leave it out, or use --search grid")
        says = f"trains the best of the untrained configurations, but {loaded.path} says `recovery: {recovery[0]}`"
        step = "write `recovery: [none, lora]` there, or leave one of them out"
        _refuse("recovery" in loaded.given and len(recovery) == 1, f"{recover} {says}; {step}")


def _check_scheduler(settings: SearchSettings) -> None:
    """Raise UserError for a scheduler beside a flag that looks for another best than the one that it is to keep."""
    keeps = "gold_logprob" if settings.scheduler == "race-gold" else "accuracy"
    for flag, looks_for in (("--objective", settings.objective), ("--draws-by", settings.draws_by)):
        if settings.scheduler != "none" and looks_for not in (keeps, "accuracy"):
            instead = {"gold_logprob": ", or use --scheduler race-gold", "kl": ", or use --kl-filter in place of it"}
            raise UserError(
                f"--scheduler {settings.scheduler} stops trials by {keeps}, which may stop the best by {looks_for} "
                f"({flag} {looks_for}); leave one of them out{instead.get(looks_for, '')}"
            )


def _check_several_seeds(settings: SearchSettings, searched: SearchSpace) -> None:
    """Raise UserError for Optuna, to which a seed would be one more hyperparameter, and for what stops trials early: single draws,
    where a mean over draws needs all of them."""
    seeds = searched.values["seed"]
    listed, count = ", ".join(map(str, seeds)), len(seeds)
    grid = f"{count} seeds ({listed}) are for a grid, which runs every configuration with each of them"
    _refuse(searched.search == "optuna", f"{grid}; name one seed, or use --search grid")
    flag = "--kl-filter" if settings.scheduler == "none" else f"--scheduler {settings.scheduler}"
    single = f"{flag} stops single trials, but here a configuration is the mean of {count} of them (seeds {listed})"
    step = f"leave one of the two out, or give --draws {count} in place of the seeds"
    _refuse(settings.scheduler != "none" or settings.kl_filter, f"{single}; {step}")


def _check_kl_filter(searched: SearchSpace) -> None:
    """Raise UserError where no trial has so many before it that it could be stopped."""
    # It looks at the first draw only.
    first = replace(searched, values=searched.values | {"seed": searched.values["seed"][:1]})
    most = min(first.largest_group, searched.num_trials or math.inf)
    if most <= FEWEST:
        raise UserError(
            f"--kl-filter compares a trial with at least {FEWEST} before it, but search space {searched.name} has {most} trials of "
            "a model at a pruning ratio; leave it out"
        )


def _num_trials(settings: SearchSettings, searched: SearchSpace) -> int | None:
    """Return how many configurations optuna tries of each model at each pruning ratio with each recovery; None for a grid."""
    asked = settings.num_trials
    if searched.search == "grid":
        if asked is not None:
            raise UserError(
                f"--num-trials {asked} is for --search optuna, but a grid runs all {searched.size} configurations; leave it out or "
                "use --search optuna"
            )
        return None
    size = searched.largest_group
    num_trials = asked or searched.num_trials or min(20, size)
    if num_trials > size:
        each = " with one recovery" if len(searched.values["recovery"]) > 1 else ""
        raise UserError(
            f"--num-trials is {num_trials}, but search space {searched.name} has only {size} configurations{each}; ask for at most "
            f"{size}, or leave it out and use --search grid"
        )
    return num_trials


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
    return DenseModel(source, run, config, loading.config_geometry(config)[1], loading.load_tokenizer(source))


_KINDS = {"embedded": "an embedded model", "folder": "a folder model", "gguf": "a GGUF file"}


def check_revision(revision: str | None, name: str, source: catalog.ModelSource) -> None:
    """Raise UserError for the revision of a model that has none."""
    if revision is not None and source.kind != "hub":
        raise UserError(
            f"--revision {revision} is for models of the hub, but {name} is {_KINDS[source.kind]}; leave it out"
        )


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
