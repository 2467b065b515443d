"""Diagonal Fisher information of every group's weights.

    F(group) = sum over the group's weights of  w^2 * mean over the calibration samples of (dL_n/dw)^2

with L_n the mean next-token loss of sample n: what the loss rises by, to second order and without what weights do together, when
the group's weights are set to zero (optimal brain damage, LeCun et al. 1989; Theis et al. 2018, arXiv:1801.05787). Samples are
run one at a time, as a batch would add up their gradients before they are squared.
"""

from __future__ import annotations

import numpy as np
import torch

from tune_prune.pruning.passes.gradient_pass import GroupInformation, WeightSums
from tune_prune.pruning.passes.group_sums import layer_group_sums


class _Squares(WeightSums[tuple[np.ndarray, np.ndarray]]):
    """Sums of (w * dL_n/dw)^2."""

    def added(self, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        wide = self.sums[p].dtype
        return (p.detach().to(wide) * gradient.to(wide)).square()

    def results(self, num_samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [layer_group_sums(layer, self.family, lambda p: self.sums[p] / num_samples) for layer in self.layers]


class _Fisher(GroupInformation):
    version = 1
    stage = "fisher"
    label = "Fisher"
    sums = _Squares
    together = 1
    weight_sums = 1


STATISTIC = _Fisher()
