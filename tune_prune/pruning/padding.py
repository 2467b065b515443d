"""MLPs whose channels are filled up with zeros, for measuring on a GPU.

A free shape leaves widths such as 11,469, and of these 31 in 32 are odd: GPUs multiply half-precision matrices in tiles, and rows
that are not aligned to them cost a third of the speed or more. A channel of zeros adds nothing: silu(0) * 0 = 0, times a column
of zeros. So outputs stay, and the model that is saved keeps the widths that were searched; `--shape aligned` changes that one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.runner.layer_weights import LazyWeights, Weights
from tune_prune.pruning.surgery import Sketch, resize

MULTIPLE = {"cuda": 64}  # of channels, by the kind of device; others take any width


def pad(pruned: Sketch, family: Family, multiple: int) -> Sketch:
    """Widen the MLPs of a pruned model to a multiple of so many channels."""
    for layer in decoder_layers(pruned.model, family):
        parts = family.linears(layer)
        missing = -parts["gate"].out_features % multiple if "gate" in parts else 0
        if missing:
            for role in ("gate", "up"):
                resize(parts[role], parts[role].out_features + missing, parts[role].in_features)
            resize(parts["down"], parts["down"].out_features, parts["down"].in_features + missing)
    return Sketch(pruned.model, zero_filled(pruned.weights, pruned.model, family))


def zero_filled(weights: Weights, model: nn.Module, family: Family) -> LazyWeights:
    """Map the parameters of `model` to `weights` that are filled up with zeros to the sizes that they have there. Parameters that
    `weights` lack are zeros on the CPU, and the norms of heads that are not there ones, as any value does."""
    sizes = model.state_dict()
    norms = tuple(f".{family.attention}.{norm}.weight" for norm in family.head_norms)

    def find(name: str) -> torch.Tensor:
        weight, size = weights.get(name), sizes[name].shape
        if weight is None:
            return torch.full(size, 1.0 if name.endswith(norms) else 0.0, dtype=sizes[name].dtype)
        missing = [wanted - there for wanted, there in zip(size, weight.shape, strict=True)]
        # torch's pad counts from the last dimension: zeros in front of it, and behind it.
        return F.pad(weight, [zeros for count in reversed(missing) for zeros in (0, count)]) if any(missing) else weight

    return LazyWeights(sizes, find)


def most_bytes(channel_costs: tuple[int, ...], itemsize: int, device: str) -> int:
    """Return what padding adds at most to a model whose layers have channels of those numbers of parameters."""
    return (MULTIPLE.get(device, 1) - 1) * sum(channel_costs) * itemsize
