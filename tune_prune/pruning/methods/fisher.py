"""Diagonal Fisher information of every group's weights, per parameter (LeCun et al. 1989; Theis et al. 2018, arXiv:1801.05787)."""

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ("fisher",)


def scores(dense: Dense) -> GroupScores:
    information: GroupScores = dense.statistics["fisher"]
    return information.per_parameter(dense.geometry)
