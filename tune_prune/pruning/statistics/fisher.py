"""Diagonal Fisher information of every group's weights.

    F(group) = sum over the group's weights of  w^2 * mean over the calibration samples of (dL_n/dw)^2

with L_n the mean next-token loss of sample n: what the loss rises by, to second order and without what weights do together, when
the group's weights are set to zero (optimal brain damage, LeCun et al. 1989; Theis et al. 2018, arXiv:1801.05787). Samples are
run one at a time, as a batch would add up their gradients before they are squared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from tune_prune.models.families import Family
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.gradient_pass import WeightSums, gradient_pass, gradient_work
from tune_prune.pruning.group_sums import layer_group_sums
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.statistics import Arrays, Need, PassWork, Statistic


class _Fisher(Statistic):
    version = 1
    stage = "fisher"
    label = "Fisher"
    backward = True

    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
    ) -> dict[Need, dict[str, np.ndarray]]:
        wanted = [need.num_samples for need in needs]
        found = gradient_pass(model, family, windows, wanted, residency, _Squares, together=1)
        return {need: GroupScores.of_layers(found[need.num_samples]).arrays() for need in needs}

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        return gradient_work([need.num_samples for need in needs], seq_len, num_layers, 1, 1)

    def value(self, arrays: Arrays, need: Need) -> GroupScores:
        """F(group), not yet divided by what a group costs."""
        return GroupScores.from_arrays(arrays)


class _Squares(WeightSums[tuple[np.ndarray, np.ndarray]]):
    """Sums of (w * dL_n/dw)^2."""

    def added(self, p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        wide = self.sums[p].dtype
        return (p.detach().to(wide) * gradient.to(wide)).square()

    def results(self, num_samples: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [layer_group_sums(layer, self.family, lambda p: self.sums[p] / num_samples) for layer in self.layers]


STATISTIC = _Fisher()
