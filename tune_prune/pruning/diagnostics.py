"""What the gradients looked like and where a plan cut: the numbers beside each result. Pure numpy.

Per layer: mean |G|, ||G||, std and max |G| over its projection weights. `*_ratio` is the largest over the smallest
layer's value, `*_range` their difference; inf where a layer has no gradient at all. `extreme_pruning_layers` counts the
layers that lose more than half of their MLP channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tune_prune.models.geometry import Geometry
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics.taylor import LayerGradients

EXTREME_FRACTION = 0.5


def gradient_metrics(gradients: LayerGradients) -> dict[str, float]:
    """grad_{mean,norm,std,max}_ratio and grad_{mean,norm}_range."""
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
    """For gradient_diagnosis.json: the metrics and every layer's statistics."""
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


def pruning_comparison(plan: PruningPlan, geometry: Geometry) -> dict[str, Any]:
    """For pruning_comparison.json: what each layer had and kept."""
    layers = []
    for layer in range(geometry.num_layers):
        groups, channels = len(plan.kept_groups[layer]), len(plan.kept_channels[layer])
        kv_heads, width = geometry.kv_heads[layer], geometry.mlp_width[layer]
        removed = (kv_heads - groups) * geometry.group_cost[layer] + (width - channels) * geometry.channel_cost[layer]
        removed += geometry.last_group_extra[layer] if groups == 0 else 0
        before = (
            kv_heads * geometry.group_cost[layer]
            + width * geometry.channel_cost[layer]
            + geometry.last_group_extra[layer]
        )
        layers.append(
            {
                "layer": layer,
                "kv_groups_before": kv_heads,
                "kv_groups_kept": groups,
                "mlp_channels_before": width,
                "mlp_channels_kept": channels,
                "params_before": before,
                "params_kept": before - removed,
                "pruned_fraction": removed / before,
            }
        )
    return {
        "removed_params": plan.removed_params,
        "total_params": plan.total_params,
        "removed_fraction": plan.removed_fraction,
        "extreme_pruning_layers": extreme_pruning_layers(plan, geometry),
        "layers": layers,
    }


def extreme_pruning_layers(plan: PruningPlan, geometry: Geometry) -> int:
    return sum(
        (width - len(kept)) > EXTREME_FRACTION * width
        for kept, width in zip(plan.kept_channels, geometry.mlp_width, strict=True)
    )
