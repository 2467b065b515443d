"""Mean |w| over a group's parameters. Reads no data (L1 norms of filters: Li et al., arXiv:1608.08710).

|w| and not w^2: Taylor's first-order importance |w G| with the same gradient everywhere is |w|.
"""

import torch

from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense
from tune_prune.pruning.passes.group_sums import group_sums

STATISTICS = ()


def scores(dense: Dense) -> GroupScores:
    def magnitude(p: torch.Tensor) -> torch.Tensor:
        return p.abs().to(torch.promote_types(p.dtype, torch.float32))  # bfloat16 must not be summed in bfloat16

    return group_sums(dense.layers(), dense.family, magnitude).per_parameter(dense.geometry)
