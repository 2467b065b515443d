"""Make the smaller model: real smaller matrices, no masks.

The pruned copy shares every untouched tensor (embeddings, norms, head) with the dense model, so it costs only the sliced
projections; the dense model is left as it was. Of a model whose weights are elsewhere the copy is as empty as the model, and
its weights are cut one by one. What was done to the weights besides (pruning.compensation) is applied to what is cut.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.pruning.groups import PruningPlan

Updates = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # B [out, r] and A [r, in], float32


@dataclass(frozen=True, eq=False)
class Changes:
    """What is done to weights after the cut, by their parameters' names: `refitted` ones take the place of what was cut, and
    products B A of `updates` are added."""

    refitted: Mapping[Hashable, torch.Tensor] = field(default_factory=dict)
    updates: Updates = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.refitted or self.updates)

    def __contains__(self, name: str) -> bool:
        return name in self.refitted or name in self.updates

    def applied(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What becomes of the weight of that name, which was cut; on its device, in its dtype."""
        if name in self.refitted:
            weight = self.refitted[name].to(weight.device, weight.dtype)
        if name in self.updates:
            out, into = (part.to(weight.device) for part in self.updates[name])
            weight = (weight.to(torch.promote_types(weight.dtype, out.dtype)) + out @ into).to(weight.dtype)
        return weight


NONE = Changes()


def prune(model: PreTrainedModel, family: Family, plan: PruningPlan, changes: Changes = NONE) -> PreTrainedModel:
    """A copy of `model` without the groups that `plan` drops, with `changes` to what is left. Raises ValueError if the plan is for
    another model."""
    # deepcopy takes whatever the memo already holds, so the copy is built from shared parameters and sliced modules.
    memo: dict[int, object] = {id(p): p for p in model.parameters()}
    for index, (layer, groups, channels) in enumerate(planned_layers(model, family, plan)):
        parts, cut = family.linears(layer), kept_members(layer, family, groups, channels)
        for role, linear in parts.items():
            name = weight_name(family, index, role)
            left = _cut(linear, role, cut[role]) if role in cut else linear
            if not left.weight.is_meta and name in changes:  # of an empty copy only the shapes count
                left = _linear(changes.applied(name, left.weight.detach()), left.bias)
            if left is not linear:
                memo[id(linear)] = left
        if not groups:
            attention = layer.get_submodule(family.attention)
            memo[id(attention)] = RemovedBlock("attention", parts["output"].bias)
        if not channels:
            memo[id(layer.get_submodule(family.mlp))] = RemovedBlock("mlp", parts["down"].bias)
    return copy.deepcopy(model, memo)


def pruned_weights(
    model: PreTrainedModel,
    family: Family,
    plan: PruningPlan,
    weights: Mapping[str, torch.Tensor],
    changes: Changes = NONE,
) -> LazyWeights:
    """The weights of `prune(model, family, plan, changes)` from those of `model`, by parameter name, each cut when it is asked
    for; `model` itself may be on the meta device. Raises ValueError if the plan is for another model."""
    cuts: dict[str, tuple[int, torch.Tensor]] = {}  # along which dimension, and what stays
    for index, (layer, groups, channels) in enumerate(planned_layers(model, family, plan)):
        for role, kept in kept_members(layer, family, groups, channels).items():
            name = weight_name(family, index, role)
            cuts[name] = _dimension(role), kept
            if _dimension(role) == 0:
                cuts[f"{name.removesuffix('weight')}bias"] = 0, kept

    def find(name: str) -> torch.Tensor:
        return changes.applied(name, weights[name].index_select(*cuts[name]) if name in cuts else weights[name])

    return LazyWeights(weights, find)


def planned_layers(
    model: PreTrainedModel, family: Family, plan: PruningPlan
) -> Iterator[tuple[nn.Module, tuple[int, ...], tuple[int, ...]]]:
    """Each layer with the KV groups and the channels that it keeps."""
    layers = decoder_layers(model, family)
    if len(layers) != len(plan.kept_groups):
        raise ValueError(f"the plan is for {len(plan.kept_groups)} layers, the model has {len(layers)}")
    return zip(layers, plan.kept_groups, plan.kept_channels, strict=True)


def weight_name(family: Family, layer: int, role: str) -> str:
    """Of the parameter that is the weight of a projection."""
    return f"{family.layers}.{layer}.{family.projections()[role]}.weight"


def kept_members(
    layer: nn.Module, family: Family, groups: tuple[int, ...], channels: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """What the projections of a layer keep, by role: rows, or columns of output and down. Those that keep all are left out."""
    parts = family.linears(layer)
    kept = {}
    if "key" in parts:  # a pruned checkpoint may have lost it
        d = family.head_dim(layer)
        kv_heads = parts["key"].out_features // d
        if len(groups) < kv_heads:
            kept["query"] = kept["output"] = _members(groups, parts["query"].out_features // kv_heads)
            kept["key"] = kept["value"] = _members(groups, d)
    if "gate" in parts and len(channels) < parts["gate"].out_features:
        kept["gate"] = kept["up"] = kept["down"] = torch.tensor(channels, dtype=torch.long)
    return kept


def _members(groups: tuple[int, ...], width: int) -> torch.Tensor:
    """Row numbers of the groups when every group is `width` consecutive rows."""
    return (torch.tensor(groups, dtype=torch.long).unsqueeze(1) * width + torch.arange(width)).flatten()


def _dimension(role: str) -> int:
    """Of its weight, along which groups lie."""
    return 1 if role in ("output", "down") else 0


def _cut(linear: nn.Linear, role: str, kept: torch.Tensor) -> nn.Linear:
    kept = kept.to(linear.weight.device)
    weight = linear.weight.detach().index_select(_dimension(role), kept)
    if linear.bias is None or _dimension(role) == 1:
        return _linear(weight, linear.bias)
    return _linear(weight, linear.bias.detach()[kept])


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    # A smallest possible module: its initialisation is replaced at once, and one of no elements would warn.
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.in_features, linear.out_features = in_features, out_features
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False) if not isinstance(bias, nn.Parameter) else bias
    return linear
