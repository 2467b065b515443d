"""Make the smaller model: real smaller matrices, no masks.

The pruned copy shares every untouched tensor (embeddings, norms, head) with the dense model, so it costs only the sliced
projections; the dense model is left as it was.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.pruning.groups import PruningPlan


def prune(model: PreTrainedModel, family: Family, plan: PruningPlan) -> PreTrainedModel:
    """A copy of `model` without the groups that `plan` drops. Raises ValueError if the plan is for another model."""
    layers = decoder_layers(model, family)
    if len(layers) != len(plan.kept_groups):
        raise ValueError(f"the plan is for {len(plan.kept_groups)} layers, the model has {len(layers)}")
    # deepcopy takes whatever the memo already holds, so the copy is built from shared parameters and sliced modules.
    memo: dict[int, object] = {id(p): p for p in model.parameters()}
    for layer, groups, channels in zip(layers, plan.kept_groups, plan.kept_channels, strict=True):
        _replace_attention(layer, family, groups, memo)
        _replace_mlp(layer, family, channels, memo)
    return copy.deepcopy(model, memo)


def _replace_attention(layer: nn.Module, family: Family, groups: tuple[int, ...], memo: dict[int, object]) -> None:
    parts = family.linears(layer)
    d = family.head_dim(layer)
    kv_heads = parts["key"].out_features // d
    if len(groups) == kv_heads:
        return
    if not groups:
        memo[id(layer.get_submodule(family.attention))] = RemovedBlock("attention", parts["output"].bias)
        return
    kv_rows = _members(groups, d)
    q_rows = _members(groups, parts["query"].out_features // kv_heads)
    for role, rows in (("query", q_rows), ("key", kv_rows), ("value", kv_rows)):
        memo[id(parts[role])] = _keep_rows(parts[role], rows)
    memo[id(parts["output"])] = _keep_columns(parts["output"], q_rows)


def _replace_mlp(layer: nn.Module, family: Family, channels: tuple[int, ...], memo: dict[int, object]) -> None:
    parts = family.linears(layer)
    if len(channels) == parts["gate"].out_features:
        return
    if not channels:
        memo[id(layer.get_submodule(family.mlp))] = RemovedBlock("mlp", parts["down"].bias)
        return
    kept = torch.tensor(channels, dtype=torch.long)
    for role in ("gate", "up"):
        memo[id(parts[role])] = _keep_rows(parts[role], kept)
    memo[id(parts["down"])] = _keep_columns(parts["down"], kept)


def _members(groups: tuple[int, ...], width: int) -> torch.Tensor:
    """Row numbers of the groups when every group is `width` consecutive rows."""
    return (torch.tensor(groups).unsqueeze(1) * width + torch.arange(width)).flatten()


def _keep_rows(linear: nn.Linear, rows: torch.Tensor) -> nn.Linear:
    rows = rows.to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias.detach()[rows]
    return _linear(linear.weight.detach()[rows], bias)


def _keep_columns(linear: nn.Linear, columns: torch.Tensor) -> nn.Linear:
    return _linear(linear.weight.detach()[:, columns.to(linear.weight.device)], linear.bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    # A smallest possible module: its initialisation is replaced at once, and one of no elements would warn.
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.in_features, linear.out_features = in_features, out_features
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False) if not isinstance(bias, nn.Parameter) else bias
    return linear
