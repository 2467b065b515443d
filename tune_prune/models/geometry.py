"""Sizes of a decoder and the cost of each group that can be removed, as plain numbers.

Read off a built model's real modules (a model on the meta device will do), never off its config, so that biases, tied
embeddings and layers of different width are counted as they are. Check values for Llama-3-8B: 5,242,880 parameters a
KV group, 12,288 an MLP channel, 8,030,261,248 in all.

Where a layer has a mixture in the place of its MLP, its experts stand where another's MLP channels do: `mlp_width` of them at
`channel_cost` each. Check values for Qwen3-30B-A3B: 4,720,640 parameters an expert, 30,532,122,624 in all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tune_prune.core.errors import UserError
from tune_prune.models.families import Family, check_structure, decoder_layers

MAX_LAYERS = 1000  # the deepest published decoders have about 130
MAX_SIZE = 1 << 31  # of anything else: widths, vocabularies, positions


def check_sizes(values: Mapping[str, Any], location: str) -> None:
    """Raise UserError where `values`, the config.json of the model at `location`, state a size far beyond every model's: to build
    its shape would take hours, or all memory."""
    for name, value in values.items():
        if isinstance(value, dict) and str(name).endswith("_config"):  # of a part: text_config, vision_config
            check_sizes(value, location)
        most = MAX_LAYERS if re.search("layers?$|depth$", str(name)) and "window" not in str(name) else MAX_SIZE
        if type(value) is int and value > most:
            raise UserError(
                f"config.json of {location} says {name} {value:.3g}, and {most:,} is the most that is read; download the model "
                "again or correct it"
            )


@dataclass(frozen=True)
class Geometry:
    """Per-layer tuples have one entry per decoder layer; costs are in parameters."""

    total_params: int  # all distinct parameters; tied embeddings count once
    hidden_size: int
    head_dim: int
    queries_per_kv: int  # g: query heads that share one KV head
    kv_heads: tuple[int, ...]  # K; 0 of all layers where attention stays whole
    mlp_width: tuple[int, ...]  # M, or E experts
    group_cost: tuple[int, ...]  # one KV group: d*H*(2g+2) plus its biases
    # One MLP channel: 3H plus its biases; or one expert: 3Hm and its row of the router, H.
    channel_cost: tuple[int, ...]
    last_group_extra: tuple[int, ...]  # parameters that go with a layer's last KV group (norms over head_dim)
    cache_layers: tuple[int, ...]  # layers that keep a KV group: the first of each attention type, so always layer 0
    uniform_kv_heads: tuple[int, ...] = ()  # KV heads that a plain config can state for all layers at once, ascending
    whole_attention: tuple[int, ...] = ()  # parameters of each layer outside its MLP where attention stays whole
    # Of `total_params` those around the language model (models/wrapper.py), which no plan touches.
    around_params: int = 0
    expert_width: tuple[int, ...] = ()  # m of each layer's experts, 0 of a plain MLP; () of a model without mixtures
    experts_per_token: int = 0  # which a router takes, and which a layer must keep

    @property
    def num_layers(self) -> int:
        return len(self.kv_heads)

    @property
    def language_params(self) -> int:
        """Parameters of the language model, which alone is loaded, run and pruned."""
        return self.total_params - self.around_params

    def within(self, around_params: int) -> Geometry:
        """Return the geometry of this language model inside a model that has so many parameters around it."""
        return replace(self, total_params=self.total_params + around_params, around_params=around_params)

    @property
    def mixtures(self) -> tuple[bool, ...]:
        """Whether each layer has experts in the place of MLP channels."""
        return tuple(map(bool, self.expert_width)) or (False,) * self.num_layers

    @property
    def channel_name(self) -> str:
        """What a member of an MLP is called that goes or stays."""
        if all(self.mixtures):
            return "expert"
        return "MLP channel or expert" if any(self.mixtures) else "MLP channel"

    @property
    def least_channels(self) -> tuple[int, ...]:
        """MLP channels, or experts, that each layer must keep: as many experts as a router takes."""
        return tuple(self.experts_per_token * mixture for mixture in self.mixtures)

    @property
    def prunable_params(self) -> int:
        """Everything that selection may remove: all groups and channels but one KV group of each cache layer, which is kept
        because cached decoding measures the past there (transformers in the first layer of each attention type, full or
        sliding; vLLM and llama.cpp in layer 0); and but the experts that a router takes."""
        kept = sum(self.group_cost[layer] + self.last_group_extra[layer] for layer in self.cache_layers)
        kept += sum(count * cost for count, cost in zip(self.least_channels, self.channel_cost, strict=True))
        return sum(self.layer_params) + sum(self.last_group_extra) - kept

    @property
    def query_widths(self) -> tuple[int, ...]:
        """Width of each layer's queries; of an attention that stays whole that of the hidden states, as a measure of it."""
        group = self.queries_per_kv * self.head_dim
        if self.whole_attention:
            return (self.hidden_size,) * self.num_layers
        return tuple(k * group for k in self.kv_heads)

    @property
    def attention_params(self) -> tuple[int, ...]:
        """Parameters of each layer's attention."""
        groups = zip(self.kv_heads, self.group_cost, strict=True)
        return self.whole_attention or tuple(k * cost for k, cost in groups)

    @property
    def mlp_params(self) -> tuple[int, ...]:
        """Parameters of each layer's channels, or experts."""
        return tuple(width * cost for width, cost in zip(self.mlp_width, self.channel_cost, strict=True))

    @property
    def layer_params(self) -> tuple[int, ...]:
        """Parameters of each layer's groups and channels."""
        groups = zip(self.kv_heads, self.group_cost, self.mlp_width, self.channel_cost, strict=True)
        return tuple(k * group + width * channel for k, group, width, channel in groups)

    @property
    def mlp_used(self) -> tuple[int, ...]:
        """Parameters of each layer's MLP that compute a token: of a mixture the router and the experts that it takes."""
        every = zip(self.mlp_width, self.channel_cost, self.mixtures, strict=True)
        return tuple(
            self.experts_per_token * (cost - self.hidden_size) + width * self.hidden_size if mixture else width * cost
            for width, cost, mixture in every
        )

    @property
    def largest_weight(self) -> int:
        """Parameters of the largest weight of a projection, or of the stacked gate and up of a layer's experts."""
        experts = zip(self.mlp_width, self.expert_width, strict=False)
        plain = (width for width, mixture in zip(self.mlp_width, self.mixtures, strict=True) if not mixture)
        widest = max(*self.query_widths, *plain, *(2 * count * width for count, width in experts))
        return self.hidden_size * widest

    @property
    def channels_used(self) -> tuple[int, ...]:
        """MLP channels of each layer that compute a token."""
        every = zip(self.mlp_width, self.expert_width or (0,) * self.num_layers, strict=True)
        return tuple(self.experts_per_token * of_expert if of_expert else width for width, of_expert in every)


