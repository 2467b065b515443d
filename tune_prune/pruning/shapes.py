"""Shapes that the layers of a pruned model may have, and what is removed in those other than free (docs/methods.md, "Shapes").

    free        any number of KV groups and MLP channels in each layer; the layers that cached decoding relies on keep a group
    aligned-N   every MLP width is a multiple of N, at least N; every layer keeps at least one KV group
    uniform     one number of KV groups and one MLP width for all layers: what a plain config of the family can state
    uniform-N   the same, its MLP width a multiple of N
    ...-tpG     as these, and every layer can be split over G GPUs: its KV groups and its MLP width are multiples of G

Numbers in, numbers out, and ties go by index, so that all machines choose alike. K KV groups and M MLP channels are counted
per layer; all costs are in parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from tune_prune.core.config import alignment
from tune_prune.core.errors import Infeasible, UserError
from tune_prune.core.kinds import Shape
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.groups import GroupScores

# The N of `aligned` where none is given. Large matrix products and k-quants want multiples of 256, but in a small model that
# is much of a layer.
SMALL_ALIGN, LARGE_ALIGN = 64, 256
LARGE_PARAMS = 10**9
BY_SIZE = "by_size"  # where nobody names a shape

Kept = tuple[tuple[int, ...], ...]  # kept indices per layer, sorted


def resolve(shape: str, align: int | None, total_params: int, mixtures: Sequence[bool] = ()) -> str:
    """Return the shape of a configuration for a model of that size, in which those layers are `mixtures` of experts.

    "aligned" gets its number: `align`, or the one that suits the size. "uniform" gets `align`, or from 1B parameters on the same
    number; a smaller model's width stays free. BY_SIZE is aligned from 1B parameters on, where a GPU runs layers of any widths
    slower than the dense ones (docs/gpu.md), and free below.

    N is a number of channels. A model of mixtures alone has none and takes none: it is uniform by BY_SIZE from 1B parameters on,
    so that a plain config states it. One that has plain MLPs, too, is free: no number fits both. Raises UserError for what such
    a model does not take.
    """
    large = total_params >= LARGE_PARAMS
    if any(mixtures):
        return _of_mixtures(shape, align, large and all(mixtures))
    if shape == BY_SIZE:
        shape = "aligned" if large else "free"
    asked = Shape.read(shape)
    usual = {"aligned": LARGE_ALIGN if large else SMALL_ALIGN, "uniform": LARGE_ALIGN if large else None}
    return str(asked._replace(align=asked.align or align or usual.get(asked.kind)))


def _of_mixtures(shape: str, align: int | None, large: bool) -> str:
    asked = Shape.read(shape if shape != BY_SIZE else "uniform" if large else "free")
    if asked.kind == "aligned" or asked.align or align:
        raise UserError(
            f"shape is {asked._replace(align=asked.align or align)}, which counts MLP channels, and layers of this model have "
            "experts in their place; use --shape free or uniform"
        )
    return str(asked)


def is_uniform(shape: str) -> bool:
    """Return whether all layers are left with the same widths."""
    return shape.partition("-")[0] == "uniform"


@dataclass(frozen=True)
class RemovalBounds:
    """How much of a model can be removed in a shape, in parameters."""

    least: int  # what the shape alone removes; 0 where the dense model has it
    most: int
    fixed: str  # the parts that cannot be removed, in words
    smallest: int  # the smallest removal above 0
    smallest_part: str  # what that is, in words


@dataclass(frozen=True)
class Floors:
    """How many KV groups and MLP channels every layer keeps at least, whatever their scores."""

    groups: tuple[int, ...]
    channels: tuple[int, ...]

    @classmethod
    def of(cls, geometry: Geometry, cap: float = 1.0) -> Floors:
        """Make the floors where at most the part `cap` of each layer's may go: and of layers that cached decoding relies on one
        group, of a mixture as many experts as its router takes."""
        one = set(geometry.cache_layers)
        groups, channels = ([left_at_least(n, cap) for n in sizes] for sizes in (geometry.kv_heads, geometry.mlp_width))
        channels = list(map(max, channels, geometry.least_channels))
        return cls(tuple(max(n, layer in one) for layer, n in enumerate(groups)), tuple(channels))

    def raised(self, channels: int) -> Floors:
        """Return the floors with so many channels more in every layer."""
        return replace(self, channels=tuple(least + channels for least in self.channels))


def left_at_least(count: int, cap: float) -> int:
    """Return how many of so many are left at least where the part `cap` may go: exactly, as decimal numbers are meant."""
    return count - int(Fraction(str(cap)) * count)


def removal_bounds(geometry: Geometry, shape: str, floors: Floors | None = None) -> RemovalBounds:
    """Return the bounds of a budget; `floors`, where they are higher than those of the shape. Raises Infeasible where the model has
    layers that cannot take the shape."""
    n, gpus, floors = alignment(shape), Shape.read(shape).gpus, floors or Floors.of(geometry)
    if shape == "free":
        channels = [
            (cost, an(geometry.channel_name))
            for cost, m in zip(geometry.channel_cost, geometry.mlp_width, strict=True)
            if m
        ]
        layers = f"layer{'s' * (len(geometry.cache_layers) > 1)} {', '.join(map(str, geometry.cache_layers))}"
        fixed = (
            "embeddings, norms and all attention"
            if geometry.whole_attention
            else f"embeddings, norms and one KV group of {layers}, without which generation with a cache is silently wrong,"
        )
        if geometry.experts_per_token:
            fixed = f"{geometry.experts_per_token} experts of each mixture, as many as its router takes, {fixed}"
        return RemovalBounds(0, _removable(geometry, floors), fixed, *min(channels, default=(1, "a parameter")))
    _check_layers(geometry, n, shape)
    if n is None or is_uniform(shape):
        return _uniform_bounds(geometry, floors, n or 1, gpus)
    blocks, remainder = _blocks(geometry, n, gpus), _remainder_params(geometry, n)
    removable = _removable(blocks, _of_blocks(geometry, floors, n, gpus))
    together = max(_together(geometry, gpus))
    parts = [
        (cost, f"a block of {n} MLP channels")
        for cost, m in zip(blocks.channel_cost, blocks.mlp_width, strict=True)
        if m
    ]
    group = "a KV group" if together == 1 else f"{together} KV groups of a layer"
    parts += [(cost, group) for cost, k in zip(blocks.group_cost, blocks.kv_heads, strict=True) if k > 1]
    if remainder:
        parts = [(remainder, f"the MLP channels beyond multiples of {n}")]
    attention = "the attention" if geometry.whole_attention else _groups(together)
    fixed = f"embeddings, norms, {n} MLP channels and {attention} of every layer"
    return RemovalBounds(remainder, remainder + removable, fixed, *min(parts, default=(1, "a parameter")))


def largest_part(geometry: Geometry, shape: str) -> int:
    """Count the parameters of the most that goes at once where layers differ: the last KV groups of one."""
    return max(map(sum, zip(group_costs(geometry, shape), geometry.last_group_extra, strict=True)))


def group_costs(geometry: Geometry, shape: str) -> tuple[int, ...]:
    """Count the parameters of the KV groups of each layer that stay or go together."""
    together = _together(geometry, Shape.read(shape).gpus)
    return tuple(count * cost for count, cost in zip(together, geometry.group_cost, strict=True))


def _together(geometry: Geometry, gpus: int) -> tuple[int, ...]:
    """Return how many KV groups of each layer stay or go together where it is split over so many GPUs: as many, each with its
    part; all of a layer with fewer, as each is copied to several GPUs."""
    return tuple(max(1, min(k, gpus)) for k in geometry.kv_heads)


def _groups(count: int) -> str:
    return "one KV group" if count == 1 else f"{count} KV groups"


def _removable(geometry: Geometry, floors: Floors) -> int:
    """Count the parameters of all that is above the floors; of a layer that keeps no KV group also those that go with the last
    one."""
    groups = zip(geometry.kv_heads, floors.groups, geometry.group_cost, geometry.last_group_extra, strict=True)
    channels = zip(geometry.mlp_width, floors.channels, geometry.channel_cost, strict=True)
    attention = sum((k - least) * cost + (0 if least else extra) for k, least, cost, extra in groups)
    return attention + sum((m - least) * cost for m, least, cost in channels)


def an(name: str) -> str:
    """Return "an expert" or "an MLP channel"."""
    return f"an {name}"


def _check_layers(geometry: Geometry, n: int | None, shape: str) -> None:
    """Raise Infeasible where a layer has fewer groups or channels than it must keep."""
    if len(set(geometry.mixtures)) > 1 and is_uniform(shape):
        plain = geometry.mixtures.index(False)
        raise Infeasible(
            f"layer {plain} has a plain MLP and layer {geometry.mixtures.index(True)} experts, and shape {shape} keeps one number "
            "of both in every layer; use --shape free"
        )
    for layer, (k, m) in enumerate(zip(geometry.kv_heads, geometry.mlp_width, strict=True)):
        if m == 0 or (k == 0 and not geometry.whole_attention):
            part = "MLP channels" if k else "KV groups"
            raise Infeasible(
                f"layer {layer} has no {part}, and shape {shape} keeps some in every layer; use --shape free"
            )
    gpus, queries = Shape.read(shape).gpus, geometry.queries_per_kv

    def splits(k: int, parts: int) -> bool:
        return k % parts == 0 or (parts % k == 0 and k * queries % parts == 0)

    for layer, k in enumerate(geometry.kv_heads):
        if not splits(k, gpus):
            fewer = max(parts for parts in range(1, gpus) if splits(k, parts))
            raise Infeasible(
                f"layer {layer} has {k * queries} query heads and {k} KV heads, which cannot be split over {gpus} GPUs: the first "
                "must be a multiple of their number, the second a multiple or a divisor; use --tensor-parallel "
                f"{fewer}{' (the default)' * (fewer == 1)}"
            )
    narrowest = min(geometry.mlp_width)
    if n is not None and narrowest < n:
        fits = 2 ** max((narrowest // gpus).bit_length() - 2, 0)
        raise Infeasible(
            f"the MLP of layer {geometry.mlp_width.index(narrowest)} has {narrowest} channels, fewer than the {n} that every layer "
            f"keeps in shape {shape}; use a smaller --align, e.g. --align {fits}"
        )


# Aligned: whole blocks of N channels are what MLP channels are in the free shape.


def _remainder_params(geometry: Geometry, n: int) -> int:
    return sum(m % n * cost for m, cost in zip(geometry.mlp_width, geometry.channel_cost, strict=True))


def _blocks(geometry: Geometry, n: int, gpus: int) -> Geometry:
    """Return the geometry in which an MLP channel is a block of n that may be removed, all whole blocks but the best of each layer;
    and a KV group are those that go together."""
    together = _together(geometry, gpus)
    return replace(
        geometry,
        kv_heads=tuple(k // count for k, count in zip(geometry.kv_heads, together, strict=True)),
        group_cost=tuple(count * cost for count, cost in zip(together, geometry.group_cost, strict=True)),
        mlp_width=tuple(m // n - 1 for m in geometry.mlp_width),
        channel_cost=tuple(n * cost for cost in geometry.channel_cost),
    )


def _of_blocks(geometry: Geometry, floors: Floors, n: int, gpus: int) -> Floors:
    """Return the floors in that geometry: every layer keeps a block of KV groups, and as many as hold its floors, of those that it
    has."""

    def blocks(sizes: tuple[int, ...], least: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
        return [min(s // n, max(1, math.ceil(of / n))) for s, of, n in zip(sizes, least, counts, strict=True)]

    groups = blocks(geometry.kv_heads, floors.groups, _together(geometry, gpus))
    channels = blocks(geometry.mlp_width, floors.channels, (n,) * geometry.num_layers)
    return Floors(tuple(groups), tuple(count - 1 for count in channels))


@dataclass(frozen=True)
class Aligned:
    """A selection among blocks of n channels and of the KV groups that GPUs share. In each layer the channels ascend by score; the
    lowest M mod n are always removed, each further n are a block, scored by its mean, and the last block is always kept. So are
    the KV groups, as many in a block as there are GPUs."""

    groups: tuple[np.ndarray, ...]  # per layer: KV groups by ascending score [blocks, members]
    channels: tuple[np.ndarray, ...]  # per layer: the channels of whole blocks [blocks, n]
    scores: GroupScores  # of blocks of KV groups, and of the blocks of channels that may be removed
    geometry: Geometry  # its KV groups and MLP channels are these blocks
    floors: Floors  # of these
    remainder_params: int  # of the channels that are always removed

    @classmethod
    def of(cls, scores: GroupScores, geometry: Geometry, floors: Floors, n: int, gpus: int) -> Aligned:
        together = _together(geometry, gpus)
        groups = tuple(_ascending(values, count) for values, count in zip(scores.attention, together, strict=True))
        channels = tuple(_ascending(values, n) for values in scores.mlp)
        means = GroupScores(
            tuple(map(_means, scores.attention, groups)),
            tuple(_means(values, blocks[:-1]) for values, blocks in zip(scores.mlp, channels, strict=True)),
        )
        blocks = _blocks(geometry, n, gpus), _of_blocks(geometry, floors, n, gpus)
        return cls(groups, channels, means, *blocks, _remainder_params(geometry, n))

    def members(self, kept_groups: Kept, kept_channels: Kept) -> tuple[Kept, Kept]:
        """Return the KV groups and channels of these blocks, and the channels of the last one of each layer."""
        groups = zip(self.groups, kept_groups, strict=True)
        channels = zip(self.channels, kept_channels, strict=True)
        return (
            tuple(_sorted(blocks[list(kept)]) for blocks, kept in groups),
            tuple(_sorted(blocks[[*kept, -1]]) for blocks, kept in channels),
        )


def _ascending(values: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of `values` by ascending score in blocks of so many [blocks, count], without the lowest that are too few
    for one."""
    return np.argsort(values, kind="stable")[len(values) % count :].reshape(-1, count)


