"""The steps of a recipe behind the cut: a refit of what is left, and its training. Each gives the recipe with what it has
changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tune_prune.core.config import PruningConfig
from tune_prune.data.calibration import text_tokens
from tune_prune.evaluation.divergence import head_inputs, most_rows
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.compensation.recovery import Recovery
from tune_prune.pruning.compensation.refit import Refit
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import Changes
from tune_prune.trial.context import TrialContext
from tune_prune.trial.recipe import Recipe


def samples_needed(config: PruningConfig, longest: int) -> list[tuple[int, int]]:
    """Return tokens of a calibration sample and the number of them that each step of `config` needs at least; a model takes rows of
    `longest` tokens."""
    refitted = [] if config.compensation == "none" else [refit.windows_of(config.refit_tokens, longest)]
    trained = [] if config.recovery == "none" else [(min(recovery.WINDOW, longest), recovery.HELD_OUT + recovery.ROWS)]
    return refitted + trained


def refitted(context: TrialContext, plan: PruningPlan, config: PruningConfig) -> tuple[Recipe, Refit, int]:
    """Return the recipe of `plan` with the compensation of `config`, what that has done, and the tokens forwarded for it."""
    length, count = refit.windows_of(config.refit_tokens, context.loaded.max_length)
    windows = context.windows(replace(config.samples, seq_len=length), count)

    def make(_: int) -> Refit:
        context.drop_copy()
        dense = context.loaded
        way = dense.residency.forward_only
        return refit.least_squares(dense.model, dense.family, plan, windows, config.damping, way)

    fit = context.fitted("refit", "forward", make)
    if not fit.weights:
        return Recipe(plan), fit, windows.numel()
    about = {"compensation": config.compensation, "version": refit.VERSION, "damping": config.damping}
    steps = about | _samples(context, config, windows)
    return Recipe(plan, Changes(fit.weights), steps), fit, windows.numel()


def recovered(context: TrialContext, recipe: Recipe, config: PruningConfig) -> tuple[Recipe, Recovery, int]:
    """Return `recipe` with the recovery of `config`, what that has done, and the tokens forwarded for it (0: its adapters were
    kept). What a training that was interrupted has done is not done again."""
    if not recipe.plan.removed_params:
        return recipe, Recovery({}, 0.0, 0.0), 0
    run, length = context.run.of(config), min(recovery.WINDOW, context.loaded.max_length)
    texts = context.calibration_tokens(run.calibration)
    # Sample i is of text i mod k: the most samples of which each text holds its own.
    of_text = text_tokens(length, context.bos)
    most = min(len(texts) * (len(tokens) // of_text) + text for text, tokens in enumerate(texts))
    steps, count = config.recovery_steps, min(recovery.samples_of(config.recovery_steps), most)
    windows = context.windows(replace(config.samples, seq_len=length), count)
    about = {"recovery": config.recovery, "version": recovery.VERSION, "steps": steps, "rate": config.recovery_rate}
    if config.recovery_rank != PruningConfig.recovery_rank:  # the usual rank is in no key
        about["rank"] = config.recovery_rank
    about |= _samples(context, config, windows)
    key = context.measurement_key(recipe.structure, **about)
    trained, forwarded = context.artifacts.get("recovery", key, Recovery.from_arrays), 0
    if trained is None:

        def keep(state: dict[str, np.ndarray]) -> None:
            context.artifacts.put("recovery_state", key, state)

        states = _dense_states(context, windows)

        def make(_: int) -> tuple[Recovery, int]:
            context.drop_copy()
            dense = context.loaded
            model, way = recipe.to_train(dense)
            kept = context.artifacts.get("recovery_state", key, dict)
            rate, rank, seed = config.recovery_rate, config.recovery_rank, run.seed
            adapters = recovery.lora(model, dense.family, windows, states, steps, rate, rank, seed, way, kept, keep)
            return adapters, 0 if kept is None else int(kept["done"])

        trained, done = context.fitted("recovery", "train", make)
        context.artifacts.put("recovery", key, trained.arrays())
        context.artifacts.remove("recovery_state", key)
        forwarded = windows.numel() + length * ((steps - done) * recovery.ROWS + 2 * recovery.HELD_OUT)
    if not trained.used:
        return recipe, trained, forwarded
    changes = replace(recipe.changes, updates=trained.updates)
    return replace(recipe, changes=changes, steps={**recipe.steps, "recovery": about}), trained, forwarded


def _dense_states(context: TrialContext, windows: torch.Tensor) -> torch.Tensor:
    """Return what the head of the dense model is given at `windows` [samples, T]: [samples, T, H]. Its batches, larger than those
    of the training, are halved where memory does not suffice."""
    samples = list(windows)
    rows = most_rows(samples, context.loaded.model.config, context.loaded.device.type)

    def run(halvings: int) -> torch.Tensor:
        context.drop_copy()
        dense = context.loaded
        return head_inputs(dense.model, samples, replace(dense.residency.forward_only, halvings=halvings))

    states = context.fitted(
        "original model for training",
        "forward",
        run,
        lambda: context.halvings(rows, windows.shape[1], context.loaded.residency.forward_only),
    )
    return states.view(*windows.shape, -1)


def _samples(context: TrialContext, config: PruningConfig, windows: torch.Tensor) -> dict[str, Any]:
    """Return what tells which calibration samples those are."""
    run = context.run.of(config)
    text = context.contents.calibration(run.calibration)
    return {"windows": list(windows.shape), "calibration": text, "seed": run.seed}
