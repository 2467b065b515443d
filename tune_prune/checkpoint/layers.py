"""Layers as a checkpoint has them: their widths, empty layers dropped, and the config and class that state what is left.

A layer that has lost both its blocks passes its input on, so it is dropped and those behind it are renumbered; unless
biases of its last projections remain, which it still adds. Where layers differ, the format hf-padded fills every one with zeros
to the widest, and the format vllm puts a KV group of zeros where attention is lost: the logits stay the same, and part of the
smaller size is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.core.errors import UserError
from tune_prune.models import fused
from tune_prune.models.families import LAYER_LISTS, Family, decoder_layers
from tune_prune.models.geometry import Geometry
from tune_prune.models.loading import LoadedModel
from tune_prune.models.pruned.modeling_tune_prune import BLOCKS, LANGUAGE_MODELS, WRAPPERS, RemovedBlock
from tune_prune.models.registration import MLX_FAMILIES, MODEL_FILE, auto_map, register
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.wrapper import Surroundings, name_in_wrapper
from tune_prune.pruning import shapes
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.padding import zero_filled
from tune_prune.pruning.surgery import Sketch


@dataclass(frozen=True)
class LayerWidths:
    """Sizes of one layer; 0 where the block is gone."""

    heads: int  # query heads
    kv_heads: int
    channels: int  # of the MLP, or experts
    expert_width: int = 0  # channels of each expert; 0: a plain MLP

    def skip(self, prunes: Sequence[str]) -> list[str]:
        """Return the names of the blocks that are gone, as configs say it, of those of which parts may go."""
        return [
            kind
            for kind, size in zip(BLOCKS, (self.kv_heads, self.channels), strict=True)
            if kind in prunes and not size
        ]


def compact(pruned: Sketch, family: Family) -> tuple[Sketch, list[int]]:
    """Drop the empty layers of a pruned model; returns the numbers that they had, too."""
    layers = decoder_layers(pruned.model, family)
    # By these parameters a layer adds something to what it passes on.
    dropped = [
        index
        for index, layer in enumerate(layers)
        if "attention" in family.prunes
        and not any(True for name in (family.attention, family.mlp) for _ in layer.get_submodule(name).parameters())
    ]
    if not dropped:
        return pruned, dropped
    kept = [index for index in range(len(layers)) if index not in dropped]
    parent = cast(Any, pruned.model.get_submodule(family.layers.rpartition(".")[0]))
    setattr(parent, family.layers.rpartition(".")[2], nn.ModuleList(layers[index] for index in kept))
    for number, index in enumerate(kept):
        attention = layers[index].get_submodule(family.attention)
        if not isinstance(attention, RemovedBlock):
            cast(Any, attention).layer_idx = number  # its place in the cache
    config, prefix = pruned.model.config, f"{family.layers}."
    config.num_hidden_layers = len(kept)
    if hasattr(config, "mlp_only_layers"):  # which layers have a mixture was said by their old numbers
        plain = [number for number, index in enumerate(kept) if family.mixture(layers[index]) is None]
        config.mlp_only_layers, config.decoder_sparse_step = plain, 1
    for name in LAYER_LISTS:
        if (values := getattr(config, name, None)) is not None:
            setattr(config, name, [values[index] for index in kept])

    def find(name: str) -> torch.Tensor:
        if name.startswith(prefix):
            number, _, rest = name.removeprefix(prefix).partition(".")
            name = f"{prefix}{kept[int(number)]}.{rest}"
        return pruned.weights[name]

    return Sketch(pruned.model, LazyWeights(pruned.model.state_dict(), find)), dropped


def check_plan(plan: PruningPlan, dense: LoadedModel) -> None:
    """Raise UserError unless the plan is one for this model that leaves a model which works."""
    geometry, label = dense.geometry, dense.source.label
    if len(plan.kept_groups) != geometry.num_layers or plan.total_params != geometry.total_params:
        raise UserError(
            f"the plan is for a model of {len(plan.kept_groups)} layers and {plan.total_params:,} parameters, but {label} has "
            f"{geometry.num_layers} and {geometry.total_params:,}; name the model that was searched"
        )
    kept = [*zip((*plan.kept_groups, *plan.kept_channels), (*geometry.kv_heads, *geometry.mlp_width), strict=True)]
    for experts, channels, width in zip(plan.kept_channels, plan.inside(), geometry.expert_width, strict=False):
        alike = len(channels) in (0, len(experts)) and len({len(one) for one in channels}) <= 1
        kept += [(one if alike and one else (width,), width) for one in channels]  # else one that is not there
    if any(list(part) != sorted(set(part)) or not set(part) <= set(range(size)) for part, size in kept):
        raise UserError(
            f"the plan keeps a KV group or {geometry.channel_name} that {label} does not have, or one twice; restore the "
            "plan from a copy, or delete it to have it computed again"
        )
    least = enumerate(geometry.least_channels)
    if few := [layer for layer, count in least if len(plan.kept_channels[layer]) < count]:
        raise UserError(
            f"the plan keeps {len(plan.kept_channels[few[0]])} experts of layer {few[0]}, and its router takes "
            f"{geometry.experts_per_token} for every token: keep so many"
        )
    if gone := [layer for layer in geometry.cache_layers if not plan.kept_groups[layer]]:
        raise UserError(
            f"the plan removes all attention of layer {gone[0]}; a KV group must be kept there, because transformers, vLLM and "
            "llama.cpp measure the length of the cache in it and decode silently wrong without: keep one"
        )


def widths(model: PreTrainedModel, family: Family) -> tuple[LayerWidths, ...]:
    """Return the sizes of every layer, read off its modules."""
    sizes = []
    for layer in decoder_layers(model, family):
        rows = {role: linear.out_features for role, linear in family.linears(layer).items()}
        kv_heads = family.kv_heads(layer)
        heads = rows["query"] // family.head_dim(layer) if kv_heads else 0
        mixture = family.mixture(layer)
        mlp = (rows.get("gate", 0), 0) if mixture is None else (mixture.count, mixture.width)
        sizes.append(LayerWidths(heads, kv_heads, *mlp))
    return tuple(sizes)


def is_uniform(sizes: Sequence[LayerWidths], stock_kv_heads: Sequence[int]) -> bool:
    """Return whether the family's own config can state these sizes. `stock_kv_heads`: numbers of KV heads that it can state."""
    return len(set(sizes)) == 1 and bool(sizes[0].channels) and sizes[0].kv_heads in stock_kv_heads


