"""Taylor importance times ln(1 + D) of the group's own block: attention and MLP of a layer are judged apart.

D is the loss increase when the attention block, or the MLP block, of the layer adds nothing (compare FinerCut,
arXiv:2405.18218, which removes such blocks whole).
"""

import numpy as np

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense

STATISTICS = ("taylor", "block_removal:attention", "block_removal:mlp")
READS = ("removal_power",)


def scores(dense: Dense) -> GroupScores:
    importance: GroupScores = dense.statistics["taylor"]
    attention, mlp = (
        np.log1p(dense.statistics[f"block_removal:{block}"]) ** dense.removal_power for block in ("attention", "mlp")
    )
    return importance.per_parameter(dense.geometry).scaled(attention, mlp)
