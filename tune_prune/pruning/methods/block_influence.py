"""Whole layers, those first that turn the residual stream least (ShortGPT, Men et al. 2024, arXiv:2403.03853).

    score of every group of layer l = BI_l,   within a layer in the order of `magnitude`

ShortGPT removes the n layers of the lowest block influence, for a chosen n, and nothing else. Here the budget is one of parameters,
as for every method: the lowest layers go as a whole, and of the next one as many KV groups and channels as the budget still asks
for, by `magnitude`: depth, and a little width. What no method removes stays: biases of o and down where a layer has them, and the
KV group that cached decoding reads in layer 0; in shape aligned, a block of channels and a KV group of every layer.
"""

from itertools import pairwise

import numpy as np

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense, magnitude

STATISTICS = ("block_influence",)
WHOLE_EXPERTS = True
SHAPES = ("free", "aligned")  # the third leaves the same of every layer
NORMALIZATIONS = ("none", "kind")  # the third divides by the influence of the layer

STEP = 1e-9  # between two layers, at least; order within a layer takes up less


def scores(dense: Dense) -> GroupScores:
    influence: np.ndarray = dense.statistics["block_influence"]
    order = np.argsort(influence, kind="stable")
    places = influence.copy()
    for before, layer in pairwise(order):
        places[layer] = max(places[layer], places[before] + STEP)
    weights = magnitude.scores(dense)
    layers = []
    for place, attention, mlp in zip(places, weights.attention, weights.mlp, strict=True):
        ranks = np.argsort(np.argsort(np.concatenate([attention, mlp]), kind="stable"))
        within = place + STEP * ranks / len(ranks)
        layers.append((within[: len(attention)], within[len(attention) :]))
    return GroupScores.of_layers(layers)
