"""The KL divergence of a trial's model from the dense one, on the first tokens of the perplexity text and on items of the tasks.

Kept by what it depends on: by the structure that was measured and the tokens it was measured on. So are the dense model's
hidden states, which the first trial makes for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tune_prune.core.hashing import digest
from tune_prune.evaluation import divergence
from tune_prune.evaluation.divergence import BLOCK, TASK_TOKENS, TEXT_TOKENS, Divergence
from tune_prune.evaluation.engine.rows import default_batch_tokens
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial.context import TrialContext

T = TypeVar("T")


def measure_kl(context: TrialContext, plan: PruningPlan) -> tuple[dict[str, Divergence], int]:
    """KL(dense || pruned) of the model that keeps what `plan` says, on "text" and on "tasks" (not there where no item has a single
    right choice); and the tokens forwarded to get it, those of the dense model among them (0: it was cached)."""
    windows = context.perplexity_tokens[:TEXT_TOKENS].split(context.perplexity_window)
    answers = [torch.from_numpy(tokens).long() for tokens in context.suite.right_answers(TASK_TOKENS)]
    found, forwarded = {}, 0
    for name, samples, block in (("text", windows, BLOCK), ("tasks", answers, None)):
        if samples:
            found[name], tokens = _measure(context, plan, samples, block)
            forwarded += tokens
    return found, forwarded


def _measure(
    context: TrialContext, plan: PruningPlan, samples: Sequence[Tensor], block: int | None
) -> tuple[Divergence, int]:
    content, count = digest([sample.tolist() for sample in samples]), sum(map(len, samples))
    key = context.measurement_key(plan.structure, tokens=content, block=block)
    stored = context.artifacts.get("kl", key, Divergence.from_arrays)
    if stored is not None:
        return stored, 0
    dense, forwarded = _dense_states(context, samples, content)

    def run(residency: Residency) -> np.ndarray:
        return divergence.token_divergences(context.model_of(plan), samples, dense, residency)

    result = Divergence.of(_fitted(context, plan, samples, run), samples, block)
    context.artifacts.put("kl", key, asdict(result))
    return result, forwarded + count


def _dense_states(context: TrialContext, samples: Sequence[Tensor], content: str) -> tuple[Tensor, int]:
    """`divergence.head_inputs` of the dense model, and the tokens forwarded to get them."""
    plan, count = PruningPlan.keep_all(context.loaded.geometry), sum(map(len, samples))
    dtype, width = context.loaded.model.dtype, context.loaded.geometry.hidden_size
    key = context.measurement_key(plan.structure, tokens=content)

    def read(arrays: dict[str, np.ndarray]) -> Tensor:  # as bytes: numpy has no bfloat16
        if arrays["states"].dtype != np.uint8 or arrays["states"].shape != (count * width * dtype.itemsize,):
            raise ValueError(f"it does not have the hidden states of {count} tokens")
        return torch.from_numpy(arrays["states"]).view(dtype).view(count, width)

    stored = context.artifacts.get("dense_states", key, read)
    if stored is not None:
        return stored, 0

    def run(residency: Residency) -> Tensor:
        if residency.streamed:
            context.drop_copy()  # the pruned one: there was no room planned for both
        return divergence.head_inputs(context.loaded.model, samples, residency)

    states = _fitted(context, plan, samples, run)
    context.artifacts.put("dense_states", key, {"states": states.view(-1).view(torch.uint8).numpy()})
    return states, count


def _fitted(context: TrialContext, plan: PruningPlan, samples: Sequence[Tensor], run: Callable[[Residency], T]) -> T:
    """What `run` gives in the first way to hold the model of `plan` in which memory suffices."""
    tokens, shortest = (
        default_batch_tokens(context.loaded.model.config, context.loaded.device.type),
        min(map(len, samples)),
    )
    rows = max(1, min(tokens // shortest, len(samples)))  # of a batch, at most
    return context.fitted(
        "kl",
        "measure",
        lambda halvings: run(replace(context.residency_of(plan), halvings=halvings)),
        lambda: context.halvings(rows, shortest, context.residency_of(plan)),
    )
