"""What a plan removes, layer by layer: recorded beside each result. Pure numpy."""

from __future__ import annotations

from typing import Any

from tune_prune.models.geometry import Geometry
from tune_prune.pruning.groups import PruningPlan

EXTREME_FRACTION = 0.5


def pruning_comparison(plan: PruningPlan, geometry: Geometry) -> dict[str, Any]:
    """Return what each layer had and kept, for pruning_comparison.json."""
    layers = []
    for layer in range(geometry.num_layers):
        groups, channels = len(plan.kept_groups[layer]), len(plan.kept_channels[layer])
        kv_heads, width = geometry.kv_heads[layer], geometry.mlp_width[layer]
        removed = (kv_heads - groups) * geometry.group_cost[layer] + (width - channels) * geometry.channel_cost[layer]
        removed += geometry.last_group_extra[layer] if groups == 0 else 0
        before = geometry.layer_params[layer] + geometry.last_group_extra[layer]
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
    """Return how many layers lose more than half of their MLP channels."""
    return sum(
        (width - len(kept)) > EXTREME_FRACTION * width
        for kept, width in zip(plan.kept_channels, geometry.mlp_width, strict=True)
    )
