"""Choose what to remove: groups in ascending score until the budget is met exactly, to within one MLP channel.

    removed <= floor(ratio * all parameters) < removed + one MLP channel

Selection goes on past a group that does not fit (stopping there would leave a smaller model's worth unremoved). Layer 0
(and the first layer of any other attention type, see Geometry.cache_layers) keeps at least one KV group. Pure: numbers
in, plan out; ties are broken by layer, then attention before MLP, then index.

This is the shape `free`. Of the others (pruning/shapes.py) `aligned-N` goes by blocks of N channels where `free` goes by
channels, after the channels that are too many for multiples of N, and `uniform` by one channel of every layer, `uniform-N` by N.
Where layers are to be split over GPUs, `...-tpG`, KV groups go by G.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tune_prune.core.config import alignment
from tune_prune.core.errors import Infeasible, NotFinite
from tune_prune.core.kinds import Shape
from tune_prune.models.geometry import Geometry
from tune_prune.pruning import shapes
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.shapes import Floors, Kept, left_at_least

EXPERT_STEP = 8  # channels of each expert that go at once where experts have many


def budget(
    geometry: Geometry, pruning_ratio: float, shape: str = "free", cap: float = 1.0, whole_experts: float = 1.0
) -> int:
    """Return the number of parameters to remove: floor(ratio * all). Raises Infeasible where the decoder layers do not hold that
    many, by the part `cap` of their groups and channels at most, and where the shape alone takes more; and where `in_two` cannot
    divide it as `whole_experts` says."""
    total = geometry.total_params
    target, bounds = int(pruning_ratio * total), shapes.removal_bounds(geometry, shape, Floors.of(geometry, cap))
    if whole_experts != 1:
        _check_whole_experts(geometry, target, whole_experts, bounds.most, cap)
        return target
    asked = f"pruning_ratio {pruning_ratio:g} asks for {target:,} of {total:,} parameters, but"
    instead, here = "", ""
    if shape != "free":
        other = "--shape free" if any(geometry.mixtures) else "--shape aligned"
        instead = f", or use {'a smaller --align' if Shape.read(shape).align else other}"
        here = f" in shape {shape}"
    if target > bounds.most and cap < 1:
        bound = _rounded_down(bounds.most / total)
        less = f"at most {bound}, or for " if bound else ""
        raise Infeasible(
            f"{asked} with layer_cap {cap:g} only {bounds.most:,} can be removed{here}; ask for {less}a higher layer_cap"
        )
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


def target_params(
    geometry: Geometry, pruning_ratio: float, shape: str, cap: float = 1.0, whole_experts: float = 1.0
) -> int:
    """Return the budget of a ratio that somebody asks for: at least the smallest part that the shape lets one remove, such as an
    MLP channel. Raises Infeasible, too, where it is less."""
    target = budget(geometry, pruning_ratio, shape, cap, whole_experts)
    bounds = shapes.removal_bounds(geometry, shape)
    if target < bounds.smallest:
        least = math.ceil(1e6 * bounds.smallest / geometry.total_params) / 1e6
        raise Infeasible(
            f"pruning_ratio {pruning_ratio:g} asks for {target:,} of {geometry.total_params:,} parameters, less than the "
            f"smallest part that can be removed ({bounds.smallest_part}, {bounds.smallest:,}); ask for at least {least:g}"
        )
    return target


def _rounded_down(ratio: float) -> float:
    """Round down to three digits after the point, or to as many as leave something to ask for."""
    return next((floor for digits in (3, 6, 9) if (floor := int(ratio * 10**digits) / 10**digits) > 0), 0.0)


def select(
    scores: GroupScores, geometry: Geometry, pruning_ratio: float, shape: str = "free", cap: float = 1.0
) -> PruningPlan:
    """Return the plan that removes the lowest-scored groups, of a layer at most the part `cap`, and leaves layers of that shape.
    `scores` must be finite; raises NotFinite if they are not, Infeasible if the model cannot take the budget or the shape."""
    target = budget(geometry, pruning_ratio, shape, cap)
    return further(PruningPlan.keep_all(geometry), scores, geometry, target, shape, cap)


def further(
    plan: PruningPlan,
    scores: GroupScores,
    geometry: Geometry,
    target: int,
    shape: str,
    cap: float = 1.0,
    spare: int = 0,
    whole: int | None = None,
) -> PruningPlan:
    """Continue `plan`, of a model of that `geometry`, going on until `target` parameters in all are removed: it drops the
    lowest-scored of what it keeps, which `scores` are of, and leaves layers of that shape, each with `spare` channels more than it
    must keep, where it has them. Where the shape does not let so little or so much be removed now, what is nearest to that. With
    `whole` it is on its way to that many: a part that may go and does not fit yet is waited for. Raises NotFinite."""
    left, floors = geometry_of(plan, geometry), Floors.of(geometry, cap).raised(spare)
    bounds = shapes.removal_bounds(left, shape, floors)

    def within(goal: int) -> int:
        return min(max(goal - plan.removed_params, bounds.least), bounds.most)

    then = None if whole is None else within(whole)
    groups, channels = _selected(scores, left, floors, within(target), shape, then)
    removed = plan.removed_params + _removed(left, groups, channels)
    kept = (_within(plan.kept_groups, groups), _within(plan.kept_channels, channels))
    return PruningPlan(*kept, target, removed, geometry.total_params)


def in_two(
    scores: GroupScores, geometry: Geometry, target: int, whole_experts: float, shape: str, cap: float = 1.0
) -> PruningPlan:
    """Return a plan of two selections, one after the other: that part of the target by whole experts, KV groups and channels of
    plain MLPs, as `further` selects; the rest by channels inside of the experts that are left.

    Experts of a layer keep one width. So what goes is a rank: of every expert that is left its lowest channel, its second lowest
    and so on, EXPERT_STEP of them at once where experts are that wide. A rank scores the mean of its channels. In shape uniform all
    layers lose the same ranks, else the lowest go, of whatever layer, a rank of each layer stays. Raises NotFinite."""
    first = further(PruningPlan.keep_all(geometry), scores, geometry, _part(whole_experts, target), shape, cap)
    steps = _expert_steps(geometry)
    ranks, orders = [], []
    for kept, channels, step in zip(first.kept_channels, scores.expert_channels, steps, strict=True):
        order = np.argsort(channels[list(kept)] if step else np.empty((0, 0)), axis=1, kind="stable")
        sorted_scores = np.take_along_axis(channels[list(kept)], order, 1) if step else np.empty((1, 0))
        ranks.append(sorted_scores.reshape(len(sorted_scores), -1, step or 1).mean((0, 2)))
        orders.append(order)
    _check_finite(np.concatenate(ranks))
    costs = tuple(
        3 * geometry.hidden_size * len(kept) * step for kept, step in zip(first.kept_channels, steps, strict=True)
    )
    none = (0,) * geometry.num_layers
    counts = tuple(map(len, ranks))
    of_ranks = replace(geometry, kv_heads=none, mlp_width=counts, channel_cost=costs, expert_width=())
    floors = Floors(none, tuple(max(left_at_least(count, cap), min(count, 1)) for count in counts))
    room = target - first.removed_params
    if shapes.is_uniform(shape):
        lost = min(room // sum(costs), min(counts) - max(floors.channels))
        kept_ranks: Kept = tuple(tuple(range(lost, count)) for count in counts)
    else:
        empty = tuple(np.empty(0) for _ in counts)
        _, kept_ranks = _lowest_first(GroupScores(empty, tuple(ranks)), of_ranks, floors, room, waits=False)
    removed = sum((count - len(kept)) * cost for count, kept, cost in zip(counts, kept_ranks, costs, strict=True))
    inside = tuple(
        tuple(tuple(sorted(expert[-len(kept) * step :].tolist())) for expert in order) if step else ()
        for order, kept, step in zip(orders, kept_ranks, steps, strict=True)
    )
    return replace(
        first,
        target_params=target,
        removed_params=first.removed_params + removed,
        kept_expert_channels=inside if removed else (),
    )


def _check_whole_experts(geometry: Geometry, target: int, whole_experts: float, most: int, cap: float) -> None:
    """Raise Infeasible where `in_two` cannot remove its two parts of the target, whatever the scores are; `most`: of the first."""
    first, asked = _part(whole_experts, target), f"whole_experts {whole_experts:g} leaves"
    if first > most:
        raise Infeasible(
            f"{asked} {first:,} parameters to whole experts and attention, and {most:,} can go; ask for less of both"
        )
    experts = 0
    for width, of_expert, step in zip(geometry.mlp_width, geometry.expert_width, _expert_steps(geometry), strict=True):
        ranks = of_expert // step if step else 0
        experts += 3 * geometry.hidden_size * width * step * (ranks - max(1, left_at_least(ranks, cap))) if step else 0
    # The first selection may take all of its part from experts, with their channels.
    inside = max(0, experts - first)
    if target - first > inside:
        raise Infeasible(
            f"{asked} {target - first:,} parameters to channels inside of experts, and {inside:,} can go for certain; ask for a "
            "higher whole_experts, or for less"
        )


def _part(share: float, target: int) -> int:
    """Return that part of a target, exactly, as decimal numbers are meant."""
    return int(Fraction(str(share)) * target)


def _expert_steps(geometry: Geometry) -> tuple[int, ...]:
    """Return how many channels of each expert of a layer go at once; 0 of a plain MLP. The kernel for all experts in
    one product wants rows of multiples of 16 bytes."""
    steps = (
        EXPERT_STEP if width % EXPERT_STEP == 0 and width >= 8 * EXPERT_STEP else 1 for width in geometry.expert_width
    )
    return tuple(step * bool(width) for step, width in zip(steps, geometry.expert_width, strict=True))


def on_the_way(
    plan: PruningPlan,
    scores: GroupScores,
    geometry: Geometry,
    whole: int,
    step: int,
    steps: int,
    shape: str,
    cap: float = 1.0,
) -> PruningPlan:
    """Continue a plan as `further` does, to floor(whole * step / steps), where `whole` is removed in all, later, and nothing that
    is gone comes back.

    Enough channels are left to make up for any KV group that goes or stays then; otherwise a later budget between two numbers of
    KV groups could not be met. What goes at once and is larger than a step's part of the budget is waited for: otherwise it never
    went, whatever its score.
    """
    target = whole * step // steps
    if shapes.is_uniform(shape):
        return further(plan, scores, geometry, target, shape, cap, whole=whole)
    block = (alignment(shape) or 1) * max(geometry.channel_cost)
    spare, waits = 0, whole // steps < max(block, *shapes.group_costs(geometry, shape))
    while True:
        after = further(plan, scores, geometry, target, shape, cap, spare, whole if waits else None)
        left = geometry_of(after, geometry)
        channels = Floors(left.kv_heads, Floors.of(geometry, cap).channels)
        enough = shapes.removal_bounds(left, shape, channels).most >= shapes.largest_part(left, shape)
        if enough or spare > max(geometry.mlp_width):
            return after
        spare = max(1, 2 * spare)


def geometry_of(plan: PruningPlan, geometry: Geometry) -> Geometry:
    """Return the geometry of the model that `plan` makes of one of that `geometry`. Every layer keeps a KV group and a channel, or
    had none."""
    groups, widths = (tuple(map(len, kept)) for kept in (plan.kept_groups, plan.kept_channels))
    return replace(
        geometry,
        total_params=geometry.total_params - plan.removed_params,
        kv_heads=groups,
        mlp_width=widths,
        uniform_kv_heads=tuple(k for k in geometry.uniform_kv_heads if k <= min(groups)),
    )


def _within(before: Kept, now: Kept) -> Kept:
    """Return what `now` keeps of what was kept `before`, by the indices of that time."""
    return tuple(tuple(kept[i] for i in places) for kept, places in zip(before, now, strict=True))


def _selected(
    scores: GroupScores, geometry: Geometry, floors: Floors, target: int, shape: str, whole: int | None
) -> tuple[Kept, Kept]:
    _check_finite(np.concatenate([*scores.attention, *scores.mlp]))
    n, gpus = alignment(shape), Shape.read(shape).gpus
    if shapes.is_uniform(shape):
        groups, channels = shapes.uniform(scores, geometry, floors, target, whole, n or 1, gpus)
    elif n is not None:
        aligned = shapes.Aligned.of(scores, geometry, floors, n, gpus)
        room = target - aligned.remainder_params
        blocks = _lowest_first(aligned.scores, aligned.geometry, aligned.floors, room, whole is not None)
        groups, channels = aligned.members(*blocks)
    else:
        groups, channels = _lowest_first(scores, geometry, floors, target, whole is not None)
    return groups, channels


def _check_finite(scores: np.ndarray) -> None:
    if not np.isfinite(scores).all():
        raise NotFinite(
            f"{int((~np.isfinite(scores)).sum())} of {len(scores)} group scores are not finite; the model's gradients overflow "
            "on this calibration text: try a shorter seq_len, another text or --dtype float32"
        )


def _removed(geometry: Geometry, kept_groups: Kept, kept_channels: Kept) -> int:
    """Count the parameters that are removed when these groups and channels are kept."""
    removed = 0
    for layer, (groups, channels) in enumerate(zip(kept_groups, kept_channels, strict=True)):
        removed += (geometry.kv_heads[layer] - len(groups)) * geometry.group_cost[layer]
        removed += (geometry.mlp_width[layer] - len(channels)) * geometry.channel_cost[layer]
        removed += 0 if groups else geometry.last_group_extra[layer]
    return removed


def _lowest_first(
    scores: GroupScores, geometry: Geometry, floors: Floors, target: int, waits: bool
) -> tuple[Kept, Kept]:
    """Return the kept KV groups and MLP channels after removing in ascending score, down to the floors, what fits into `target`
    parameters; where it `waits`, up to the first that may go and does not fit."""
    values = [part for pair in zip(scores.attention, scores.mlp, strict=True) for part in pair]
    flat = np.concatenate(values)
    sizes = [len(part) for part in values]
    blocks = np.repeat(np.arange(len(sizes)), sizes).tolist()  # block 2l: attention of layer l; block 2l + 1: its MLP
    ranked = np.argsort(flat, kind="stable").tolist()
    keep = np.ones(len(flat), dtype=bool)
    there = [count for pair in zip(geometry.kv_heads, geometry.mlp_width, strict=True) for count in pair]
    least = [count for pair in zip(floors.groups, floors.channels, strict=True) for count in pair]
    left = target

    def cost(position: int) -> int:
        """Count the parameters that removing this group or channel now removes; more than the target where it must be kept."""
        block = blocks[position]
        layer, is_mlp = divmod(block, 2)
        if there[block] <= least[block]:
            return target + 1
        if is_mlp:
            return geometry.channel_cost[layer]
        return geometry.group_cost[layer] + (geometry.last_group_extra[layer] if there[block] == 1 else 0)

    def remove(position: int) -> None:
        nonlocal left
        left -= cost(position)
        keep[position] = False
        there[blocks[position]] -= 1

    channel = min((c for c, m in zip(geometry.channel_cost, geometry.mlp_width, strict=True) if m), default=math.inf)
    group = min((c for c, k in zip(geometry.group_cost, geometry.kv_heads, strict=True) if k), default=math.inf)
    for position in ranked:
        if left < min(channel, group):
            break
        if cost(position) <= left:
            remove(position)
        elif waits and there[blocks[position]] > least[blocks[position]]:
            break

    # Where every channel that may go is gone and another would fit: one more group goes, and the best channels come back for it.
    gone = [position for position in ranked if blocks[position] % 2 and not keep[position]]
    if not waits and left >= channel and there[1::2] == least[1::2]:
        room = left + sum(geometry.channel_cost[blocks[position] // 2] for position in gone)
        extra = next((position for position in ranked if keep[position] and cost(position) <= room), None)
        if extra is not None:
            remove(extra)
            while left < 0:
                position = gone.pop()
                keep[position] = True
                left += geometry.channel_cost[blocks[position] // 2]

    kept = [tuple(np.flatnonzero(mask).tolist()) for mask in np.split(keep, np.cumsum(sizes)[:-1])]
    return tuple(kept[0::2]), tuple(kept[1::2])
