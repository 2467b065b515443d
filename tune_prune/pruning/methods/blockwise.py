"""Taylor importance times ln(1 + D) of the group's own block: attention and MLP of a layer are judged apart.

D is the loss increase when the attention block, or the MLP block, of the layer adds nothing (compare FinerCut,
arXiv:2405.18218, which removes such blocks whole).
"""

import numpy as np

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Statistics

REMOVALS = ("attention", "mlp")


def scores(statistics: Statistics) -> GroupScores:
    increase = statistics.loss_increase
    return statistics.importance.scaled(np.log1p(increase["attention"]), np.log1p(increase["mlp"]))
