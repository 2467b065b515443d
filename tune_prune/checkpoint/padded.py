"""A model whose layers differ, as one of the family's own class: every layer padded with zeros to the widest.

A KV group of zeros attends to zeros, and an MLP channel of zeros multiplies them, so both add nothing: the logits are
the same. What is lost is part of the smaller size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tune_prune.checkpoint.layers import LayerWidths, stock_config, take_buffers, widths
from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.geometry import Geometry
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.pruning.groups import PruningPlan


def pad(model: PreTrainedModel, family: Family, stock_kv_heads: Sequence[int], head_dim: int) -> PreTrainedModel:
    """The padded copy of `model` (layers.compact), of the class of the dense family.

    `stock_kv_heads` are the numbers of KV heads that the family's config can state; the smallest that is enough is taken.
    """
    sizes = widths(model, family)
    per_kv = next(size.heads // size.kv_heads for size in sizes if size.kv_heads)  # the first layer always has some
    kv_heads = min(count for count in stock_kv_heads if count >= max(size.kv_heads for size in sizes))
    channels = max(1, *(size.channels for size in sizes))
    config = stock_config(model.config, LayerWidths(kv_heads * per_kv, kv_heads, channels), head_dim)
    with torch.device("meta"):
        padded = AutoModelForCausalLM.from_config(config, dtype=model.dtype, trust_remote_code=False)
    state = padded_weights(padded, family, model.state_dict(), model.device)
    padded.load_state_dict(dict(state), strict=True, assign=True)
    take_buffers(padded, model)
    padded.tie_weights()
    padded.generation_config = model.generation_config
    _check_nothing_lost(model, padded, family)
    return padded.eval()


def padded_params(plan: PruningPlan, geometry: Geometry) -> int:
    """Of the padded model that `plan` leaves of the dense one, to warn before it is written: norms of dropped layers count, too."""
    there = [layer for layer, kept in enumerate(plan.kept_groups) if kept or plan.kept_channels[layer]]
    most = max(len(plan.kept_groups[layer]) for layer in there)
    kv_heads = min(count for count in (*geometry.uniform_kv_heads, max(geometry.kv_heads)) if count >= most)
    channels = max(len(plan.kept_channels[layer]) for layer in there)
    layers = sum(kv_heads * geometry.group_cost[layer] + channels * geometry.channel_cost[layer] for layer in there)
    return geometry.total_params - sum(geometry.layer_params) + layers


def padded_weights(
    padded: nn.Module, family: Family, weights: Mapping[str, torch.Tensor], device: torch.device
) -> LazyWeights:
    """`weights` on `device` by name, each filled up to the shape that it has in `padded` (on the meta device) when it is asked
    for."""
    norms = {f"{family.attention}.{norm}" for norm in family.head_norms}
    places = padded.state_dict()

    def find(name: str) -> torch.Tensor:
        found, like = weights.get(name), places[name]
        if found is not None and found.shape == like.shape:
            return found
        filler = 1.0 if any(f"{norm}." in name for norm in norms) else 0.0  # norms of no head: any value
        full = torch.full(like.shape, filler, dtype=like.dtype, device=device)
        if found is not None:
            full[tuple(slice(size) for size in found.shape)] = found
        return full

    return LazyWeights(places, find)


def _check_nothing_lost(model: PreTrainedModel, padded: nn.Module, family: Family) -> None:
    assert len(decoder_layers(model, family)) == len(decoder_layers(padded, family))
    lost = model.state_dict().keys() - padded.state_dict().keys()
    assert not lost, f"the padded model has no place for {sorted(lost)}"
