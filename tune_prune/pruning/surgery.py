"""Make the smaller model: real smaller matrices, no masks.

A model is modules and a mapping from parameter names to weights. An operation on weights (`cut` here, `padding.pad`,
`checkpoint.layers`) changes the sizes that the modules state and puts a mapping around the one before: a weight is read, cut,
refitted and filled up when it is asked for. Where it comes from, from memory or from a file, makes no difference.

The pruned copy shares every untouched tensor (embeddings, norms, head) with the dense model, so in memory it costs only the
sliced projections; the dense model is left as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models import fused
from tune_prune.models.families import Family, Mixture, choose_experts_kernel, decoder_layers
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.models.runner.layer_weights import LazyWeights, Weights, bring
from tune_prune.pruning.groups import PruningPlan

Updates = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # B [out, r] and A [r, in], float32


@dataclass(frozen=True, eq=False)
class Changes:
    """Changes of weights after the cut, by parameter name: a `refitted` weight takes the place of what was cut, and the product
    B A of `updates` is added."""

    refitted: Mapping[Hashable, torch.Tensor] = field(default_factory=dict)
    updates: Updates = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.refitted or self.updates)

    def __contains__(self, name: str) -> bool:
        return name in self.refitted or name in self.updates

    def applied(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight of that name as it is after the changes, from the one that was cut: on its device, in its dtype."""
        if name in self.refitted:
            weight = self.refitted[name].to(weight.device, weight.dtype)
        if name in self.updates:
            out, into = (part.to(weight.device) for part in self.updates[name])
            weight = (weight.to(torch.promote_types(weight.dtype, out.dtype)) + out @ into).to(weight.dtype)
        return weight


NONE = Changes()


@dataclass(frozen=True, eq=False)
class Sketch:
    """A smaller model that need not be in memory: its modules, of which parameters that differ from the dense model's are on the
    meta device, and all weights by parameter name, each made when it is asked for."""

    model: PreTrainedModel
    weights: Weights

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sketch:
        """Return a model that is in memory as a sketch of itself."""
        return cls(model, model.state_dict(keep_vars=True))

    def in_memory(self, device: torch.device | None = None) -> PreTrainedModel:
        """Return the model itself, with what it lacked brought to `device` (None: to where the weights are)."""
        bring(self.model, self.weights, device)
        return self.model


def prune(model: PreTrainedModel, family: Family, plan: PruningPlan, changes: Changes = NONE) -> PreTrainedModel:
    """Return a copy of `model`, which is in memory, without the groups that `plan` drops, with `changes` to what is left. Raises
    ValueError if the plan is for another model."""
    return cut(model, family, plan, changes=changes).in_memory()


