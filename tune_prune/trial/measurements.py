"""Measurements of a trial's model: its perplexity, its answers to the items of the tasks, and its KL divergence from the dense
model, on the first tokens of the perplexity text and on items of the tasks.

Each is kept by what it depends on: the structure that was measured and the text or items it was measured on. So are the dense
model's hidden states, which the first trial makes for all of them. The dense model of a trial is there with it; that of a
checkpoint is another model (`base`), opened beside it for one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tune_prune.core.errors import UserError
from tune_prune.core.hashing import digest
from tune_prune.data.calibration import begun, text_tokens
from tune_prune.evaluation import perplexity
from tune_prune.evaluation.divergence import (
    BLOCK,
    TASK_TOKENS,
    TEXT_TOKENS,
    Divergence,
    compared_tokens,
    head_inputs,
    most_rows,
    token_divergences,
)
from tune_prune.evaluation.item_scores import ItemScore
from tune_prune.evaluation.perplexity import PerplexityResult
from tune_prune.models import loading
from tune_prune.models.catalog import ModelSource
from tune_prune.models.head import Head
from tune_prune.models.loading import LoadedModel, readable_in_place
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial.context import TrialContext
from tune_prune.trial.fallback import Fallback, load
from tune_prune.trial.recipe import Recipe

T = TypeVar("T")

BLOCKS = {"text": BLOCK, "tasks": None}  # of an item all tokens are one observation


def measure_perplexity(context: TrialContext, recipe: Recipe) -> tuple[PerplexityResult, int]:
    """Return the perplexity of the model that `recipe` makes, and the tokens forwarded to get it (0: it was cached)."""
    most = context.run.protocol.perplexity_tokens
    bound = {} if most is None else {"tokens": most}
    key = context.measurement_key(
        recipe.structure, text=context.contents.text, window=context.perplexity_window, **bound
    )
    stored = context.artifacts.get(
        "perplexity", key, lambda arrays: PerplexityResult(**{name: array.item() for name, array in arrays.items()})
    )
    if stored is not None:
        return stored, 0
    tokens, window, config = context.perplexity_tokens, context.perplexity_window, context.loaded.model.config
    at_once = min(perplexity.windows_at_once(window, config, context.loaded.device.type), len(tokens) // window)
    result = context.fitted(
        "perplexity",
        "measure",
        lambda halvings: perplexity.perplexity(
            context.model_of(recipe),
            tokens,
            window,
            residency=replace(context.residency_of(recipe), halvings=halvings),
            bos=context.bos,
        ),
        lambda: context.halvings(at_once, window, context.residency_of(recipe)),
    )
    context.artifacts.put("perplexity", key, {name: np.array(value) for name, value in asdict(result).items()})
    return result, result.num_tokens


def measure_items(context: TrialContext, recipe: Recipe, index: int) -> tuple[list[ItemScore], int]:
    """Return the scores of the items that slice `index` adds, and the tokens forwarded to get them (0: they were cached)."""
    protocol = context.run.protocol.of_items()
    key = context.measurement_key(recipe.structure, tasks=context.contents.tasks, protocol=protocol, slice=index)
    scores = context.suite.blank_scores(index)
    stored = context.artifacts.get("zero_shot", key, lambda arrays: context.suite.judge(index, scores.stored(arrays)))
    if stored is not None:
        return stored, 0

    def score(halvings: int) -> bool:
        share = context.sharing_unsupported is None
        residency = replace(context.residency_of(recipe), halvings=halvings)
        context.suite.request_scores(context.model_of(recipe), index, share=share, residency=residency, scores=scores)
        return share

    def most() -> int:
        config, device = context.loaded.model.config, context.loaded.device.type
        return context.suite.most_halvings(index, config, True, context.residency_of(recipe), device)

    share = context.fitted("zero_shot", "measure", score, most)
    context.artifacts.put("zero_shot", key, {"loglikelihoods": scores.loglikelihoods, "greedy": scores.greedy})
    return context.suite.judge(index, scores), context.suite.tokens_in_slice(index, share)


def measure_kl(
    context: TrialContext, recipe: Recipe, base: ModelSource | None = None
) -> tuple[dict[str, Divergence], int]:
    """Return KL(dense || pruned) of the model that `recipe` makes, on "text" and on "tasks" (not there where no item has a
    single right choice); and the tokens forwarded to get it, those of the dense model among them (0: it was cached).
    `base`: the dense model of a checkpoint, which keeps all that it has; None: that of `context`. Raises UserError where
    `base` is of another vocabulary, or has another head than a checkpoint that is no GGUF file."""
    other = {} if base is None else {"base": loading.model_fingerprint(base, loading.load_config(base))}
    parts = {name: samples for name, samples in _samples(context).items() if samples}
    divergences: dict[str, Divergence] = {}
    keys: dict[str, dict[str, Any]] = {}
    for name, samples in parts.items():
        keys[name] = context.measurement_key(recipe.structure, tokens=_content(samples), block=BLOCKS[name], **other)
        stored = context.artifacts.get("kl", keys[name], lambda arrays: Divergence(**arrays))
        if stored is not None:
            divergences[name] = stored
    if len(divergences) == len(parts):
        return divergences, 0
    together = [sample for samples in parts.values() for sample in samples]  # one pass: a streamed model is read once
    beside, dense_head = (context, None) if base is None else _opened_beside(context, base)
    dense, forwarded = _dense_states(beside, together)

    def run(residency: Residency) -> np.ndarray:
        return token_divergences(context.model_of(recipe), together, dense, residency, dense_head)

    sizes = [sum(map(len, samples)) for samples in parts.values()]
    values = np.split(_fitted(context, recipe, together, run), np.cumsum(sizes)[:-1])
    for (name, samples), nats in zip(parts.items(), values, strict=True):
        divergences[name] = Divergence.of(nats, samples, BLOCKS[name])
        context.artifacts.put("kl", keys[name], asdict(divergences[name]))
    return divergences, forwarded + sum(sizes)


def _samples(context: TrialContext) -> dict[str, list[Tensor]]:
    """Return what KL is measured on: windows of the perplexity text, and questions with their right answers."""
    text, right = context.perplexity_tokens, context.suite.right_answers()
    length = text_tokens(context.perplexity_window, context.bos)
    sizes = list(map(len, right))
    most = compared_tokens(sum(sizes), TASK_TOKENS)
    return {
        "text": [
            begun(part[None], context.bos)[0] for part in text[: compared_tokens(len(text), TEXT_TOKENS)].split(length)
        ],
        "tasks": [
            torch.from_numpy(tokens).long()
            for tokens, before in zip(right, accumulate(sizes, initial=0), strict=False)
            if before < most
        ],
    }


def _content(samples: Sequence[Tensor]) -> str:
    return digest([sample.tolist() for sample in samples])


def _dense_states(context: TrialContext, samples: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return `head_inputs` of the dense model, and the tokens forwarded to get them."""
    recipe, count = Recipe(PruningPlan.keep_all(context.loaded.geometry)), sum(map(len, samples))
    dtype, width = context.loaded.model.dtype, context.loaded.geometry.hidden_size
    key = context.measurement_key(recipe.structure, tokens=_content(samples))

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
        return head_inputs(context.loaded.model, samples, residency)

    states = _fitted(context, recipe, samples, run)
    context.artifacts.put("dense_states", key, {"states": states.view(-1).view(torch.uint8).numpy()})
    return states, count


