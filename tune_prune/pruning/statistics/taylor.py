"""Taylor importance of every group, first order.

    G        = gradient of the mean next-token loss, mean over the calibration samples, signed, accumulated in float32
    I(group) = sum over the group's weights of |w * G|

Molchanov et al. 2019 (arXiv:1906.10771); LLM-Pruner's `param_first` (arXiv:2305.11627). Beside it the size of G in every
layer, over the weights of its projections, for the record: `*_ratio` is the largest over the smallest layer's value,
`*_range` their difference; inf where a layer has no gradient at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core.store import GRADIENTS
from tune_prune.models.families import Family
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.passes.batches import batch_size, needs_copy
from tune_prune.pruning.passes.gradient_pass import WeightSums, gradient_pass, gradient_work
from tune_prune.pruning.passes.group_sums import layer_group_sums
from tune_prune.pruning.statistics import Arrays, Need, PassWork, Statistic


@dataclass(frozen=True)
class LayerGradients:
    """Statistics of G over each layer's projection weights; float64 [layers]."""

    abs_mean: np.ndarray  # mean |G|
    norm: np.ndarray  # ||G||, Frobenius over all projections of the layer
    std: np.ndarray
    abs_max: np.ndarray


@dataclass(frozen=True)
class Importance:
    """I(group), not yet divided by cost, and the gradients' statistics, from the first `num_samples` windows."""

    num_samples: int
    groups: GroupScores
    gradients: LayerGradients

    def arrays(self) -> dict[str, np.ndarray]:
        """Return flat arrays for the artifact cache."""
        gradients = {f"gradient_{f.name}": getattr(self.gradients, f.name) for f in fields(LayerGradients)}
        return gradients | self.groups.arrays()

    @classmethod
    def from_arrays(cls, num_samples: int, arrays: Arrays) -> Importance:
        gradients = LayerGradients(**{f.name: arrays[f"gradient_{f.name}"] for f in fields(LayerGradients)})
        return cls(num_samples, GroupScores.from_arrays(arrays), gradients)


class Taylor(Statistic):
    version = 2
    stage = "importance"
    label = "gradient"
    backward = True

    def collect(
        self,
        model: PreTrainedModel,
        family: Family,
        windows: torch.Tensor,
        needs: Sequence[Need],
        residency: Residency = RESIDENT,
    ) -> dict[Need, dict[str, np.ndarray]]:
        found = taylor(model, family, windows, [need.num_samples for need in needs], residency)
        return {need: found[need.num_samples].arrays() for need in needs}

    def work(self, needs: Sequence[Need], seq_len: int, num_layers: int, device: str) -> PassWork:
        wanted, step = [need.num_samples for need in needs], batch_size(seq_len, device)
        return gradient_work(wanted, seq_len, num_layers, step, weight_sums=2 if needs_copy(wanted, step) else 1)

    def value(self, arrays: Arrays, need: Need) -> GroupScores:
        """Return I(group), not yet divided by what a group costs."""
        return Importance.from_arrays(need.num_samples, arrays).groups

    def metrics(self, found: Mapping[Need, Arrays]) -> dict[str, float]:
        return gradient_metrics(_gradients(found))

    def files(self, found: Mapping[Need, Arrays]) -> dict[str, Any]:
        return {GRADIENTS: gradient_diagnosis(_gradients(found))}


def _gradients(found: Mapping[Need, Arrays]) -> LayerGradients:
    ((need, arrays),) = found.items()  # a trial needs one number of samples
    return Importance.from_arrays(need.num_samples, arrays).gradients


def taylor(
    model: PreTrainedModel,
    family: Family,
    windows: torch.Tensor,
    snapshots: Sequence[int],
    residency: Residency = RESIDENT,
) -> dict[int, Importance]:
    """Return importance from the first n rows of `windows` [samples, seq_len], for every n in `snapshots`, by one `gradient_pass`.
    Raises ValueError when a snapshot is not within 1..len(windows)."""
    found = gradient_pass(LayerRunner(model, family, residency), windows, snapshots, _Accumulator)
    return {n: Importance(n, *_joined(layers)) for n, layers in found.items()}


def _joined(layers: Sequence[_LayerResult]) -> tuple[GroupScores, LayerGradients]:
    groups = GroupScores.of_layers([(one.attention, one.mlp) for one in layers])
    return groups, LayerGradients(*np.array([one.statistics for one in layers]).T)


@dataclass(frozen=True)
class _LayerResult:
    """Results of one layer: I of its KV groups [K] and channels [M], and the values of its LayerGradients."""

    attention: np.ndarray
    mlp: np.ndarray
    statistics: tuple[float, float, float, float]


class _Accumulator(WeightSums[_LayerResult]):
    """Signed sums of per-sample gradients."""

    @torch.no_grad()
    def results(self, num_samples: int) -> list[_LayerResult]:
        """Return the results by layer, of the mean over so many samples."""

        def salience(p: torch.Tensor) -> torch.Tensor:
            return (p * (self.sums[p] / num_samples)).abs()

        return [
            _LayerResult(
                *layer_group_sums(layer, self.family, salience),
                self._layer_statistics(self.family.linears(layer), num_samples),
            )
            for layer in self.layers
        ]

    def _layer_statistics(self, part: dict[str, nn.Linear], num_samples: int) -> tuple[float, float, float, float]:
        count, absolute, plain, squares, largest = 0, 0.0, 0.0, 0.0, 0.0
        for linear in part.values():
            gradient = self.sums[linear.weight] / num_samples
            count += gradient.numel()
            absolute += gradient.abs().sum(dtype=torch.float64).item()
            plain += gradient.sum(dtype=torch.float64).item()
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
            largest = max(largest, gradient.abs().max().item())
        mean = plain / count
        return absolute / count, math.sqrt(squares), math.sqrt(max(0.0, squares / count - mean**2)), largest


def gradient_metrics(gradients: LayerGradients) -> dict[str, float]:
    """Return grad_{mean,norm,std,max}_ratio and grad_{mean,norm}_range."""
    metrics = {}
    for name, values in (
        ("mean", gradients.abs_mean),
        ("norm", gradients.norm),
        ("std", gradients.std),
        ("max", gradients.abs_max),
    ):
        low, high = float(np.min(values)), float(np.max(values))
        metrics[f"grad_{name}_ratio"] = high / low if low > 0 else float("inf")
        if name in ("mean", "norm"):
            metrics[f"grad_{name}_range"] = high - low
    return metrics


def gradient_diagnosis(gradients: LayerGradients) -> dict[str, Any]:
    """Return the content of gradient_diagnosis.json: the metrics and every layer's statistics."""
    return {
        **gradient_metrics(gradients),
        "layers": [
            {"layer": layer, "grad_mean": mean, "grad_norm": norm, "grad_std": std, "grad_max": largest}
            for layer, (mean, norm, std, largest) in enumerate(
                zip(
                    gradients.abs_mean.tolist(),
                    gradients.norm.tolist(),
                    gradients.std.tolist(),
                    gradients.abs_max.tolist(),
                    strict=True,
                )
            )
        ],
    }


STATISTIC = Taylor()
