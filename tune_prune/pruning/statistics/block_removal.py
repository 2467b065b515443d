"""How much the loss grows when a block is taken out: D_l of a whole layer, of its attention, of its MLP.

    D = mean over samples of (loss without the block) - (loss of the dense model), in nats per token

A removed block adds nothing to the residual stream. Losses are kept per sample, so the first n
rows serve every smaller n, and each sample runs in a batch of the same size in every pass (`growing_batches`). Taking out
layer l leaves the inputs of the layers up to l as they were: they are computed once per batch and the removed model runs
from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core.config import PruningConfig
from tune_prune.core.terminal import progress
from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.pruning.batches import batch_size, growing_batches
from tune_prune.pruning.statistics import Arrays, Need, PassWork, Statistic

KINDS = ("layer", "attention", "mlp")
# Below this an increase counts as this: ln(1 + D) of a block that helps nothing must not become 0 or negative, which would tie
# or reverse the order of its groups. In nats per token.
LOSS_FLOOR = 1e-6


@dataclass(frozen=True)
class RemovalLosses:
    """Losses in nats per token; `dense` [samples], `removed[kind]` [layers, samples]."""

    dense: np.ndarray
    removed: dict[str, np.ndarray]

    def increase(self, kind: str, num_samples: int) -> np.ndarray:
        """D per layer, float64 [layers], over the first `num_samples` samples. May be negative."""
        return (self.removed[kind][:, :num_samples] - self.dense[:num_samples]).mean(axis=1)


class BlockRemoval(Statistic):
    version = 3  # 3: batches that do not depend on the number of samples
    stage = "removal"
    label = "removal"
    kinds = KINDS
    reads = ("seq_len", "num_samples", "removal_divisor")

    def num_samples(self, config: PruningConfig) -> int:
        return config.num_removal_samples

    def key(self, need: Need) -> dict[str, Any]:
        return {"removal": need.kind}

    def covers(self, arrays: Arrays, need: Need) -> bool:
        return len(arrays["dense"]) >= need.num_samples

    def collect(
        self, model: PreTrainedModel, family: Family, windows: torch.Tensor, needs: Sequence[Need]
    ) -> dict[Need, dict[str, np.ndarray]]:
        count = max(need.num_samples for need in needs)
        found = removal_losses(model, family, windows[:count], [need.kind for need in needs])
        return {need: {"dense": found.dense, "removed": found.removed[need.kind]} for need in needs}

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        samples, kinds = max(need.num_samples for need in needs), [need.kind for need in needs]
        # A removed layer leaves those behind it to run, and of its own blocks the other one.
        layers = num_layers + len(kinds) * num_layers * (num_layers - 1) // 2
        runs = 1 + len(kinds) * num_layers
        sizes = [size for _, size in growing_batches(samples, batch_size(seq_len, device))]
        run = sum(sizes) * seq_len  # tokens, with those that fill the last batch
        return PassWork(
            tokens=samples * seq_len * runs,
            attention_tokens=run * (layers + num_layers * kinds.count("mlp")),
            mlp_tokens=run * (layers + num_layers * kinds.count("attention")),
            head_positions=sum(sizes) * (seq_len - 1) * runs,
            batch_tokens=max(sizes) * seq_len,
        )

    def value(self, arrays: Arrays, need: Need) -> np.ndarray:
        """D per layer, float64 [layers], at least LOSS_FLOOR."""
        return np.maximum(_increase(arrays, need), LOSS_FLOOR)

    def metrics(self, found: Mapping[Need, Arrays]) -> dict[str, float]:
        clamped = sum((_increase(arrays, need) < LOSS_FLOOR).sum() for need, arrays in found.items())
        return {"clamped_removal_losses": float(clamped)}


def _increase(arrays: Arrays, need: Need) -> np.ndarray:
    return RemovalLosses(arrays["dense"], {need.kind: arrays["removed"]}).increase(need.kind, need.num_samples)


class IdentityLayer(nn.Module):
    """Stands in for a decoder layer: returns its input or, where given, `output`."""

    def __init__(self, layer: nn.Module, output: torch.Tensor | None = None) -> None:
        super().__init__()
        self.output = output
        if hasattr(layer, "attention_type"):  # some versions of transformers ask the layer which mask it wants
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return hidden_states if self.output is None else self.output


@torch.inference_mode()
def removal_losses(
    model: PreTrainedModel, family: Family, windows: torch.Tensor, kinds: Iterable[str]
) -> RemovalLosses:
    """Per-sample losses of the dense model and of every removal of `kinds` (of KINDS) on `windows` [samples, seq_len]; those
    of the first n are, bit for bit, what n samples give alone.

    The model is changed while this runs and restored at the end.
    """
    kinds = tuple(dict.fromkeys(kinds))
    layers = decoder_layers(model, family)
    losses = NextTokenLosses(model)
    dense: list[np.ndarray] = []
    removed: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
    with progress.step("removals", lambda: len(windows) * len(kinds) * len(layers), "samples") as advance:
        for start, size in growing_batches(len(windows), batch_size(windows.shape[1], model.device.type)):
            own = windows[start : start + size]
            batch = own[torch.arange(size) % len(own)].to(model.device)  # filled up with its own samples

            def means(batch: torch.Tensor = batch, count: int = len(own)) -> np.ndarray:
                return losses(batch)[:count].mean(dim=1).double().cpu().numpy()

            with _recorded_inputs(layers) as inputs:
                dense.append(means())
            for kind in kinds:
                rows = []
                for index in range(len(layers)):
                    with _without(layers, family, index, kind, inputs[index]):
                        rows.append(means())
                    advance(len(own))
                removed[kind].append(np.stack(rows))
    return RemovalLosses(
        np.concatenate(dense), {kind: np.concatenate(parts, axis=1) for kind, parts in removed.items()}
    )


@contextmanager
def _recorded_inputs(layers: nn.ModuleList) -> Iterator[list[torch.Tensor]]:
    """Collects the hidden states [batch, time, H] in front of every layer during one forward pass."""
    inputs: list[torch.Tensor] = []
    handles = [layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0])) for layer in layers]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without(layers: nn.ModuleList, family: Family, index: int, kind: str, given: torch.Tensor) -> Iterator[None]:
    """Layer `index` lacks the block of `kind`; the layers in front of it are replaced by their output, its input `given`."""
    whole = list(layers)
    layer = whole[index]
    for before in range(index):
        layers[before] = IdentityLayer(whole[before], given)
    name = {"layer": None, "attention": family.attention, "mlp": family.mlp}[kind]
    block = None
    if name is None:
        layers[index] = IdentityLayer(layer)
    else:
        block = getattr(layer, name)
        setattr(layer, name, RemovedBlock(kind, None))
    try:
        yield
    finally:
        for position, original in enumerate(whole):
            layers[position] = original
        if name is not None:
            setattr(layer, name, block)


STATISTIC = BlockRemoval()
