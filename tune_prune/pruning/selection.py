"""Choose what to remove: groups in ascending score until the budget is met exactly, to within one MLP channel.

    removed <= floor(ratio * all parameters) < removed + one MLP channel

Selection goes on past a group that does not fit (stopping there would leave a smaller model's worth unremoved). Layer 0
(and the first layer of any other attention type, see Geometry.cache_layers) keeps at least one KV group. Pure: numbers
in, plan out; ties are broken by layer, then attention before MLP, then index.
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
    flat = np.concatenate(values)
    if not np.isfinite(flat).all():
        raise UserError(
            f"{int((~np.isfinite(flat)).sum())} of {len(flat)} group scores are not finite; the model's gradients overflow "
            "on this calibration text: try a shorter taylor_seq_len, another text or --dtype float32"
        )
    sizes = [len(part) for part in values]
    blocks = np.repeat(np.arange(len(sizes)), sizes).tolist()  # block 2l: attention of layer l; block 2l + 1: its MLP
    ranked = np.argsort(flat, kind="stable").tolist()
    keep = np.ones(len(flat), dtype=bool)
    groups_left = list(geometry.kv_heads)
    left = target

    def cost(position: int) -> int:
        """Parameters that would go with this group or channel now; more than asked for where it must stay."""
        layer, is_mlp = divmod(blocks[position], 2)
        if is_mlp:
            return geometry.channel_cost[layer]
        if groups_left[layer] > 1:
            return geometry.group_cost[layer]
        if layer in geometry.cache_layers:
            return target + 1
        return geometry.group_cost[layer] + geometry.last_group_extra[layer]

    def remove(position: int) -> None:
        nonlocal left
        left -= cost(position)
        keep[position] = False
        layer, is_mlp = divmod(blocks[position], 2)
        if not is_mlp:
            groups_left[layer] -= 1

    smallest = min(*geometry.channel_cost, *geometry.group_cost)
    for position in ranked:
        if left < smallest:
            break
        if cost(position) <= left:
            remove(position)

    # Where another channel would fit, every channel is gone: one more group goes, and the best channels come back for it.
    if left >= min(geometry.channel_cost):
        channels = [position for position in ranked if blocks[position] % 2]
        room = left + sum(map(cost, channels))
        group = next((position for position in ranked if keep[position] and cost(position) <= room), None)
        if group is not None:
            remove(group)
            while left < 0:
                position = channels.pop()
                keep[position] = True
                left += cost(position)

    kept = [tuple(np.flatnonzero(mask).tolist()) for mask in np.split(keep, np.cumsum(sizes)[:-1])]
    return PruningPlan(
        kept_groups=tuple(kept[0::2]),
        kept_channels=tuple(kept[1::2]),
        target_params=target,
        removed_params=target - left,
        total_params=geometry.total_params,
    )
