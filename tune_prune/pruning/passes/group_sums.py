"""Sums over the weights of every group (pruning/groups.py) of a number per weight, such as its absolute value."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from tune_prune.models.families import Family
from tune_prune.pruning.groups import GroupScores


def group_sums(layers: Iterable[nn.Module], family: Family, number: Callable[[Tensor], Tensor]) -> GroupScores:
    """Return for every group the sum of `number` over its weights and biases. `number` maps a parameter to a tensor of its
    shape."""
    sums = [layer_group_sums(layer, family, number) for layer in layers]
    return GroupScores.of_layers(sums)


@torch.no_grad()
def layer_group_sums(
    layer: nn.Module, family: Family, number: Callable[[Tensor], Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the group sums of one layer: float64 [K] of its KV groups, [M] of its channels, or [E, 1 + m] of its experts and of
    the channels of each. Rows of the router are left out: one of zeros is an expert that some tokens take."""

    def sums(role: str, side: int) -> Tensor:
        """Return sums over each row (side 0, with its bias) or column (side 1) of a projection."""
        linear = part[role]
        total = number(linear.weight).sum(1 - side)
        if side == 0 and linear.bias is not None:
            total += number(linear.bias)
        return total

    part, kv_heads = family.linears(layer), family.kv_heads(layer)
    if (mixture := family.mixture(layer)) is not None:
        in_rows = number(mixture.gate_up).sum(2).view(mixture.count, 2, -1).sum(1)
        channels = in_rows + number(mixture.down).sum(1)
        mlp = torch.cat([channels.sum(1, keepdim=True), channels], 1)
    else:
        mlp = sums("gate", 0) + sums("up", 0) + sums("down", 1)
    attention = mlp.new_empty(0)  # where it stays whole
    if kv_heads:
        by_row = sum(sums(role, 0).view(kv_heads, -1).sum(1) for role in ("query", "key", "value"))
        attention = by_row + sums("output", 1).view(kv_heads, -1).sum(1)
    return attention.double().cpu().numpy(), mlp.double().cpu().numpy()
