"""KV groups and MLP channels, about which pruning decides: their scores, which of them a plan keeps, and what that removes.

A KV group is one key/value head with the g query heads that read it; an MLP channel is one gate row, up row and down
column. Arrays come one per layer: shape [K] for groups, [M] for channels. Where a layer has a mixture of experts, its experts stand
in the place of channels, [E], and each has channels of its own, [E, m]. Plain numpy: no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tune_prune.core.validation import Count, Indices, validated
from tune_prune.models.geometry import Geometry

EXTREME_FRACTION = 0.5  # of a layer's MLP channels


@dataclass(frozen=True)
class GroupScores:
    """A number for every group: importance, or the final score that selection sorts by. -inf is for what goes before all others,
    whatever scores are normalised by."""

    attention: tuple[np.ndarray, ...]  # per layer, float64 [K]
    # Per layer, float64 [M], or [E] of experts; of sums that are not yet divided by costs [E, 1 + m], each with its channels.
    mlp: tuple[np.ndarray, ...]
    # Per layer, float64 [E, m]; [0, 0] of a plain MLP; () where there are none.
    expert_channels: tuple[np.ndarray, ...] = ()

    @classmethod
    def of_layers(cls, layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> GroupScores:
        """Make scores from [K] and [M] of each layer."""
        return cls(tuple(attention for attention, _ in layers), tuple(mlp for _, mlp in layers))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return flat arrays for the artifact cache: attention_<layer>, mlp_<layer>."""
        named = {}
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            named[f"attention_{layer}"], named[f"mlp_{layer}"] = attention, mlp
        return named

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> GroupScores:
        layers = range(sum(name.startswith("mlp_") for name in arrays))
        return cls.of_layers([(arrays[f"attention_{layer}"], arrays[f"mlp_{layer}"]) for layer in layers])

    def per_parameter(self, geometry: Geometry) -> GroupScores:
        """Return the scores divided by what each group costs, so that a large group does not win by its size."""
        parts = [(part[:, 0], part[:, 1:]) if part.ndim > 1 else (part, np.empty((0, 0))) for part in self.mlp]
        inside = tuple(channels / (3 * geometry.hidden_size) for _, channels in parts)
        return GroupScores(
            tuple(score / cost for score, cost in zip(self.attention, geometry.group_cost, strict=True)),
            tuple(score / cost for (score, _), cost in zip(parts, geometry.channel_cost, strict=True)),
            inside if any(channels.size for channels in inside) else (),
        )

    def scaled(self, attention: np.ndarray, mlp: np.ndarray) -> GroupScores:
        """Return every layer's scores times one factor per layer; `attention` and `mlp` are [layers]."""
        return GroupScores(
            tuple(score * factor for score, factor in zip(self.attention, attention, strict=True)),
            tuple(score * factor for score, factor in zip(self.mlp, mlp, strict=True)),
            tuple(score * factor for score, factor in zip(self.expert_channels, mlp, strict=False)),
        )

    def normalized(self, by: str) -> GroupScores:
        """Return the scores divided by root mean squares: by "kind" that of all KV groups' scores and that of all MLP channels', by
        "layer" that of each layer's; "none" as they are. What has no score but 0 stays so."""
        if by == "none":
            return self
        of_kind = [_root_mean_square(np.concatenate(part)) for part in (self.attention, self.mlp)]
        layers = [
            [_root_mean_square(np.concatenate(both))] * 2 if by == "layer" else of_kind
            for both in zip(self.attention, self.mlp, strict=True)
        ]
        attention, mlp = 1 / np.array(layers, dtype=np.float64).reshape(-1, 2).T
        return self.scaled(attention, mlp)

    def with_a_lowest(self) -> GroupScores:
        """Return the scores with a number in the place of -inf, the score of what goes first: 1 below the lowest of the others."""
        scores = np.concatenate([*self.attention, *self.mlp])
        lowest = scores[np.isfinite(scores)].min(initial=0.0) - 1
        first = [
            tuple(np.where(np.isneginf(part), lowest, part) for part in parts) for parts in (self.attention, self.mlp)
        ]
        return replace(self, attention=first[0], mlp=first[1])


def _root_mean_square(scores: np.ndarray) -> float:
    """Return the root mean square of scores that are too small or too large for their squares, too; 1 where there is none but 0.
    One that is not finite is left out, so that selection, which refuses it, counts it alone."""
    finite = scores[np.isfinite(scores)]
    largest = float(np.abs(finite).max(initial=0.0))
    return largest * float(np.sqrt(np.square(finite / largest).mean())) if largest else 1.0


