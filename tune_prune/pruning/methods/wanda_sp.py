"""Weights of o and down times the norms of their inputs (Wanda-sp of FLAP, arXiv:2312.11983, after Wanda, arXiv:2306.11695).

    score(group) = sum over the group's columns j of o, or of down, of  ||X_j|| * sum_i |W_ij|,  over the group's parameters

There a layer loses a fixed share of its heads and of its channels. Here groups of all layers are compared, per parameter, as
with every other method.
"""

import numpy as np
import torch

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense
from tune_prune.pruning.statistics.input_norms import InputNorms

STATISTICS = ("input_norms",)


def scores(dense: Dense) -> GroupScores:
    norms: InputNorms = dense.statistics["input_norms"]
    attention, mlp = [], []
    for index, layer in enumerate(dense.layers()):
        part = dense.family.linears(layer)
        by_head = norms.attention[index]
        if kv_heads := dense.geometry.kv_heads[index]:
            by_head = (by_head * _column_sums(part["output"])).reshape(kv_heads, -1).sum(1)
        attention.append(by_head)
        mlp.append(norms.mlp[index] * _column_sums(part["down"]))
    return GroupScores(tuple(attention), tuple(mlp)).per_parameter(dense.geometry)


@torch.no_grad()
def _column_sums(linear: torch.nn.Linear) -> np.ndarray:
    """Return sum_i |W_ij|, float64 [inputs]."""
    sums: np.ndarray = linear.weight.abs().sum(0, dtype=torch.float64).cpu().numpy()
    return sums