def _means(values: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Return the mean score of each block, exactly rounded: a block never scores below one whose members are all lower, whatever
    the machine."""
    return np.array([math.fsum(block) / blocks.shape[1] for block in values[blocks].tolist()])


def _sorted(indices: np.ndarray) -> tuple[int, ...]:
    return tuple(np.sort(indices, axis=None).tolist())


# Uniform: K KV groups and M channels in every layer.


def _uniform_removed(geometry: Geometry, k: int, m: int) -> int:
    groups = sum((have - k) * cost for have, cost in zip(geometry.kv_heads, geometry.group_cost, strict=True))
    return groups + sum((have - m) * cost for have, cost in zip(geometry.mlp_width, geometry.channel_cost, strict=True))


def _uniform_ends(geometry: Geometry, floors: Floors, n: int, gpus: int) -> tuple[tuple[int, ...], int, int]:
    """Return the numbers of KV groups that a plain config can state and all layers may keep, ascending; and the least and the
    largest MLP width, multiples of n."""
    together = max(_together(geometry, gpus))
    heads = tuple(k for k in geometry.uniform_kv_heads if k % together == 0)
    heads = tuple(k for k in heads if k >= max(floors.groups)) or heads[-1:]
    widest = min(geometry.mlp_width) // n * n
    return heads, min(-(-max(1, *floors.channels) // n) * n, widest), widest


def _uniform_bounds(geometry: Geometry, floors: Floors, n: int, gpus: int) -> RemovalBounds:
    heads, narrowest, widest = _uniform_ends(geometry, floors, n, gpus)
    step = n * sum(geometry.channel_cost)
    least = _uniform_removed(geometry, heads[-1], widest)
    name = geometry.channel_name
    block = an(name) if n == 1 else f"a block of {n} {name}s"
    parts = [(step, f"{block} of every layer")] if widest > narrowest else []
    parts += [(_uniform_removed(geometry, k, widest), "KV groups of every layer") for k in heads[-2:-1]]
    if least:
        parts = [(least, f"the KV groups and {name}s that only some layers have")]
    channels = f"{narrowest} {name}s" if narrowest > 1 else f"one {name}"
    attention = "the attention" if geometry.whole_attention else _groups(heads[0])
    fixed = f"embeddings, norms, {channels} and {attention} of every layer"
    return RemovalBounds(
        least, _uniform_removed(geometry, heads[0], narrowest), fixed, *min(parts, default=(1, "a parameter"))
    )


def uniform(
    scores: GroupScores, geometry: Geometry, floors: Floors, target: int, whole: int | None, n: int, gpus: int
) -> tuple[Kept, Kept]:
    """Return kept KV groups and MLP channels, the same numbers in every layer, each layer its best ones.

    For each K that a plain config can state and the GPUs can share, M is the smallest multiple of n that does not remove more than
    the target. Of these pairs those count that miss it by less than n MLP channels of every layer (where none does: the nearest),
    and of them the one that keeps the most importance, the sum of score times cost; a tie goes to more KV groups.
    With `whole`, which is removed in the end, they are found for that, and of the pairs on the way there the one counts that
    removes most within the target; a tie goes to the most importance. Both must be within `removal_bounds`.
    """
    step = n * sum(geometry.channel_cost)
    heads, narrowest, widest = _uniform_ends(geometry, floors, n, gpus)

    def within(budget: int, least_k: int, least_m: int) -> list[tuple[int, int, int]]:
        """Return parameters missing to the budget, K, M."""
        widths = {
            k: max(least_m, -((budget - _uniform_removed(geometry, k, 0)) // step) * n) for k in heads if k >= least_k
        }
        return [(budget - _uniform_removed(geometry, k, m), k, m) for k, m in widths.items() if m <= widest]

    pairs = within(target if whole is None else whole, heads[0], narrowest)
    nearest = min(missing for missing, _, _ in pairs)
    groups, channels = (
        tuple(np.argsort(values, kind="stable") for values in part) for part in (scores.attention, scores.mlp)
    )

    def kept_importance(k: int, m: int) -> float:
        kept = [
            (values[ascending[len(ascending) - count :]] * cost).tolist()
            for part, order, costs, count in (
                (scores.attention, groups, geometry.group_cost, k),
                (scores.mlp, channels, geometry.channel_cost, m),
            )
            for values, ascending, cost in zip(part, order, costs, strict=True)
        ]
        return math.fsum(value for layer in kept for value in layer)

    _, k, m = max((kept_importance(k, m), k, m) for missing, k, m in pairs if missing < max(step, nearest + 1))
    if whole is not None:
        _, _, k, m = max((-missing, kept_importance(k, m), k, m) for missing, k, m in within(target, k, m))
    return _best(groups, k), _best(channels, m)


def _best(order: tuple[np.ndarray, ...], count: int) -> Kept:
    return tuple(tuple(np.sort(ascending[len(ascending) - count :]).tolist()) for ascending in order)
