"""Fisher information of a gate on every group, per parameter (Theis et al. 2018, arXiv:1801.05787)."""

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ("gate_fisher",)
WHOLE_EXPERTS = True


def scores(dense: Dense) -> GroupScores:
    information: GroupScores = dense.statistics["gate_fisher"]
    return information.per_parameter(dense.geometry)
