"""What is left of a model's layers: widths, layers that are dropped, and the configs that state them.

A layer that has lost both its blocks passes its input on, so it is dropped and those behind it are renumbered; unless
biases of its last projections remain, which it still adds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.core.errors import UserError
from tune_prune.models.families import LAYER_LISTS, Family, decoder_layers
from tune_prune.models.loading import LoadedModel
from tune_prune.models.pruned import modeling_tune_prune
from tune_prune.models.pruned.modeling_tune_prune import BLOCKS, RemovedBlock
from tune_prune.models.registration import STEMS, auto_map, register
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import NONE, Changes, prune, pruned_weights


@dataclass(frozen=True)
class LayerWidths:
    """Sizes of one layer; 0 where the block is gone."""

    heads: int  # query heads
    kv_heads: int
    channels: int  # of the MLP

    @property
    def skip(self) -> list[str]:
        """Names of the blocks that are gone, as configs say it."""
        return [kind for kind, size in zip(BLOCKS, (self.kv_heads, self.channels), strict=True) if not size]


def compact(
    model: PreTrainedModel, family: Family, plan: PruningPlan, changes: Changes = NONE
) -> tuple[PreTrainedModel, list[int]]:
    """The pruned copy of the dense `model` without its empty layers, and their numbers in the dense model. It shares
    every untouched tensor with `model`. Raises ValueError if the plan is for another model."""
    pruned = prune(model, family, plan, changes)
    layers = decoder_layers(pruned, family)
    dropped = [index for index, layer in enumerate(layers) if not _outputs(layer, family)]
    if dropped:
        kept = [index for index in range(len(layers)) if index not in dropped]
        parent = cast(Any, pruned.get_submodule(family.layers.rpartition(".")[0]))
        setattr(parent, family.layers.rpartition(".")[2], nn.ModuleList(layers[index] for index in kept))
        for number, index in enumerate(kept):
            attention = layers[index].get_submodule(family.attention)
            if not isinstance(attention, RemovedBlock):
                cast(Any, attention).layer_idx = number  # its place in the cache
        pruned.config.num_hidden_layers = len(kept)
        for name in LAYER_LISTS:
            if (values := getattr(pruned.config, name, None)) is not None:
                setattr(pruned.config, name, [values[index] for index in kept])
    return pruned, dropped


def check_plan(plan: PruningPlan, dense: LoadedModel) -> None:
    """Raise UserError unless the plan is one for this model that leaves a model which works."""
    geometry, label = dense.geometry, dense.source.label
    if len(plan.kept_groups) != geometry.num_layers or plan.total_params != geometry.total_params:
        raise UserError(
            f"the plan is for a model of {len(plan.kept_groups)} layers and {plan.total_params:,} parameters, but {label} has "
            f"{geometry.num_layers} and {geometry.total_params:,}; name the model that was searched"
        )
    for layer in range(geometry.num_layers):
        for part, kept, size in (
            ("KV groups", plan.kept_groups[layer], geometry.kv_heads[layer]),
            ("MLP channels", plan.kept_channels[layer], geometry.mlp_width[layer]),
        ):
            if list(kept) != sorted(set(kept)) or not set(kept) <= set(range(size)):
                raise UserError(
                    f"the plan keeps {part} in layer {layer} that {label} does not have, or one twice (it has 0 to {size - 1}); "
                    "restore the plan from a copy, or delete it to have it computed again"
                )
        if layer in geometry.cache_layers and not plan.kept_groups[layer]:
            raise UserError(
                f"the plan removes all attention of layer {layer}; a KV group must be kept there, because transformers, vLLM and "
                "llama.cpp measure the length of the cache in it and decode silently wrong without: keep one"
            )


def compact_weights(
    dense: LoadedModel,
    plan: PruningPlan,
    pruned: PreTrainedModel,
    dropped: Sequence[int],
    changes: Changes = NONE,
) -> Mapping[str, torch.Tensor] | None:
    """The weights of `pruned`, `compact`'s copy, where those of `dense` are elsewhere; each is cut when it is asked for. None: the
    copy itself has them."""
    if dense.residency.weights is None:
        return None
    weights = pruned_weights(dense.model, dense.family, plan, dense.residency.weights, changes)
    kept = [index for index in range(dense.geometry.num_layers) if index not in dropped]
    layers = f"{dense.family.layers}."

    def find(name: str) -> torch.Tensor:
        if name.startswith(layers):
            number, _, rest = name.removeprefix(layers).partition(".")
            name = f"{layers}{kept[int(number)]}.{rest}"
        return weights[name]

    return LazyWeights(pruned.state_dict(), find)


def _outputs(layer: nn.Module, family: Family) -> Sequence[nn.Parameter]:
    """The parameters by which a layer adds anything to what it passes on."""
    return [p for name in (family.attention, family.mlp) for p in layer.get_submodule(name).parameters()]


def widths(model: PreTrainedModel, family: Family) -> tuple[LayerWidths, ...]:
    """The sizes of every layer, read off its modules."""
    found = []
    for layer in decoder_layers(model, family):
        attention, mlp = (layer.get_submodule(name) for name in (family.attention, family.mlp))
        heads = kv_heads = channels = 0
        if not isinstance(attention, RemovedBlock):
            head_dim = family.head_dim(layer)
            heads = cast(nn.Linear, attention.get_submodule(family.query)).out_features // head_dim
            kv_heads = cast(nn.Linear, attention.get_submodule(family.key)).out_features // head_dim
        if not isinstance(mlp, RemovedBlock):
            channels = cast(nn.Linear, mlp.get_submodule(family.gate)).out_features
        found.append(LayerWidths(heads, kv_heads, channels))
    return tuple(found)


def is_uniform(sizes: Sequence[LayerWidths], stock_kv_heads: Sequence[int]) -> bool:
    """Whether the family's own config can state these sizes. `stock_kv_heads`: numbers of KV heads that it can state."""
    return len(set(sizes)) == 1 and not sizes[0].skip and sizes[0].kv_heads in stock_kv_heads


