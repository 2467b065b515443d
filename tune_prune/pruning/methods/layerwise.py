"""Taylor importance times ln(1 + D) of the whole layer: groups of layers that matter are spared.

D is the loss increase when the layer is skipped (the removal test of ShortGPT, arXiv:2403.03853, and SLEB,
arXiv:2402.09025, measured by loss).
"""

import numpy as np

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ("taylor", "block_removal:layer")
READS = ("removal_power",)
NORMALIZATIONS = ("none", "kind")  # the third divides by the factor of the layer


def scores(dense: Dense) -> GroupScores:
    importance: GroupScores = dense.statistics["taylor"]
    factor = np.log1p(dense.statistics["block_removal:layer"]) ** dense.removal_power
    return importance.per_parameter(dense.geometry).scaled(factor, factor)