def cut(
    model: PreTrainedModel,
    family: Family,
    plan: PruningPlan,
    weights: Weights | None = None,
    changes: Changes = NONE,
) -> Sketch:
    """Sketch `model` without the groups that `plan` drops. `weights`: those of `model` where it is on the meta device; None: its
    own. Raises ValueError if the plan is for another model."""
    dense = Sketch.of(model).weights if weights is None else weights
    cuts: dict[str, tuple[int, torch.Tensor]] = {}  # the dimension along which a parameter is cut, and what it keeps
    # deepcopy takes what the memo already holds: the copy has modules of its own, and the dense model's parameters.
    pruned = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    inside: dict[str, torch.Tensor] = {}  # of stacked weights, the channels that each expert keeps [E, m]
    for index, (layer, groups, channels) in enumerate(planned_layers(pruned, family, plan)):
        kept = kept_members(layer, family, groups, channels)
        parts = family.linears(layer)
        for role, linear in parts.items():
            name, dimension = weight_name(family, index, role), int(role in ("output", "down"))
            size = [linear.out_features, linear.in_features]
            if role in kept:
                cuts[name] = dimension, kept[role]
                if dimension == 0:
                    cuts[f"{name.removesuffix('weight')}bias"] = cuts[name]
                size[dimension] = len(kept[role])
            if role in kept or name in changes:
                resize(linear, *size)
        if "query" in kept and "." in family.query:
            heads, kv_heads = (len(kept[role]) // family.head_dim(layer) for role in ("query", "key"))
            fused.state_heads(layer.get_submodule(family.attention), heads, kv_heads)
        if not groups and "attention" in family.prunes:
            setattr(layer, family.attention, RemovedBlock("attention", parts["output"].bias))
        mixture = family.mixture(layer)
        if mixture is not None:
            path = f"{family.layers}.{index}.{family.mlp}"
            stacked = [f"{path}.{family.experts}.{name}" for name in ("gate_up_proj", "down_proj")]
            if len(channels) < mixture.count:
                experts = torch.tensor(channels, dtype=torch.long)
                cuts |= dict.fromkeys([*stacked, f"{path}.{family.router}.weight"], (0, experts))
            if kept_inside := plan.inside()[index]:
                inside |= dict.fromkeys(stacked, torch.tensor(kept_inside, dtype=torch.long))
            keep_experts(mixture, len(channels), len(kept_inside[0]) if kept_inside else mixture.width)
        elif not channels:
            setattr(layer, family.mlp, RemovedBlock("mlp", parts["down"].bias, layer.get_submodule(family.mlp)))

    choose_experts_kernel(pruned, family)

    def find(name: str) -> torch.Tensor:
        weight = dense[name]
        if name in cuts:
            dimension, members = cuts[name]
            weight = weight.index_select(dimension, members.to(weight.device))
        if name in inside:
            weight = _inside_experts(weight, inside[name].to(weight.device), rows=name.endswith("gate_up_proj"))
        return changes.applied(name, weight)

    return Sketch(pruned, LazyWeights(dense, find))


def resize(linear: nn.Linear, rows: int, columns: int) -> None:
    """Give `linear` a weight of that size on the meta device, and such a bias unless the rows stay as many."""
    like = torch.empty(rows, columns, dtype=linear.weight.dtype, device="meta")
    if linear.bias is not None and rows != linear.out_features:
        linear.bias = nn.Parameter(like.new_empty(rows), requires_grad=False)
    linear.weight = nn.Parameter(like, requires_grad=False)
    linear.out_features, linear.in_features = rows, columns


def keep_experts(mixture: Mixture, count: int, width: int) -> None:
    """Give a mixture weights of so many experts of that width on the meta device, unless it has so many."""
    hidden = mixture.router_weight.shape[1]
    sizes = {
        (mixture.experts, "gate_up_proj"): (count, 2 * width, hidden),
        (mixture.experts, "down_proj"): (count, hidden, width),
        (mixture.router, "weight"): (count, hidden),
    }
    for (module, name), size in sizes.items():
        p = module.get_parameter(name)
        if p.shape != size:
            like = torch.empty(size, dtype=p.dtype, device="meta")
            setattr(module, name, nn.Parameter(like, requires_grad=False))
    experts, router = cast(Any, mixture.experts), cast(Any, mixture.router)
    experts.num_experts = router.num_experts = count
    experts.intermediate_dim = width


def _inside_experts(weight: torch.Tensor, kept: torch.Tensor, rows: bool) -> torch.Tensor:
    """Return what experts keep by their channels [E, m]: rows of gate and of up, which are stacked, or columns of down."""
    if not rows:
        return weight.take_along_dim(kept[:, None], 2)
    halves = weight.unflatten(1, (2, -1)).take_along_dim(kept[:, None, :, None], 2)
    return halves.flatten(1, 2)


def planned_layers(
    model: PreTrainedModel, family: Family, plan: PruningPlan
) -> Iterator[tuple[nn.Module, tuple[int, ...], tuple[int, ...]]]:
    """Yield each layer with the KV groups and the channels, or experts, that it keeps."""
    layers = decoder_layers(model, family)
    if len(layers) != len(plan.kept_groups):
        raise ValueError(f"the plan is for {len(plan.kept_groups)} layers, the model has {len(layers)}")
    return zip(layers, plan.kept_groups, plan.kept_channels, strict=True)


def weight_name(family: Family, layer: int, role: str) -> str:
    """Return the name of a projection's weight parameter, e.g. 'model.layers.3.mlp.down_proj.weight'."""
    return f"{family.layers}.{layer}.{family.projections()[role]}.weight"


def kept_members(
    layer: nn.Module, family: Family, groups: tuple[int, ...], channels: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Return what the projections of a layer keep, by role: rows, or columns of output and down. Projections that keep all are
    left out."""
    parts, kv_heads = family.linears(layer), family.kv_heads(layer)
    kept = {}
    if len(groups) < kv_heads:
        kept["query"] = kept["output"] = _members(groups, parts["query"].out_features // kv_heads)
        kept["key"] = kept["value"] = _members(groups, family.head_dim(layer))
    if "gate" in parts and len(channels) < parts["gate"].out_features:
        kept["gate"] = kept["up"] = kept["down"] = torch.tensor(channels, dtype=torch.long)
    return kept


def _members(groups: tuple[int, ...], width: int) -> torch.Tensor:
    """Return the row numbers of the groups when every group is `width` consecutive rows."""
    return (torch.tensor(groups, dtype=torch.long).unsqueeze(1) * width + torch.arange(width)).flatten()
