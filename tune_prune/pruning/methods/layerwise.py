"""Taylor importance times ln(1 + D) of the whole layer: groups of layers that matter are spared.

D is the loss increase when the layer is skipped (the removal test of ShortGPT, arXiv:2403.03853, and SLEB,
arXiv:2402.09025, measured by loss).
"""

import numpy as np

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Statistics

REMOVALS = ("layer",)


def scores(statistics: Statistics) -> GroupScores:
    factor = np.log1p(statistics.loss_increase["layer"])
    return statistics.importance.scaled(factor, factor)
