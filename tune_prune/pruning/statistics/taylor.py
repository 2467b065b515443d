"""Taylor importance of every group, first order.

    G        = gradient of the mean next-token loss, mean over the calibration samples, signed, accumulated in float32
    I(group) = sum over the group's weights of |w * G|

Molchanov et al. 2019 (arXiv:1906.10771); LLM-Pruner's `param_first` (arXiv:2305.11627). Gradients for n samples are a
prefix of those for more, so one pass yields a snapshot for every n asked for. Batches end where they would end in any
pass, so the snapshot for n equals, bit for bit, a pass over n samples alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.head import NextTokenLosses
from tune_prune.pruning.groups import GroupScores

# Of a batch. A CPU wants activations that stay in its caches: at a hidden size of 512, batches of 8,192 tokens take 1.6 times as
# long. On a GPU this fills matrix products of 7B models, whose layers save 6.5 MB a token for the backward pass.
BATCH_TOKENS = {"cpu": 1024, "cuda": 2048}


@dataclass(frozen=True)
class LayerGradients:
    """Statistics of G over each layer's projection weights; float64 [layers]."""

    abs_mean: np.ndarray  # mean |G|
    norm: np.ndarray  # ||G||, Frobenius over all projections of the layer
    std: np.ndarray
    abs_max: np.ndarray


@dataclass(frozen=True)
class Importance:
    """I(group), not yet divided by cost, and the gradients' statistics, from the first `num_samples` windows."""

    num_samples: int
    groups: GroupScores
    gradients: LayerGradients

    def arrays(self) -> dict[str, np.ndarray]:
        """Flat arrays for the artifact cache."""
        result = {f"gradient_{f.name}": getattr(self.gradients, f.name) for f in fields(LayerGradients)}
        for layer, (attention, mlp) in enumerate(zip(self.groups.attention, self.groups.mlp, strict=True)):
            result[f"attention_{layer}"], result[f"mlp_{layer}"] = attention, mlp
        return result

    @classmethod
    def from_arrays(cls, num_samples: int, arrays: dict[str, np.ndarray]) -> Importance:
        gradients = LayerGradients(**{f.name: arrays[f"gradient_{f.name}"] for f in fields(LayerGradients)})
        layers = range(len(gradients.norm))
        groups = GroupScores(
            tuple(arrays[f"attention_{layer}"] for layer in layers), tuple(arrays[f"mlp_{layer}"] for layer in layers)
        )
        return cls(num_samples, groups, gradients)


