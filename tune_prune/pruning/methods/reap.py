"""Whole experts, those first that add least where the router takes them (REAP, Lasby et al. 2025, arXiv:2510.13999).

    score(expert) = mean over the tokens that are routed to it of  router's weight * ||its output||

REAP removes the same share of every layer's experts. Here experts of all layers are compared, as with every method; shape uniform
is the paper's. It has no score for attention and plain MLPs: these go only when no more experts can, in the order of `magnitude`.
"""

import numpy as np

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense, magnitude

STATISTICS = ("expert_outputs",)
ONLY_EXPERTS = True
WHOLE_EXPERTS = True
NORMALIZATIONS = ("none",)  # the others would weigh experts against what goes last

LAST = 1000.0  # times the highest score of an expert: what keeps anything else


def scores(dense: Dense) -> GroupScores:
    of_experts: dict[int, np.ndarray] = dense.statistics["expert_outputs"]
    weights = magnitude.scores(dense)
    highest = LAST * max(float(part.max()) for part in of_experts.values())
    rest = highest / max(float(part.max(initial=0.0)) for part in (*weights.attention, *weights.mlp))
    mlps = (of_experts[i] if i in of_experts else highest + rest * part for i, part in enumerate(weights.mlp))
    return GroupScores(tuple(highest + rest * part for part in weights.attention), tuple(mlps))