def read_geometry(model: PreTrainedModel, family: Family) -> Geometry:
    """The geometry of a model; a pruned checkpoint's layer without attention has 0 KV heads, one without MLP a width of 0, and
    neither costs anything. Raises UserError where the model's structure is not the family's."""
    check_structure(model, family)
    kv_heads, mlp_width, group_cost, channel_cost, extra, whole, expert_width = [], [], [], [], [], [], []
    head_dim, queries, pruned, top_k = 1, 1, "attention" in family.prunes, 0
    for layer in decoder_layers(model, family):
        part = family.linears(layer)
        k, group, norms = family.kv_heads(layer), 0, 0
        if k:
            head_dim = family.head_dim(layer)
            queries = part["query"].out_features // part["key"].out_features
            rows = sum(_row_params(part[role]) for role in ("query", "key", "value"))
            group = (rows + part["output"].weight.numel()) // k
            norms = sum(
                p.numel()
                for norm in family.head_norms
                for p in layer.get_submodule(f"{family.attention}.{norm}").parameters()
            )
        m = part["gate"].out_features if "gate" in part else 0
        columns = _row_params(part["gate"]) + _row_params(part["up"]) + part["down"].weight.numel() if m else 0
        mixture = family.mixture(layer)
        if mixture is not None:
            m, top_k = mixture.count, mixture.top_k
            columns = sum(p.numel() for p in (mixture.gate_up, mixture.down, mixture.router_weight))
        expert_width.append(0 if mixture is None else mixture.width)
        kv_heads.append(k)
        group_cost.append(group)
        extra.append(norms)
        mlp_width.append(m)
        channel_cost.append(columns // m if m else 0)
        if not pruned:
            outside = (p.numel() for name, p in layer.named_parameters() if not name.startswith(f"{family.mlp}."))
            whole.append(sum(outside))
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(kv_heads)
    hidden = model.config.hidden_size
    return Geometry(
        total_params=sum(p.numel() for p in model.parameters()),
        hidden_size=hidden,
        head_dim=head_dim,
        queries_per_kv=queries,
        kv_heads=tuple(kv_heads),
        mlp_width=tuple(mlp_width),
        group_cost=tuple(group_cost),
        channel_cost=tuple(channel_cost),
        last_group_extra=tuple(extra),
        cache_layers=tuple(sorted(types.index(kind) for kind in set(types))) if pruned else (),
        uniform_kv_heads=tuple(
            k for k in range(1, min(kv_heads) + 1) if _can_be_stated(k * queries, model.config, family)
        )
        if pruned
        else (0,),
        whole_attention=tuple(whole),
        expert_width=tuple(expert_width) if any(expert_width) else (),
        experts_per_token=top_k,
    )


def _can_be_stated(heads: int, config: Any, family: Family) -> bool:
    """Say whether a plain config of the family can have so many query heads for all layers."""
    if family.heads_divide_hidden and config.hidden_size % heads:
        return False
    if not family.longrope_by_heads or not (factors := config.rope_parameters.get("short_factor")):
        return True
    return int(config.hidden_size // heads * config.rope_parameters["partial_rotary_factor"]) // 2 == len(factors)


def _row_params(linear: nn.Linear) -> int:
    """Parameters of a projection whose rows follow the groups: weight and bias."""
    return linear.weight.numel() + (linear.bias.numel() if linear.bias is not None else 0)
