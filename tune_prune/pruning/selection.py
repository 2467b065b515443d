"""Choose what to remove: groups in ascending score until the budget is met exactly, to within one MLP channel.

    removed <= floor(ratio * all parameters) < removed + one MLP channel

Selection goes on past a group that does not fit (stopping there would leave a smaller model's worth unremoved). Layer 0
(and the first layer of any other attention type, see Geometry.cache_layers) keeps at least one KV group. Pure: numbers
in, plan out; ties are broken by layer, then attention before MLP, then index.

This is the shape `free`. Of the others (pruning/shapes.py) `aligned-N` goes by blocks of N channels where `free` goes by
channels, after the channels that are too many for multiples of N, and `uniform` by one channel of every layer.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tune_prune.core.config import alignment
from tune_prune.core.errors import Infeasible, NotFinite
from tune_prune.models.geometry import Geometry
from tune_prune.pruning import shapes
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.shapes import Kept


def budget(geometry: Geometry, pruning_ratio: float, shape: str = "free") -> int:
    """Parameters to remove: floor(ratio * all). Raises Infeasible where the decoder layers do not hold that many, and where the
    shape alone takes more."""
    total = geometry.total_params
    target, bounds = int(pruning_ratio * total), shapes.removal_bounds(geometry, shape)
    asked = f"pruning_ratio {pruning_ratio:g} asks for {target:,} of {total:,} parameters, but"
    instead = (
        "" if shape == "free" else ", or use a smaller --align" if shape != "uniform" else ", or use --shape aligned"
    )
    here = "" if shape == "free" else f" in shape {shape}"
    if target > bounds.most:
        bound = _rounded_down(bounds.most / total)
        raise Infeasible(
            f"{asked} only {bounds.most:,} can be removed{here} ({bounds.fixed} are kept); ask for at most {bound}{instead}"
        )
    if target < bounds.least:
        bound = math.ceil(1e6 * (bounds.least + 1) / total) / 1e6
        raise Infeasible(
            f"{asked} shape {shape} alone removes {bounds.least:,} ({bounds.smallest_part}); ask for at least {bound:g}{instead}"
        )
    return target


def target_params(geometry: Geometry, pruning_ratio: float, shape: str) -> int:
    """The budget of a ratio that somebody asks for: at least the smallest part that the shape lets one remove, such as an MLP
    channel. Raises Infeasible, too, where it is less."""
    target, bounds = budget(geometry, pruning_ratio, shape), shapes.removal_bounds(geometry, shape)
    if target < bounds.smallest:
        least = math.ceil(1e6 * bounds.smallest / geometry.total_params) / 1e6
        raise Infeasible(
            f"pruning_ratio {pruning_ratio:g} asks for {target:,} of {geometry.total_params:,} parameters, less than the "
            f"smallest part that can be removed ({bounds.smallest_part}, {bounds.smallest:,}); ask for at least {least:g}"
        )
    return target


def _rounded_down(ratio: float) -> float:
    """To three digits after the point, or to as many as leave something to ask for."""
    return next((floor for digits in (3, 6, 9) if (floor := int(ratio * 10**digits) / 10**digits) > 0), 0.0)


def select(scores: GroupScores, geometry: Geometry, pruning_ratio: float, shape: str = "free") -> PruningPlan:
    """The plan that removes the lowest-scored groups and leaves layers of that shape. `scores` must be finite; raises
    NotFinite if they are not, Infeasible if the model cannot take the budget or the shape."""
    return further(PruningPlan.keep_all(geometry), scores, geometry, budget(geometry, pruning_ratio, shape), shape)


def further(plan: PruningPlan, scores: GroupScores, geometry: Geometry, target: int, shape: str) -> PruningPlan:
    """`plan`, of a model of that `geometry`, going on until `target` parameters in all are removed: it drops the lowest-scored of
    what it keeps, which `scores` are of, and leaves layers of that shape. Where the shape does not let so little or so much be
    removed now, what is nearest to that. Raises NotFinite."""
    left = geometry_of(plan, geometry)
    bounds = shapes.removal_bounds(left, shape)
    groups, channels = _selected(scores, left, min(max(target - plan.removed_params, bounds.least), bounds.most), shape)
    removed = plan.removed_params + _removed(left, groups, channels)
    kept = (_within(plan.kept_groups, groups), _within(plan.kept_channels, channels))
    return PruningPlan(*kept, target, removed, geometry.total_params)


def geometry_of(plan: PruningPlan, geometry: Geometry) -> Geometry:
    """Of the model that `plan` makes of one of that `geometry`. Every layer keeps a KV group and a channel, or had none."""
    groups, widths = (tuple(map(len, kept)) for kept in (plan.kept_groups, plan.kept_channels))
    return replace(
        geometry,
        total_params=geometry.total_params - plan.removed_params,
        kv_heads=groups,
        mlp_width=widths,
        uniform_kv_heads=tuple(k for k in geometry.uniform_kv_heads if k <= min(groups)),
    )


def _within(before: Kept, now: Kept) -> Kept:
    """What `now` keeps of what was kept `before`, by the indices of that time."""
    return tuple(tuple(kept[i] for i in places) for kept, places in zip(before, now, strict=True))


def _selected(scores: GroupScores, geometry: Geometry, target: int, shape: str) -> tuple[Kept, Kept]:
    flat = np.concatenate([*scores.attention, *scores.mlp])
    if not np.isfinite(flat).all():
        raise NotFinite(
            f"{int((~np.isfinite(flat)).sum())} of {len(flat)} group scores are not finite; the model's gradients overflow "
            "on this calibration text: try a shorter seq_len, another text or --dtype float32"
        )
    n = alignment(shape)
    if n is not None:
        aligned = shapes.Aligned.of(scores, geometry, n)
        groups, blocks = _lowest_first(aligned.scores, aligned.geometry, target - aligned.remainder_params)
        channels = aligned.channels(blocks)
    elif shape == "uniform":
        groups, channels = shapes.uniform(scores, geometry, target)
    else:
        groups, channels = _lowest_first(scores, geometry, target)
    return groups, channels


def _removed(geometry: Geometry, kept_groups: Kept, kept_channels: Kept) -> int:
    """Parameters that are removed when these groups and channels are kept."""
    removed = 0
    for layer, (groups, channels) in enumerate(zip(kept_groups, kept_channels, strict=True)):
        removed += (geometry.kv_heads[layer] - len(groups)) * geometry.group_cost[layer]
        removed += (geometry.mlp_width[layer] - len(channels)) * geometry.channel_cost[layer]
        removed += 0 if groups else geometry.last_group_extra[layer]
    return removed


def _lowest_first(scores: GroupScores, geometry: Geometry, target: int) -> tuple[Kept, Kept]:
    """Kept KV groups and MLP channels after removing in ascending score what fits into `target` parameters."""
    values = [part for pair in zip(scores.attention, scores.mlp, strict=True) for part in pair]
    flat = np.concatenate(values)
    sizes = [len(part) for part in values]
    blocks = np.repeat(np.arange(len(sizes)), sizes).tolist()  # block 2l: attention of layer l; block 2l + 1: its MLP
    ranked = np.argsort(flat, kind="stable").tolist()
    keep = np.ones(len(flat), dtype=bool)
    groups_left = list(geometry.kv_heads)
    left = target

    def cost(position: int) -> int:
        """Parameters that removing this group or channel now removes; more than the target where it must be kept."""
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

    channel = min((c for c, m in zip(geometry.channel_cost, geometry.mlp_width, strict=True) if m), default=math.inf)
    group = min((c for c, k in zip(geometry.group_cost, geometry.kv_heads, strict=True) if k), default=math.inf)
    for position in ranked:
        if left < min(channel, group):
            break
        if cost(position) <= left:
            remove(position)

    # Where every channel is gone and another would fit: one more group goes, and the best channels come back for it.
    channels = [position for position in ranked if blocks[position] % 2]
    if left >= channel and not keep[channels].any():
        room = left + sum(map(cost, channels))
        extra = next((position for position in ranked if keep[position] and cost(position) <= room), None)
        if extra is not None:
            remove(extra)
            while left < 0:
                position = channels.pop()
                keep[position] = True
                left += cost(position)

    kept = [tuple(np.flatnonzero(mask).tolist()) for mask in np.split(keep, np.cumsum(sizes)[:-1])]
    return tuple(kept[0::2]), tuple(kept[1::2])
