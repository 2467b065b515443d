"""The passes of one trial as the published search's code makes them, in plain transformers calls.

Source: github.com/song17122328/llama-pruning, `run_global_pruning.py`, `core/importance/layer_analyzer.py` and
`evaluation/metrics`. A gradient pass takes batches of 8 samples through `model(ids, labels=ids)` and `backward`, for every
parameter of the model. Where a method asks for removal losses, those of layers and those of both blocks are taken, whichever
it uses, text by text, each by one whole forward pass. Perplexity goes window by window.

Left out of it, to its advantage: the statistics of all gradients after every batch, a second perplexity text, saving and
loading the pruned model in between. Changed, so that the results can be compared: float32 weights, the calibration windows
of this project, and a removed block that adds nothing, where that code returns the block's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tune_prune.models.families import decoder_layers
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.loading import LoadedModel
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.passes.batches import batch_size
from tune_prune.pruning.passes.group_sums import group_sums
from tune_prune.pruning.statistics import parse

GRADIENT_BATCH = 8  # samples, the default of the published code


def removal_kinds(method: str) -> tuple[str, ...]:
    """Return the blocks whose removal losses the method decides by."""
    named = [parse(name) for name in load_method(method).statistics]
    return tuple(kind for statistic, kind in named if statistic == "block_removal")


def gradient_pass(loaded: LoadedModel, windows: Tensor) -> GroupScores:
    """Return the importance of every group, I(group), from all `windows` [samples, seq_len]."""
    model = loaded.model.requires_grad_(True)
    for batch in windows.split(GRADIENT_BATCH):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        (loss * (len(batch) / len(windows))).backward()
    scores = group_sums(decoder_layers(model, loaded.family), loaded.family, _salience)
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)
    return scores


def _salience(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return (parameter * parameter.grad).abs()


@torch.no_grad()
def removal_passes(
    loaded: LoadedModel, windows: Tensor, kinds: Sequence[str], in_batches: bool = False
) -> dict[str, np.ndarray]:
    """Return losses in nats [layers, samples] without each block of `kinds`, and of the dense model [1, samples] as "dense":
    sample by sample, or `in_batches` and with the head of the search."""
    head = NextTokenLosses(loaded.model) if in_batches else None

    def losses() -> np.ndarray:
        if head is None:
            return np.array([_loss(loaded.model, sample[None]) for sample in windows])
        step = batch_size(windows.shape[1], loaded.model.device.type)
        return np.concatenate([head(batch).mean(dim=1).double().numpy() for batch in windows.split(step)])

    by_kind = {"dense": losses()[None]}
    for kind in kinds:
        rows = []
        for layer in decoder_layers(loaded.model, loaded.family):
            with without_block(loaded, layer, kind):
                rows.append(losses())
        by_kind[kind] = np.stack(rows)
    return by_kind


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokens: Tensor, window: int) -> float:
    """Return the perplexity of `tokens` [N] in windows of `window` tokens, the last one shorter, every token alike."""
    windows = [part[None] for part in tokens.split(window) if len(part) > 1]
    counts = [part.shape[1] - 1 for part in windows]
    total = sum(_loss(model, part) * count for part, count in zip(windows, counts, strict=True))
    return math.exp(total / sum(counts))


def _loss(model: PreTrainedModel, sample: Tensor) -> float:
    return model(input_ids=sample, labels=sample, use_cache=False).loss.item()


@contextmanager
def without_block(loaded: LoadedModel, layer: torch.nn.Module, kind: str) -> Iterator[None]:
    """Let `layer` be without its block of that kind, which is not run; everything else is."""
    family = loaded.family
    name = {"layer": None, "attention": family.attention, "mlp": family.mlp}[kind]
    block = layer if name is None else layer.get_submodule(name)

    def nothing(hidden_states: torch.Tensor, *_: object, **__: object) -> object:
        if kind == "layer":
            return hidden_states
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if kind == "attention" else zeros

    block.forward = nothing
    try:
        yield
    finally:
        del block.forward  # the class's own is back
