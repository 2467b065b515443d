"""Taylor importance per parameter, nothing else (LLM-Pruner, arXiv:2305.11627, group-normalised)."""

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Statistics

REMOVALS = ()


def scores(statistics: Statistics) -> GroupScores:
    return statistics.importance
