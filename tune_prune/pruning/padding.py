"""MLPs whose channels are filled up with zeros, for measuring on a GPU.

A free shape leaves widths such as 11,469, and of these 31 in 32 are odd: GPUs multiply half-precision matrices in tiles, and rows
that are not aligned to them cost a third of the speed or more. A channel of zeros adds nothing: silu(0) * 0 = 0, times a column
of zeros. So outputs stay, and the model that is saved keeps the widths that were searched; `--shape aligned` changes that one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.runner.layer_weights import LazyWeights

MULTIPLE = {"cuda": 64}  # of channels, by the kind of device; others take any width


def pad(model: PreTrainedModel, family: Family, multiple: int) -> None:
    """Fill up the MLPs of a pruned copy, in place, to a multiple of so many channels. Tensors that it shares with the dense model
    stay as they are."""
    for layer in decoder_layers(model, family):
        parts = family.linears(layer)
        missing = -parts["gate"].out_features % multiple if "gate" in parts else 0
        if missing:
            for role in ("gate", "up"):
                _replace(parts[role], (0, 0, 0, missing), missing)
                parts[role].out_features += missing
            _replace(parts["down"], (0, missing), 0)
            parts["down"].in_features += missing


def _replace(linear: nn.Linear, zeros: tuple[int, ...], biases: int) -> None:
    """Give a projection `zeros` around its weight, as torch's pad counts them, and behind its bias."""
    linear.weight = nn.Parameter(F.pad(linear.weight, zeros), requires_grad=False)
    if linear.bias is not None and biases:
        linear.bias = nn.Parameter(F.pad(linear.bias, (0, biases)), requires_grad=False)


def padded_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> LazyWeights:
    """The `weights` of a model without padding, by parameter name, each filled up to its shape in `model` when it is asked for:
    padded by `pad`, and maybe on the meta device."""
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def find(name: str) -> torch.Tensor:
        found = weights[name]
        missing = [to - of for to, of in zip(shapes.get(name, found.shape), found.shape, strict=True)]
        return F.pad(found, [zeros for count in reversed(missing) for zeros in (0, count)]) if any(missing) else found

    return LazyWeights(weights, find)


def most_bytes(channel_costs: tuple[int, ...], itemsize: int, device: str) -> int:
    """What padding adds at most to a model whose layers have channels of those numbers of parameters."""
    return (MULTIPLE.get(device, 1) - 1) * sum(channel_costs) * itemsize
