"""How much the loss grows when a block is taken out: D_l of a whole layer, of its attention, of its MLP.

    D = mean over samples of (loss without the block) - (loss of the dense model), in nats per token

A removed block adds nothing to the residual stream. Losses are kept per sample, so the first n
rows serve every smaller n, and each sample runs in a batch of the same size in every pass (`growing_batches`): a pass that was
interrupted, or made for fewer samples, goes on behind its last batch. Taking out
layer l leaves the inputs of the layers up to l as they were: they are computed once per batch and the removed model runs
from there, beside all others: every layer is needed once for a batch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core import terminal
from tune_prune.core.artifact_cache import KEEP_EVERY_S
from tune_prune.core.config import PruningConfig
from tune_prune.models.families import Family
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.models.runner.layer_runner import Carried, LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.passes.batches import batch_size, growing_batches
from tune_prune.pruning.statistics import CALIBRATION, Arrays, Begun, GrowingStatistic, Need, PassWork

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
        """Return D per layer, float64 [layers], over the first `num_samples` samples. May be negative."""
        return (self.removed[kind][:, :num_samples] - self.dense[:num_samples]).mean(axis=1)


class BlockRemoval(GrowingStatistic):
    version = 3  # 3: batches that do not depend on the number of samples
    stage = "removal"
    label = "removal"
    kinds = KINDS
    reads = (*CALIBRATION, "removal_divisor")

    def num_samples(self, config: PruningConfig) -> int:
        return config.num_removal_samples

    def key(self, need: Need) -> dict[str, Any]:
        return {"removal": need.kind}

    def samples(self, arrays: Arrays) -> int:
        return len(arrays["dense"])

    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
        begun: Begun | None = None,
        keep: Callable[[Begun], object] = id,
    ) -> dict[Need, dict[str, np.ndarray]]:
        def arrays(found: RemovalLosses) -> dict[Need, dict[str, np.ndarray]]:
            return {need: {"dense": found.dense, "removed": found.removed[need.kind]} for need in needs}

        count = max(need.num_samples for need in needs)
        before = None
        if begun is not None:
            least = min((begun[need]["dense"] for need in needs), key=len)
            before = RemovalLosses(least, {need.kind: begun[need]["removed"][:, : len(least)] for need in needs})
        found = removal_losses(
            model,
            family,
            windows[:count],
            [need.kind for need in needs],
            residency,
            before,
            lambda losses: keep(arrays(losses)),
        )
        return arrays(found)

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
            row_tokens=seq_len,
            carried=runs,
        )

    def parts(self, needs: Sequence[Need], num_layers: int) -> int:
        return len({need.kind for need in needs}) * num_layers

    def value(self, arrays: Arrays, need: Need) -> np.ndarray:
        """Return D per layer, float64 [layers], at least LOSS_FLOOR."""
        return np.maximum(_increase(arrays, need), LOSS_FLOOR)

    def metrics(self, found: Mapping[Need, Arrays]) -> dict[str, float]:
        clamped = sum((_increase(arrays, need) < LOSS_FLOOR).sum() for need, arrays in found.items())
        return {"clamped_removal_losses": float(clamped)}


def _increase(arrays: Arrays, need: Need) -> np.ndarray:
    return RemovalLosses(arrays["dense"], {need.kind: arrays["removed"]}).increase(need.kind, need.num_samples)


@torch.inference_mode()
def removal_losses(
    model: PreTrainedModel,
    family: Family,
    windows: torch.Tensor,
    kinds: Iterable[str],
    residency: Residency = RESIDENT,
    begun: RemovalLosses | None = None,
    keep: Callable[[RemovalLosses], object] = id,
) -> RemovalLosses:
    """Return per-sample losses of the dense model and of every removal of `kinds` (of KINDS) on `windows` [samples, seq_len]; those
    of the first n are, bit for bit, what n samples give alone.

    All removals go through the layers together, or a part of them at a time where `residency` says so: each begins at its layer,
    from what the dense model has there. `keep` is given what there is every KEEP_EVERY_S seconds; `begun`: such a part, which is
    not computed again.
    """
    kinds = tuple(dict.fromkeys(kinds))
    runner = LayerRunner(model, family, residency)
    whole = [*growing_batches(len(windows), batch_size(windows.shape[1], runner.device.type))]
    there = 0 if begun is None else max(start for start, _ in whole if start <= len(begun.dense))
    own = {
        start: windows[start : start + size] for start, size in whole if start >= there
    }  # samples by their first one
    # The same, filled up with their own samples.
    batches = {start: own[start][torch.arange(size) % len(own[start])] for start, size in whole if start >= there}
    removals = [(kind, index) for kind in kinds for index in range(runner.num_layers)]
    at_once = residency.at_once(len(removals))
    sweeps = [
        removals[i : i + at_once] for i in range(0, max(1, len(removals)), at_once)
    ]  # of none the dense losses alone
    dense = [] if begun is None else [begun.dense[:there]]
    removed = {(kind, i): [] if begun is None else [begun.removed[kind][i, :there]] for kind, i in removals}

    def losses() -> RemovalLosses:
        found = {removal: np.concatenate(parts) for removal, parts in removed.items()}
        by_kind = {kind: np.stack([found[kind, index] for index in range(runner.num_layers)]) for kind in kinds}
        return RemovalLosses(np.concatenate(dense), by_kind)

    kept = time.monotonic()
    total, done = len(windows) * len(removals), there * len(removals)
    with terminal.step("removals", lambda: total, "samples", lambda: done) as advance:
        for block in runner.blocks(batches, 1 + len(sweeps[0])):
            for sweep in sweeps:
                carried = runner.embedded(block)
                for index, layer in runner.layers():
                    for start in block:
                        advance(len(own[start]) * _pass_layer(carried, start, family, layer, index, sweep))
                with runner.tail() as tail:
                    for start, batch in block.items():
                        samples, count = batch.to(runner.device), len(own[start])
                        states = carried.states.pop(start)
                        if sweep is sweeps[0]:  # every sweep has it
                            dense.append(_means(tail, samples, states, count))
                        for removal in sweep:
                            states = carried.states.pop((start, *removal))
                            removed[removal].append(_means(tail, samples, states, count))
            if time.monotonic() - kept > KEEP_EVERY_S:
                keep(losses())
                kept = time.monotonic()
    return losses()


def _means(losses: NextTokenLosses, samples: torch.Tensor, states: torch.Tensor, count: int) -> np.ndarray:
    """Return the mean losses of the first `count` samples, whose states behind the last layer these are."""
    return losses(samples, states)[:count].mean(dim=1).double().cpu().numpy()


def _pass_layer(
    carried: Carried, batch: int, family: Family, layer: nn.Module, index: int, removals: Sequence[tuple[str, int]]
) -> int:
    """Take a batch through `layer`, number `index`: the dense model's state, by the key `batch`, and those of `removals` (kind,
    number of the layer), by (batch, kind, number). Returns how many of them begin here."""
    states = carried.states
    hidden = states[batch]
    begun = 0
    for kind, removed in removals:
        key = (batch, kind, removed)
        if removed < index:
            states[key] = carried.run(layer, index, batch, states[key])
        elif removed == index:
            whole = kind == "layer" and not family.shared_states
            states[key] = hidden if whole else carried.run(_without(layer, family, kind), index, batch, hidden)
            begun += 1
    states[batch] = carried.run(layer, index, batch, hidden)
    return begun


class _Unheard(nn.Module):
    """A layer, or the attention of one, that adds nothing: it is run for the keys and values that layers behind it attend to."""

    def __init__(self, kind: str, block: nn.Module) -> None:
        super().__init__()
        self.kind = kind
        self.block = block

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.block(hidden_states, *args, **kwargs)
        return hidden_states if self.kind == "layer" else (torch.zeros_like(hidden_states), None)


def _without(layer: nn.Module, family: Family, kind: str) -> nn.Module:
    """Return `layer` without its "attention" or "mlp", or without what it adds at all; all else is its own."""
    if kind == "layer":
        return _Unheard(kind, layer)
    name = {"attention": family.attention, "mlp": family.mlp}[kind]
    unheard = kind == "attention" and family.shared_states
    reduced = copy.copy(layer)
    rest = _Unheard(kind, layer.get_submodule(name)) if unheard else RemovedBlock(kind, None)
    reduced._modules = {**layer._modules, name: rest}
    return reduced


STATISTIC = BlockRemoval()
