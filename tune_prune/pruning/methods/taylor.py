"""Taylor importance per parameter, nothing else (LLM-Pruner, arXiv:2305.11627, group-normalised)."""

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ("taylor",)


def scores(dense: Dense) -> GroupScores:
    importance: GroupScores = dense.statistics["taylor"]
    return importance.per_parameter(dense.geometry)