@dataclass(frozen=True)
class PruningPlan:
    """Which groups are kept, as sorted indices per layer, and how many parameters that removes."""

    kept_groups: tuple[tuple[int, ...], ...]
    kept_channels: tuple[tuple[int, ...], ...]  # or experts
    target_params: int  # asked to be removed: floor(pruning_ratio * all parameters)
    removed_params: int  # removed by this plan
    total_params: int
    # Per layer, of every expert that is kept, its channels that are, as many of each; () of a plain MLP. () where all are kept.
    kept_expert_channels: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @classmethod
    def keep_all(cls, geometry: Geometry) -> PruningPlan:
        """Return the plan that removes nothing: the dense model."""
        return cls(
            kept_groups=tuple(tuple(range(k)) for k in geometry.kv_heads),
            kept_channels=tuple(tuple(range(m)) for m in geometry.mlp_width),
            target_params=0,
            removed_params=0,
            total_params=geometry.total_params,
        )

    @property
    def removed_fraction(self) -> float:
        return self.removed_params / self.total_params

    @property
    def structure(self) -> str:
        """Return a digest of what is kept: plans of equal structure make the same model, whatever method chose them."""
        state = hashlib.sha256()
        inside = (channels for layer in self.kept_expert_channels for channels in layer)
        for kept in (*self.kept_groups, *self.kept_channels, *inside):
            state.update(np.array([len(kept), *kept], dtype=np.int64).tobytes())
        return state.hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of pruning_plan.json: enough to rebuild the model from the dense one."""
        return {
            "target_params": self.target_params,
            "removed_params": self.removed_params,
            "total_params": self.total_params,
            "removed_fraction": self.removed_fraction,
            "layers": [
                {"kept_groups": list(groups), "kept_channels": list(channels)}
                | ({"kept_expert_channels": [list(kept) for kept in inside]} if inside else {})
                for groups, channels, inside in zip(self.kept_groups, self.kept_channels, self.inside(), strict=True)
            ],
        }

    def inside(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the kept channels of every kept expert, by layer; () of a layer in which all are kept."""
        return self.kept_expert_channels or ((),) * len(self.kept_groups)

    @classmethod
    def from_dict(cls, values: Any) -> PruningPlan:
        """Return the inverse of `to_dict`. Raises ValueError that names a field which is missing or wrong."""
        stored = validated(_StoredPlan, values)
        inside = tuple(layer.kept_expert_channels for layer in stored.layers)
        return cls(
            kept_groups=tuple(layer.kept_groups for layer in stored.layers),
            kept_channels=tuple(layer.kept_channels for layer in stored.layers),
            target_params=stored.target_params,
            removed_params=stored.removed_params,
            total_params=stored.total_params,
            kept_expert_channels=inside if any(inside) else (),
        )


@dataclass(frozen=True)
class _StoredLayer:
    kept_groups: Indices
    kept_channels: Indices
    kept_expert_channels: tuple[Indices, ...] = ()


@dataclass(frozen=True)
class _StoredPlan:
    layers: list[_StoredLayer]
    target_params: Count
    removed_params: Count
    total_params: Count


def pruning_comparison(plan: PruningPlan, geometry: Geometry) -> dict[str, Any]:
    """Return what each layer had and kept, for pruning_comparison.json."""
    layers = []
    for layer in range(geometry.num_layers):
        groups, channels = len(plan.kept_groups[layer]), len(plan.kept_channels[layer])
        kv_heads, width = geometry.kv_heads[layer], geometry.mlp_width[layer]
        removed = (kv_heads - groups) * geometry.group_cost[layer] + (width - channels) * geometry.channel_cost[layer]
        removed += geometry.last_group_extra[layer] if groups == 0 else 0
        inside = plan.inside()[layer]
        lost = sum(geometry.expert_width[layer] - len(kept) for kept in inside)  # channels of all experts that are kept
        removed += 3 * geometry.hidden_size * lost
        before = geometry.layer_params[layer] + geometry.last_group_extra[layer]
        layers.append(
            {
                "layer": layer,
                "kv_groups_before": kv_heads,
                "kv_groups_kept": groups,
                "mlp_channels_before": width,
                "mlp_channels_kept": channels,
                **({"expert_channels_kept": len(inside[0])} if inside else {}),
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
