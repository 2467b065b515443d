"""Fused projections, one matrix for several (Phi-3's q, k and v; gate and up): taken apart in memory, put together in files.

In memory each part is a linear projection of its own, so that statistics, surgery, refit, adapters and sizes work as in any
other family; a `FusedLinear` stands in the matrix's place. Files hold the matrix, and the family's own class reads them.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers
from tune_prune.models.pruned.modeling_tune_prune import LayerConfig
from tune_prune.models.runner.layer_weights import LazyWeights, Weights

# Where a part's parameter is in the matrix's: name of that one, first row and the row behind the last.
Rows = dict[str, tuple[str, int, int]]


class FusedLinear(nn.Module):
    """Stands in the place of a fused projection: runs its parts, and gives their outputs side by side, as that would."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.cat([part(hidden_states) for part in self.children()], dim=-1)


def take_apart(model: PreTrainedModel, family: Family) -> Rows:
    """Replace the fused projections of a stock or pruned model, which may be on the meta device, by their parts; they share the
    memory. Return where each part's parameters are in the matrices'. A model that is apart already is left as it is."""
    rows: Rows = {}
    for index, layer in enumerate(decoder_layers(model, family) if family.fused() else ()):
        for path, roles in family.fused().items():
            block, _, name = path.rpartition(".")
            matrix = getattr(layer.get_submodule(block), name, None)
            if not isinstance(matrix, nn.Linear):  # apart already, or gone with its block
                continue
            apart = FusedLinear()
            start = 0
            for role, size in zip(roles, _sizes(layer, family, roles, matrix.out_features), strict=True):
                part = nn.Linear(matrix.in_features, size, matrix.bias is not None, device="meta")
                attribute = getattr(family, role).rpartition(".")[2]
                for kind, whole in matrix.named_parameters():
                    setattr(part, kind, nn.Parameter(whole[start : start + size], whole.requires_grad))
                    where = f"{family.layers}.{index}.{path}"
                    rows[f"{where}.{attribute}.{kind}"] = f"{where}.{kind}", start, start + size
                setattr(apart, attribute, part)
                start += size
            setattr(layer.get_submodule(block), name, apart)
    return rows


def _sizes(layer: nn.Module, family: Family, roles: tuple[str, ...], rows: int) -> tuple[int, ...]:
    """Return the rows of each part of a matrix that has so many."""
    if "key" not in roles:
        return (rows // len(roles),) * len(roles)
    keys = cast(int, layer.get_submodule(family.attention).num_key_value_heads) * family.head_dim(layer)
    return rows - 2 * keys, keys, keys


def parts(weights: LazyWeights, model: PreTrainedModel, rows: Rows) -> LazyWeights:
    """Return the weights of a model that `take_apart` has changed, from those of before."""

    def find(name: str) -> Tensor:
        if name not in rows:
            return weights[name]
        matrix, start, end = rows[name]
        return weights[matrix][start:end].clone()  # a view would keep the whole in memory

    names = dict(model.named_parameters(remove_duplicate=False))
    return LazyWeights(names, find) if rows else weights


def put_together(model: PreTrainedModel, weights: Weights, family: Family) -> tuple[PreTrainedModel, Weights]:
    """Return a model, which may be on the meta device, and its `weights` with the fused projections as files have them. What is not
    fused is shared with `model`, and a family without any is returned as it is."""
    if not family.fused():
        return model, weights
    whole = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    names: dict[str, list[str]] = {}  # of parts, by the matrix's parameter
    for path, module in list(whole.named_modules()):
        if isinstance(module, FusedLinear):
            first, *_ = linears = [cast(nn.Linear, part) for part in module.children()]
            size = sum(part.out_features for part in linears)
            like = {"dtype": first.weight.dtype, "device": "meta"}
            matrix = nn.Linear(first.in_features, size, first.bias is not None, **cast(Any, like))
            for kind, _ in first.named_parameters():
                names[f"{path}.{kind}"] = [f"{path}.{part}.{kind}" for part, _ in module.named_children()]
            block, _, name = path.rpartition(".")
            setattr(whole.get_submodule(block), name, matrix.requires_grad_(False))

    def find(name: str) -> Tensor:
        return torch.cat([weights[part] for part in names[name]]) if name in names else weights[name]

    return whole, LazyWeights(dict(whole.named_parameters(remove_duplicate=False)), find)


def state_heads(attention: Any, heads: int, kv_heads: int) -> None:
    """Tell an attention whose queries, keys and values are fused how many heads are left: it cuts them apart by these numbers."""
    attention.config = LayerConfig(attention.config, num_attention_heads=heads, num_key_value_heads=kv_heads)
    attention.num_key_value_heads = kv_heads
