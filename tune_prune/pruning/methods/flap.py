"""FLAP's score alone (arXiv:2312.11983): fluctuation of the inputs of o and of down times their weights, by layer standardised.

    metric_j = Var(x_j) * sum_i W_ij^2  of down's inputs, and its square of o's
    z_j      = (metric_j - mean) / standard deviation,   over the inputs of that projection in that layer
    score    = z of a channel; of a KV group the mean z over its columns of o

The WIFV metric with the adaptive structure AL-AM, squared for attention as in the authors' code: the scores of all layers are
compared with each other, whatever a group costs. FLAP then puts a bias, the mean of what was removed, in its place: here
`compensation: least_squares` does more, and needs no biases that a family does not have.
The only KV group of a layer scores 0: its mean is that of all inputs of o. A block whose metric is 0 everywhere adds nothing
that varies: its z would be 0 / 0, and all of it goes before anything else, as the metric itself has it.
"""

import numpy as np
import torch

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense
from tune_prune.pruning.statistics.input_norms import InputNorms

STATISTICS = ("input_norms",)


def scores(dense: Dense) -> GroupScores:
    inputs: InputNorms = dense.statistics["input_norms"]
    layers = []
    for index, layer in enumerate(dense.layers()):
        part = dense.family.linears(layer)
        by_input = inputs.attention_variance[index]
        attention = np.empty(0)  # where it stays whole
        if kv_heads := dense.geometry.kv_heads[index]:
            by_input = np.square(by_input * _squared_columns(part["output"]))
            attention = _standardised(by_input).reshape(kv_heads, -1).mean(1)
        # The z of a layer's only group is the mean of all: 0 but for rounding, which must not choose among layers.
        if len(attention) == 1 and by_input.any():
            attention = np.zeros(1)
        mlp = _standardised(inputs.mlp_variance[index] * _squared_columns(part["down"]))
        layers.append((attention, mlp))
    return GroupScores.of_layers(layers)


def _standardised(metric: np.ndarray) -> np.ndarray:
    """Return 0 where all are equal, and of a single one; -inf where all are 0."""
    if not metric.any():
        return np.full_like(metric, -np.inf)
    centred: np.ndarray = metric - metric.mean()
    spread = metric.std(ddof=1) if len(metric) > 1 else 0.0
    return centred / spread if spread > 0 else centred


@torch.no_grad()
def _squared_columns(linear: torch.nn.Linear) -> np.ndarray:
    """Return sum_i W_ij^2, float64 [inputs]."""
    sums: np.ndarray = linear.weight.double().square().sum(0).cpu().numpy()
    return sums