def _words(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokens of a tokenizer and their ids, without those that fill up a GGUF file: as many as the model has
    rows, in no text."""
    return {word: index for word, index in tokenizer.get_vocab().items() if word != f"[PAD{index}]"}


def _opened_beside(context: TrialContext, base: ModelSource) -> tuple[TrialContext, Callable[[Tensor], Tensor] | None]:
    """Return the dense model of the checkpoint that `context` holds, and its head where the checkpoint's is another, which a GGUF
    file may have rounded. Its weights stay in their files where they can: they are wanted for one pass. Raises UserError."""
    checkpoint, run = context.loaded, context.run
    fallback = Fallback(Residency(from_files=readable_in_place(base)))
    loaded = load(base, checkpoint.model.dtype, checkpoint.device.type, base.label, fallback)
    dense = TrialContext(replace(run, label=base.label), loaded, context.artifacts, fallback)
    same_words = _words(loaded.tokenizer) == _words(checkpoint.tokenizer)
    if not same_words or not torch.equal(dense.perplexity_tokens, context.perplexity_tokens):
        raise UserError(
            f"{run.label} cannot be compared with {base.label}, which has another tokenizer; name the model that it was pruned "
            "from with --base"
        )
    head = Head(loaded.model)
    if head.scale != Head(checkpoint.model).scale:
        raise UserError(
            f"{run.label} cannot be compared with {base.label}, whose logits are scaled otherwise, as those of a Granite model "
            "in a GGUF file; measure the checkpoint in Hugging Face format"
        )
    heads = _head(loaded), _head(checkpoint)
    if all(torch.equal(one, other) for one, other in zip(*heads, strict=True)):
        return dense, None
    if checkpoint.source.gguf is None:
        raise UserError(
            f"{run.label} cannot be compared with {base.label}: their output heads differ in {run.dtype}; name the model that it "
            "was pruned from with --base, or measure in the data type that it was saved in with --dtype"
        )
    weights = [weight.to(context.loaded.device) for weight in heads[0]]
    return dense, lambda hidden: head.finished(F.linear(hidden, *weights))


def _head(loaded: LoadedModel) -> list[Tensor]:
    """Return the weights of the output head, on the CPU."""
    named = dict(loaded.model.named_parameters(remove_duplicate=False))
    names, weights = {id(p): name for name, p in named.items()}, loaded.residency.weights or named
    return [weights[names[id(p)]].cpu() for p in loaded.model.get_output_embeddings().parameters()]


def _fitted(context: TrialContext, recipe: Recipe, samples: Sequence[Tensor], run: Callable[[Residency], T]) -> T:
    """Return what `run` gives in the first way to hold the model of `recipe` in which memory suffices."""
    rows = most_rows(samples, context.loaded.model.config, context.loaded.device.type)
    return context.fitted(
        "kl",
        "measure",
        lambda halvings: run(replace(context.residency_of(recipe), halvings=halvings)),
        lambda: context.halvings(rows, min(map(len, samples)), context.residency_of(recipe)),
    )