def stock_config(config: PretrainedConfig, size: LayerWidths, head_dim: int) -> PretrainedConfig:
    """A config of the dense family in which every layer has that size."""
    fields = _plain(config) | {
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "intermediate_size": size.channels,
        "head_dim": head_dim,
    }
    return type(config).from_dict(fields)


def pruned_config(config: PretrainedConfig, sizes: Sequence[LayerWidths], head_dim: int) -> PretrainedConfig:
    """The config of a checkpoint whose layers differ: the dense family's fields at their old values, and what each layer
    has instead."""
    per_layer: dict[str, dict[str, Any]] = {}
    for index, size in enumerate(sizes):
        fields_of_layer: dict[str, Any] = {"skip": size.skip} if size.skip else {}
        if size.kv_heads:
            fields_of_layer |= {"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads}
        if size.channels:
            fields_of_layer |= {"intermediate_size": size.channels}
        per_layer[str(index)] = fields_of_layer
    fields = _plain(config) | {
        "head_dim": head_dim,
        "per_layer_config": per_layer,
        "auto_map": auto_map(config.model_type),
    }
    if scaling := fields.get("logits_scaling"):
        # vLLM runs a class that it does not know through transformers, and scales its logits by this alone. Its own Granite class
        # would do both, so no config of the family itself has it.
        fields["logit_scale"] = 1 / scaling
    dense = (config.num_key_value_heads, config.intermediate_size)
    if all(size.kv_heads in (0, dense[0]) and size.channels in (0, dense[1]) for size in sizes):
        # Whole blocks are gone and nothing else. The family's own class, forced on the checkpoint, raises where a tensor does
        # not fit, but fills one that it misses with random numbers: so nothing may fit the sizes that it reads.
        per_kv = config.num_attention_heads // dense[0]
        fields |= {"num_attention_heads": (dense[0] + 1) * per_kv, "num_key_value_heads": dense[0] + 1}
    return cast(Any, pruned_class(config.model_type).config_class).from_dict(fields)


def pruned_class(model_type: str) -> type[PreTrainedModel]:
    """The class of pruned checkpoints of a dense family."""
    register()  # its files are saved with its models
    return getattr(modeling_tune_prune, f"Pruned{STEMS[model_type]}ForCausalLM")


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a config without what it says about its own class and origin."""
    fields = copy.deepcopy(config.to_dict())
    for name in ("model_type", "architectures", "auto_map", "_name_or_path", "transformers_version"):
        fields.pop(name, None)
    return fields


def build(model_class: type[PreTrainedModel], config: PretrainedConfig, model: PreTrainedModel) -> PreTrainedModel:
    """A model of `model_class` with the parameters of `model` itself, not copies. Raises RuntimeError where names or
    shapes differ."""
    with torch.device("meta"):
        built = cast(PreTrainedModel, cast(Any, model_class)._from_config(config, dtype=model.dtype))
    built.load_state_dict(model.state_dict(), strict=True, assign=True)
    take_buffers(built, model)
    built.tie_weights()
    built.generation_config = copy.deepcopy(model.generation_config)
    return built.eval()


def take_buffers(built: nn.Module, model: nn.Module) -> None:
    """Give `built`, made on the meta device, the buffers of `model`: no state dict has them (rotary frequencies)."""
    for name, buffer in model.named_buffers():
        parent, _, attribute = name.rpartition(".")
        setattr(built.get_submodule(parent), attribute, buffer)