def stock_config(config: PretrainedConfig, family: Family, size: LayerWidths, head_dim: int) -> PretrainedConfig:
    """Return a config of the dense family in which every layer has that size."""
    fields = _plain(config) | _fields(family, size)
    if size.kv_heads:
        fields["head_dim"] = head_dim
    return type(config).from_dict(fields)


def _fields(family: Family, size: LayerWidths) -> dict[str, Any]:
    """Return the fields of a config that state the sizes of a layer, of the blocks that it has and that may be cut."""
    attention = {"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads} if size.kv_heads else {}
    if size.expert_width:
        return attention | {"num_local_experts": size.channels, family.expert_width: size.expert_width}
    return attention | ({family.width: size.channels} if size.channels else {})


def pruned_config(
    config: PretrainedConfig, family: Family, sizes: Sequence[LayerWidths], head_dim: int
) -> PretrainedConfig:
    """Return the config of a checkpoint whose layers differ: the dense family's fields at their old values, and what each layer
    has instead."""
    fields = _plain(config)
    per_layer = {int(index): own for index, own in fields.get("per_layer_config", {}).items()}  # of Gemma 4, its heads
    for index, size in enumerate(sizes):
        skip = size.skip(family.prunes)
        per_layer[index] = per_layer.get(index, {}) | ({"skip": skip} if skip else {}) | _fields(family, size)
    fields |= {
        "per_layer_config": {str(index): own for index, own in per_layer.items()},
        "auto_map": auto_map(config.model_type),
    }
    if family.model_type in MLX_FAMILIES:
        fields["model_file"] = MODEL_FILE
    if scaling := fields.get("logits_scaling"):
        # vLLM runs a class that it does not know through transformers, and scales its logits by this alone. Its own Granite class
        # would do both, so no config of the family itself has it.
        fields["logit_scale"] = 1 / scaling
    if multiplier := fields.get("lm_head_multiplier"):  # of Falcon-H1
        fields["logit_scale"] = multiplier
    if "attention" in family.prunes:
        fields["head_dim"] = head_dim
    kv_heads, width = fields["num_key_value_heads"], getattr(config, family.width)
    usual = {0, width, getattr(config, "num_experts", 0)}
    if all(size.kv_heads in (0, kv_heads) and size.channels in usual for size in sizes):
        # Whole blocks are gone and nothing else. The family's own class, forced on the checkpoint, raises where a tensor does
        # not fit, but fills one that it misses with random numbers: so nothing may fit the sizes that it reads.
        per_kv = config.num_attention_heads // kv_heads
        fields |= (
            {"num_attention_heads": (kv_heads + 1) * per_kv, "num_key_value_heads": kv_heads + 1}
            if "attention" in family.prunes
            else {family.width: width + 1}
        )
    return cast(Any, pruned_class(config.model_type).config_class).from_dict(fields)


def pruned_class(model_type: str) -> type[PreTrainedModel]:
    """Return the class of pruned checkpoints of a dense family."""
    register()  # its files are saved with its models
    return LANGUAGE_MODELS[model_type]


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a config without what it says about its own class and origin."""
    fields = copy.deepcopy(config.to_dict())
    for name in ("model_type", "architectures", "auto_map", "model_file", "_name_or_path", "transformers_version"):
        fields.pop(name, None)
    if (
        "block_auto_adjust_ff_dim" in fields
    ):  # of LFM2, whose MLPs are narrower than intermediate_size says where it is true
        fields["block_auto_adjust_ff_dim"] = False
    if "use_double_wide_mlp" in fields:  # of Gemma 4, some of whose MLPs are wider than it says where that is true
        fields["use_double_wide_mlp"] = False
    if "global_head_dim" in fields:  # of Gemma 4 in transformers up to 5.15: as later ones say it
        kv_heads = fields["num_global_key_value_heads"] if fields["attention_k_eq_v"] else None
        own = {"head_dim": fields["global_head_dim"], "num_key_value_heads": kv_heads or fields["num_key_value_heads"]}
        full = (index for index, kind in enumerate(fields["layer_types"]) if kind == "full_attention")
        fields["per_layer_config"] = {str(index): own for index in full}
    return fields


def as_saved(pruned: Sketch, dense: PreTrainedModel, family: Family, geometry: Geometry, fmt: str) -> Sketch:
    """Return a pruned model, whose empty layers are dropped, as its files describe it: of the class of `dense` where the family's
    config can state its widths or where (format "hf-padded") zeros fill every layer up to the widest, else of an own class. No
    layer is narrower than `least_widths`. Fused projections are still apart (fused.put_together). `geometry`: that of `dense`."""
    config, model_class, weights = pruned.model.config, type(dense), pruned.weights
    groups, channels = least_widths(config, family, fmt)
    heads = groups * geometry.queries_per_kv
    sizes = [
        replace(
            size,
            heads=max(heads, size.heads),
            kv_heads=max(groups, size.kv_heads),
            channels=max(channels, size.channels),
        )
        for size in widths(pruned.model, family)
    ]
    if is_uniform(sizes, geometry.uniform_kv_heads):
        config = stock_config(config, family, sizes[0], geometry.head_dim)
    elif any(size.expert_width for size in sizes) and fmt != "hf":
        raise _experts_of_zeros(fmt)
    elif fmt == "hf-padded":
        config = stock_config(config, family, _widest(sizes, geometry), geometry.head_dim)
    else:
        config = pruned_config(config, family, sizes, geometry.head_dim)
        model_class = pruned_class(family.model_type)
    with torch.device("meta"):
        built = cast(PreTrainedModel, cast(Any, model_class)._from_config(config, dtype=pruned.model.dtype))
    fused.take_apart(built, family)
    lost = pruned.model.state_dict().keys() - built.state_dict().keys()
    assert not lost, f"the saved model has no place for {sorted(lost)}"
    for name, buffer in pruned.model.named_buffers():  # rotary frequencies, factors of layers
        parent, _, attribute = name.rpartition(".")
        setattr(built.get_submodule(parent), attribute, buffer)
    built.tie_weights()
    built.generation_config = copy.deepcopy(pruned.model.generation_config)
    if fmt in ("hf-padded", "vllm"):
        # A KV group of zeros attends to zeros, and an MLP channel of zeros multiplies them: the logits stay the same.
        weights = zero_filled(weights, built, family)
    return Sketch(built.eval().requires_grad_(False), weights)


def surrounded(saved: Sketch, around: Surroundings) -> Sketch:
    """Return a model (of `as_saved`) inside the wrapper that its dense model came in: of the same class where the model is of the
    family's own, else of an own class."""
    whole, text = around.model.config, saved.model.config.to_dict()
    fields, config_class, model_class = _plain(whole), type(whole), type(around.model)
    if "auto_map" in text:
        register()
        model_class = WRAPPERS[whole.model_type]
        config_class = cast(Any, model_class.config_class)
        fields["auto_map"] = auto_map(whole.model_type)
        for name in ("auto_map", "model_file"):  # mlx_lm takes no model out of a wrapper
            text.pop(name, None)
    config = config_class.from_dict(fields | {"text_config": text})
    with torch.device("meta"):
        built = cast(PreTrainedModel, cast(Any, model_class)._from_config(config, dtype=saved.model.dtype))
    built.tie_weights()
    built.generation_config = copy.deepcopy(saved.model.generation_config)
    names = {name_in_wrapper(name): name for name in saved.weights}

    def find(name: str) -> torch.Tensor:
        return saved.weights[names[name]] if name in names else around.weights[name]

    return Sketch(built.eval().requires_grad_(False), LazyWeights({**names, **around.weights}, find))


def least_widths(config: PretrainedConfig, family: Family, fmt: str) -> tuple[int, int]:
    """Return how many KV groups and MLP channels every layer has at least in the files of a format; zeros stand in for lost ones.

    vLLM refuses a layer that does not attend. A lost MLP may leave a bias, on a projection without inputs: at that vLLM divides by
    zero on CPUs, which ends its process.
    """
    groups = int("attention" in family.prunes)
    biased = getattr(config, "mlp_bias", False) or getattr(config, "use_bias", False)  # the latter of ERNIE 4.5
    return (groups, int(biased)) if fmt == "vllm" else (0, 0)


def _widest(sizes: Sequence[LayerWidths], geometry: Geometry) -> LayerWidths:
    """Return the smallest width that the family's config can state and that holds every layer."""
    per_kv = geometry.queries_per_kv
    most = max(size.kv_heads for size in sizes)
    kv_heads = min(count for count in geometry.uniform_kv_heads if count >= most)
    return LayerWidths(kv_heads * per_kv, kv_heads, max(1, *(size.channels for size in sizes)))


def check_experts(fmt: str, shape: str, geometry: Geometry) -> None:
    """Raise UserError where a mixture of experts that is pruned in `shape` has no files of that format."""
    if any(geometry.mixtures) and fmt in ("hf-padded", "vllm") and not shapes.is_uniform(shape):
        raise _experts_of_zeros(fmt)


def _experts_of_zeros(fmt: str) -> UserError:
    return UserError(
        f"format {fmt} is for layers with the same number of experts, as a router would take experts of zeros; search with --shape "
        "uniform, or save the model with --format hf"
    )


def padded_params(plan: PruningPlan, geometry: Geometry) -> int:
    """Return the parameters of the padded model that `plan` leaves, to warn before it is written: norms of dropped layers count,
    too."""
    layers = [
        layer
        for layer, groups in enumerate(plan.kept_groups)
        if groups or plan.kept_channels[layer] or geometry.whole_attention
    ]
    most = max(len(plan.kept_groups[layer]) for layer in layers)
    kv_heads = min(count for count in (*geometry.uniform_kv_heads, max(geometry.kv_heads)) if count >= most)
    channels = max(len(plan.kept_channels[layer]) for layer in layers)
    costs = (kv_heads * geometry.group_cost[layer] + channels * geometry.channel_cost[layer] for layer in layers)
    return geometry.total_params - sum(geometry.layer_params) + sum(costs)


# How large a model is.


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    params              every distinct parameter once: tied embeddings are one
    weight_bytes        the bytes of those parameters
    kv_bytes_per_token  keys and values that one more token leaves in the cache of all layers: 2·K·d numbers a layer. A layer
                        with a sliding window stops growing when its window is full; up to there it costs the same.
    macs_per_token      multiply-accumulates of all projections and the head for one token, i.e. one per weight; of a mixture
                        those of its router and of the experts that it takes. The head counts where it is tied, too;
                        embeddings (a look-up), norms and attention scores (they grow with the context) do not.

    A block without channels left is as one that is gone. Check values for Llama-3-8B in bfloat16: 8,030,261,248 parameters, 131,072
    KV bytes (32 layers x 8 KV heads x 128 x 2 x 2 bytes), 7,504,658,432 MACs.
    """

    params: int
    weight_bytes: int
    kv_bytes_per_token: int  # of one sequence
    macs_per_token: int


def sizes(model: PreTrainedModel, family: Family, around_params: int = 0) -> Sizes:
    """Return the sizes of `model`, whose layers may have lost blocks, with so many parameters of a wrapper around it."""
    params = list(model.parameters())  # each once, however many modules share it
    layers = decoder_layers(model, family)
    mixtures = [mixture for layer in layers if (mixture := family.mixture(layer)) is not None]
    return Sizes(
        params=sum(p.numel() for p in params) + around_params,
        weight_bytes=sum(p.nbytes for p in params) + around_params * model.dtype.itemsize,
        kv_bytes_per_token=sum(
            linear.out_features * linear.weight.dtype.itemsize for layer in layers for linear in family.cached(layer)
        ),
        macs_per_token=sum(part.weight.numel() for part in layers.modules() if isinstance(part, nn.Linear))
        + sum(mixture.weights_used for mixture in mixtures)
        + cast(nn.Linear, model.get_output_embeddings()).weight.numel(),
    )


def size_table(rows: Mapping[str, Sizes]) -> str:
    """Return the sizes of several models in aligned columns, each number with its share of the first row's (the original)."""
    table = [["", *map(row_label, rows)]]
    for title, field in (
        ("parameters", "params"),
        ("cache bytes/token", "kv_bytes_per_token"),
        ("multiply-adds/token", "macs_per_token"),
    ):
        values = [getattr(sizes, field) for sizes in rows.values()]
        table.append([title, *(f"{value:,}" for value in values)])
        table.append(["", *(f"{100 * value / values[0]:.1f}%" if values[0] else "-" for value in values)])
    return "\n".join(aligned(list(zip(*table, strict=True))))


def row_label(name: str) -> str:
    """Return how a person calls a row of `Manifest.sizes`."""
    return {"dense": "original"}.get(name, name)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows in columns: the first `left` flush left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
