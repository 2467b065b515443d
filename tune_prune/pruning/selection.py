"""Choose what to remove: groups in ascending score until the budget is met exactly, to within one MLP channel.

    removed <= floor(ratio * all parameters) < removed + one MLP channel

Selection goes on past a group that does not fit (stopping there would leave a smaller model's worth unremoved). Layer 0
keeps at least one KV group. Pure: numbers in, plan out; ties are broken by layer, then attention before MLP, then index.
"""

from __future__ import annotations

import numpy as np

from tune_prune.errors import UserError
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.groups import GroupScores, PruningPlan


def budget(geometry: Geometry, pruning_ratio: float) -> int:
    """Parameters to remove: floor(ratio * all). Raises UserError where the decoder layers do not hold that many."""
    target = int(pruning_ratio * geometry.total_params)
    if target > geometry.prunable_params:
        bound = geometry.prunable_params / geometry.total_params
        raise UserError(
            f"pruning ratio {pruning_ratio} asks for {target:,} of {geometry.total_params:,} parameters, but only "
            f"{geometry.prunable_params:,} can be removed (embeddings, norms and one KV group of layer 0 stay); "
            f"ask for at most {int(bound * 1000) / 1000}"
        )
    return target


def select(scores: GroupScores, geometry: Geometry, pruning_ratio: float) -> PruningPlan:
    """The plan that removes the lowest-scored groups. `scores` must be finite; raises UserError if they are not or if the
    budget is infeasible."""
    target = budget(geometry, pruning_ratio)
    values = [part for pair in zip(scores.attention, scores.mlp, strict=True) for part in pair]
    sizes = [len(part) for part in values]
    flat = np.concatenate(values)
    if not np.isfinite(flat).all():
        raise UserError(
            f"{int((~np.isfinite(flat)).sum())} of {len(flat)} group scores are not finite; the model's gradients overflow "
            "on this calibration text: try a shorter taylor_seq_len, another text or --dtype float32"
        )
    blocks = np.repeat(np.arange(len(sizes)), sizes)  # block 2l: attention of layer l; block 2l + 1: its MLP
    index = np.concatenate([np.arange(size) for size in sizes])
    order = np.argsort(flat, kind="stable")

    removed = 0
    keep = [np.ones(size, dtype=bool) for size in sizes]
    groups_left = list(geometry.kv_heads)
    cheapest = min(cost for cost, width in zip(geometry.channel_cost, geometry.mlp_width, strict=True) if width)
    smallest = min(cheapest, *geometry.group_cost)
    for block, member in zip(blocks[order].tolist(), index[order].tolist(), strict=True):
        left = target - removed
        if left < smallest:
            break
        layer, is_mlp = divmod(block, 2)
        if is_mlp:
            cost = geometry.channel_cost[layer]
        else:
            last = groups_left[layer] == 1
            if last and layer == 0:
                continue
            cost = geometry.group_cost[layer] + (geometry.last_group_extra[layer] if last else 0)
        if cost > left:
            continue
        removed += cost
        keep[block][member] = False
        if not is_mlp:
            groups_left[layer] -= 1
    kept = [tuple(np.flatnonzero(mask).tolist()) for mask in keep]
    return PruningPlan(
        kept_groups=tuple(kept[0::2]),
        kept_channels=tuple(kept[1::2]),
        target_params=target,
        removed_params=removed,
        total_params=geometry.total_params,
    )