def batch_size(seq_len: int, device: str) -> int:
    """Samples per batch on "cpu" or "cuda": a power of two, from the length alone, so that batches end at the same samples
    in every pass."""
    return 2 ** max(0, int(math.log2(max(1, BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"]) // seq_len))))


def taylor(
    model: PreTrainedModel, family: Family, windows: torch.Tensor, snapshots: Sequence[int]
) -> dict[int, Importance]:
    """Importance from the first n rows of `windows` [samples, seq_len], for every n in `snapshots`.

    One forward and backward pass over max(snapshots) samples. Weights are not changed; gradients are taken for the
    projections only. Raises ValueError when a snapshot is not within 1..len(windows).
    """
    wanted = sorted(set(snapshots))
    if not wanted or wanted[0] < 1 or wanted[-1] > len(windows):
        raise ValueError(f"snapshots {wanted} must lie within 1..{len(windows)} samples")
    accumulator = _Accumulator(model, family)
    step = batch_size(windows.shape[1], model.device.type)
    result = {}
    try:
        for start in range(0, wanted[-1], step):
            end = start + step
            inside = [n for n in wanted if start < n < end]
            # The sums are put back only where something follows: a copy is as large as the sums themselves.
            before = accumulator.copy() if len(inside) > 1 or (inside and end <= wanted[-1]) else {}
            for n in inside:
                accumulator.add(windows[start:n])
                result[n] = accumulator.importance(n)
                accumulator.restore(before)
            if end <= wanted[-1]:
                accumulator.add(windows[start:end])
                if end in wanted:
                    result[end] = accumulator.importance(end)
    finally:
        accumulator.close()
    return result


class _Accumulator:
    """Signed sums of per-sample gradients in float32 (float64 for float64 models), filled by hooks as each is ready, so
    that a model in bfloat16 never sums in bfloat16 and no gradient lives longer than its layer's backward pass."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        self.model = model
        self.family = family
        self.parts = [family.linears(layer) for layer in decoder_layers(model, family)]
        # The large allocation comes first: where it fails, the model, which other trials use, is as it was.
        self.sums: dict[torch.Tensor, torch.Tensor] = {
            p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            for part in self.parts
            for role, linear in part.items()
            for p in _members(linear, role)
        }
        self.before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
        for p, _, _ in self.before:
            p.requires_grad_(p in self.sums)
            p.grad = None
        self.losses = NextTokenLosses(model)
        self.handles = [p.register_post_accumulate_grad_hook(self._take) for p in self.sums]

    def _take(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.sums[p] += p.grad
        p.grad = None

    def add(self, windows: torch.Tensor) -> None:
        """Add the gradients of `windows` [B, T]."""
        self.losses.backward(windows.to(self.model.device))

    def copy(self) -> dict[torch.Tensor, torch.Tensor]:
        return {p: total.clone() for p, total in self.sums.items()}

    def restore(self, saved: dict[torch.Tensor, torch.Tensor]) -> None:
        for p, total in saved.items():
            self.sums[p].copy_(total)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        for p, requires_grad, grad in self.before:
            p.requires_grad_(requires_grad)
            p.grad = grad

    @torch.no_grad()
    def importance(self, num_samples: int) -> Importance:
        groups = group_scores(self.model, self.family, lambda p: self.sums[p] / num_samples)
        stats = [self._layer_statistics(part, num_samples) for part in self.parts]
        return Importance(num_samples, groups, LayerGradients(*np.array(stats).T))

    def _layer_statistics(self, part: dict[str, nn.Linear], num_samples: int) -> tuple[float, float, float, float]:
        count, absolute, plain, squares, largest = 0, 0.0, 0.0, 0.0, 0.0
        for linear in part.values():
            gradient = self.sums[linear.weight] / num_samples
            count += gradient.numel()
            absolute += gradient.abs().sum(dtype=torch.float64).item()
            plain += gradient.sum(dtype=torch.float64).item()
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
            largest = max(largest, gradient.abs().max().item())
        mean = plain / count
        return absolute / count, math.sqrt(squares), math.sqrt(max(0.0, squares / count - mean**2)), largest


@torch.no_grad()
def group_scores(
    model: PreTrainedModel, family: Family, gradient: Callable[[torch.Tensor], torch.Tensor]
) -> GroupScores:
    """I(group) of every group; `gradient` gives G of a projection's weight or bias, in its shape."""

    def salience(linear: nn.Linear, side: int) -> torch.Tensor:
        """sum |w * G| over each row (side 0, with its bias) or column (side 1) of a projection."""
        total = (linear.weight * gradient(linear.weight)).abs().sum(1 - side)
        if side == 0 and linear.bias is not None:
            total += (linear.bias * gradient(linear.bias)).abs()
        return total

    attention, mlp = [], []
    for layer in decoder_layers(model, family):
        part = family.linears(layer)
        kv_heads = part["key"].out_features // family.head_dim(layer)
        by_row = sum(salience(part[role], 0).view(kv_heads, -1).sum(1) for role in ("query", "key", "value"))
        by_column = salience(part["output"], 1).view(kv_heads, -1).sum(1)
        attention.append(_numpy(by_row + by_column))
        rows = salience(part["gate"], 0) + salience(part["up"], 0)
        mlp.append(_numpy(rows + salience(part["down"], 1)))
    return GroupScores(tuple(attention), tuple(mlp))


def _members(linear: nn.Linear, role: str) -> list[torch.Tensor]:
    """Parameters of a projection that belong to groups: o and down keep their bias whatever is removed."""
    if linear.bias is None or role in ("output", "down"):
        return [linear.weight]
    return [linear.weight, linear.bias]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()
