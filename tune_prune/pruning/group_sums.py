"""Sums over the weights of every group (pruning/groups.py) of a number per weight, such as its absolute value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.pruning.groups import GroupScores


@torch.no_grad()
def group_sums(model: PreTrainedModel, family: Family, number: Callable[[Tensor], Tensor]) -> GroupScores:
    """For every group the sum of `number` over its weights and biases. `number` maps a parameter to a tensor of its shape."""

    def sums(linear: nn.Linear, side: int) -> Tensor:
        """Over each row (side 0, with its bias) or column (side 1) of a projection."""
        total = number(linear.weight).sum(1 - side)
        if side == 0 and linear.bias is not None:
            total += number(linear.bias)
        return total

    attention, mlp = [], []
    for layer in decoder_layers(model, family):
        part = family.linears(layer)
        kv_heads = part["key"].out_features // family.head_dim(layer)
        by_row = sum(sums(part[role], 0).view(kv_heads, -1).sum(1) for role in ("query", "key", "value"))
        by_column = sums(part["output"], 1).view(kv_heads, -1).sum(1)
        attention.append((by_row + by_column).double().cpu().numpy())
        rows = sums(part["gate"], 0) + sums(part["up"], 0)
        mlp.append((rows + sums(part["down"], 1)).double().cpu().numpy())
    return GroupScores(tuple(attention), tuple(mlp))
