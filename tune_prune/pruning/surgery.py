"""Make the smaller model: real smaller matrices, no masks.

The pruned copy shares every untouched tensor (embeddings, norms, head) with the dense model, so it costs only the sliced
projections; the dense model is left as it was. Of a model whose weights are elsewhere the copy is as empty as the model, and
its weights are cut one by one. What a refit has changed (pruning.compensation.refit) takes the place of what would be cut.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.pruning.groups import PruningPlan

Refitted = Mapping[Hashable, torch.Tensor]  # weights by their parameters' names
NONE: Refitted = MappingProxyType({})


def prune(model: PreTrainedModel, family: Family, plan: PruningPlan, refitted: Refitted = NONE) -> PreTrainedModel:
    """A copy of `model` without the groups that `plan` drops; the weights that `refitted` has are those, by their parameters' names
    (pruning.compensation.refit). Raises ValueError if the plan is for another model."""
    # deepcopy takes whatever the memo already holds, so the copy is built from shared parameters and sliced modules.
    memo: dict[int, object] = {id(p): p for p in model.parameters()}
    for index, (layer, groups, channels) in enumerate(planned_layers(model, family, plan)):
        parts = family.linears(layer)
        for role, kept in kept_members(layer, family, groups, channels).items():
            name, like = weight_name(family, index, role), parts[role].weight
            if name in refitted and not like.is_meta:  # of an empty copy only the shapes count
                memo[id(parts[role])] = _linear(refitted[name].to(like.device, like.dtype), parts[role].bias)
            else:
                memo[id(parts[role])] = _cut(parts[role], role, kept)
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
    refitted: Refitted = NONE,
) -> LazyWeights:
    """The weights of `prune(model, family, plan, refitted)` from those of `model`, by parameter name, each cut when it is asked
    for; `model` itself may be on the meta device. Raises ValueError if the plan is for another model."""
    cuts: dict[str, tuple[int, torch.Tensor]] = {}  # along which dimension, and what stays
    for index, (layer, groups, channels) in enumerate(planned_layers(model, family, plan)):
        for role, kept in kept_members(layer, family, groups, channels).items():
            name = weight_name(family, index, role)
            cuts[name] = _dimension(role), kept
            if _dimension(role) == 0:
                cuts[f"{name.removesuffix('weight')}bias"] = 0, kept

    def find(name: str) -> torch.Tensor:
        if name in refitted:
            return refitted[name].to(model.dtype)
        return weights[name].index_select(*cuts[name]) if name in cuts else weights[name]

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
