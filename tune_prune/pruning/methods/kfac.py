"""Loss of removal with the other weights adapted to it, by K-FAC's curvature, per parameter (LLM Surgeon, arXiv:2312.17244).

Optimal Brain Surgeon (Hassibi & Stork 1993) for groups. The score supposes adapted weights, and none are computed here:
`compensation: least_squares` refits what stays.
"""

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ("kfac",)


def scores(dense: Dense) -> GroupScores:
    losses: GroupScores = dense.statistics["kfac"]
    return losses.per_parameter(dense.geometry)
