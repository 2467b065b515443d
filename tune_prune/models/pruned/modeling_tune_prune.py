"""Models that tune_prune has made smaller: the installed classes of transformers with layers of different widths.

Nothing is computed here but what a removed block leaves behind. Every layer is the family's own, built with its own sizes
(configuration_tune_prune.py), so that generation, caches, attention kernels, adapters and device maps work as they do
for the family.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)     # or without it after `import tune_prune`

Of models that read images, too, the language model inside is such a model: AutoModelForImageTextToText.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .configuration_tune_prune import CONFIGS, SIZES, STEMS, WRAPPER_CONFIGS, WRAPPER_STEMS, PrunedConfig

if TYPE_CHECKING:
    # Never imported. Whenever a model is saved, transformers copies the files that its class file imports beside the weights, and
    # mlx_lm needs this one there.
    from .mlx_tune_prune import Model  # noqa: F401

# What a layer can skip: the module's name in it, and the projection whose bias stays.
BLOCKS = {"attention": ("self_attn", "o_proj"), "mlp": ("mlp", "down_proj")}
# The same of the MLP in families that call it otherwise, by the model_type of the dense family.
MLPS = {
    "lfm2": ("feed_forward", "w2"),
    "falcon_h1": ("feed_forward", "down_proj"),
    "granitemoehybrid": ("shared_mlp", "output_linear"),
}
# What the models' classes of a family begin with, where its config alone has a class of its own.
MODELS = {"InternLM3": "Llama"}


def _bias_only_linear(bias: nn.Parameter) -> nn.Linear:
    """A projection that has lost all its inputs: what it gives is its bias. Linear, so that adapters accept it by name."""
    projection = nn.Linear(1, 1, device="meta")  # replaced at once; the initialisation of no elements would warn
    projection.in_features, projection.out_features = 0, bias.numel()
    projection.weight = nn.Parameter(bias.detach().new_empty(bias.numel(), 0), requires_grad=bias.requires_grad)
    projection.bias = bias
    return projection


class RemovedBlock(nn.Module):
    """What is left of a block whose parts are all gone: nothing, or the bias of its last projection, under its old name.

    It leaves the cache alone. `kind` is "attention" or "mlp"; `block` is what it stands for.
    """

    def __init__(self, kind: str, bias: nn.Parameter | None, block: nn.Module | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.scale = getattr(block, "down_multiplier", 1.0)  # of Falcon-H1
        if bias is not None:
            setattr(self, BLOCKS[kind][1], _bias_only_linear(bias))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        """hidden_states [batch, time, H] -> what the block would add, same shape; attention gives (that, no weights)."""
        projection = getattr(self, BLOCKS[self.kind][1], None)
        output = torch.zeros_like(hidden_states) if projection is None else projection(hidden_states[..., :0])
        output = output if self.scale == 1 else output * self.scale
        return (output, None) if self.kind == "attention" else output


class LayerConfig:
    """A model's config with the sizes of one layer, for attentions that cut a fused projection apart by them. All else is the
    model's own, so that the choice of the attention kernel reaches it later, too."""

    def __init__(self, config: Any, **sizes: int) -> None:
        self.__dict__.update(of_model=config, **sizes)

    def __getattr__(self, name: str) -> Any:
        if name == "of_model":  # asked for by `copy`, before it is there
            raise AttributeError(name)
        return getattr(self.of_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.of_model, name, value)


def _one_layer(config: PrunedConfig) -> Any:
    """A copy of `config` with one layer of the dense sizes, which the family's own class can build."""
    plain = copy.copy(config)
    plain.__dict__.pop("_heterogeneity_spec", None)  # where transformers keeps per_layer_config
    if hasattr(config, "num_kv_shared_layers"):  # Gemma 4's decoder counts its layers, and knows their heads
        layers = map(config.layer_config, range(config.num_hidden_layers))
        heads = ("head_dim", "num_key_value_heads")
        plain.per_layer_config = {at: {name: getattr(own, name) for name in heads} for at, own in enumerate(layers)}
        plain.intermediate_size = 1
    else:
        plain.num_hidden_layers = 1
    return plain


def _put_layers(decoder: Any, config: PrunedConfig) -> None:
    """Give a decoder that was built by `_one_layer` the layers and the config that it is meant to have."""
    # Chosen by PreTrainedModel's constructor.
    config._attn_implementation = decoder.config._attn_implementation
    config._experts_implementation = decoder.config._experts_implementation
    layer_class = type(decoder.layers[0])
    layers = [_pruned_layer(layer_class, config, index) for index in range(config.num_hidden_layers)]
    if any(experts.down_proj.shape[2] % 8 for experts in map(_experts, layers) if experts is not None):
        config._experts_implementation = "eager"  # the usual kernel takes rows of multiples of 16 bytes
    stored = decoder.layers[0].state_dict()
    for name, buffer in decoder.layers[0].named_buffers():  # those of Falcon-H1's mixers are the model's to give
        for mixer in (layer.get_submodule(name.rpartition(".")[0]) for layer in layers if name not in stored):
            mixer.register_buffer(name.rpartition(".")[2], buffer.clone(), persistent=False)
    decoder.layers = nn.ModuleList(layers)
    decoder.config = (
        config  # rotary_emb keeps the other: yarn and dynamic read heads, which no model of several widths has
    )
    decoder.post_init()


def _experts(layer: nn.Module) -> Any:
    """The stacked experts of a layer; None of a plain MLP, or none."""
    return getattr(getattr(layer, "mlp", None), "experts", None)


def _pruned_layer(layer_class: type, config: PrunedConfig, index: int) -> nn.Module:
    own = config.layer_config(index)
    skip = getattr(own, "skip", ())
    layer = layer_class(own, index)
    blocks = BLOCKS | {"mlp": MLPS.get(config.model_type.removeprefix("tune_prune_"), BLOCKS["mlp"])}
    for kind, (name, output) in blocks.items():
        if kind in skip:
            block = layer.get_submodule(name)
            setattr(layer, name, RemovedBlock(kind, getattr(block, output).bias, block))
    if "attention" not in skip and getattr(layer, "self_attn", None) is not None:
        layer.self_attn.config = config  # so that the choice of the attention kernel reaches it later, too
        if hasattr(layer.self_attn, "qkv_proj"):
            layer.self_attn.config = LayerConfig(config, **{name: getattr(own, name) for name in SIZES})
    if (experts := _experts(layer)) is not None:
        experts.config = config  # and that of the experts' kernel
    return layer


def _put_decoder(model: Any, config: PrunedConfig, decoder_class: type[PreTrainedModel]) -> None:
    """The same for a language model that was built by `_one_layer`."""
    config._attn_implementation = {"": model.config._attn_implementation}  # that of its towers is theirs
    config._experts_implementation = model.config._experts_implementation
    model.config = config
    model.model = decoder_class(config)
    model.post_init()


def _pruned(name: str, base: Any, config_class: Any, __init__: Any, **methods: Any) -> type[PreTrainedModel]:
    fields = {"config_class": config_class, "__init__": __init__, "__module__": __name__, **methods}
    return type(f"Pruned{name}", (base,), fields)


def _decoder_class(stem: str, config_class: type[PrunedConfig]) -> type[PreTrainedModel]:
    base = getattr(transformers, f"{MODELS.get(stem, stem)}Model")

    def __init__(self, config: PrunedConfig) -> None:
        base.__init__(self, _one_layer(config))
        _put_layers(self, config)

    def _init_weights(self, module: nn.Module) -> None:
        base._init_weights(self, module)
        if hasattr(module, "mup_vector"):
            # Falcon-H1's decoder gives it to its mixers; transformers passes over one whose code came with its checkpoint.
            base._init_weights(self, self)

    return _pruned(f"{stem}Model", base, config_class, __init__, _init_weights=_init_weights)


def _language_model_class(stem: str, decoder_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    # Of a model that others wrap, the part without its head alone is called a text model.
    stem = stem.removesuffix("Text")
    base = getattr(transformers, f"{MODELS.get(stem, stem)}ForCausalLM")

    def __init__(self, config: PrunedConfig) -> None:
        base.__init__(self, _one_layer(config))
        _put_decoder(self, config, decoder_class)

    return _pruned(f"{stem}ForCausalLM", base, decoder_class.config_class, __init__)


# PrunedLlamaModel, PrunedLlamaForCausalLM and so on, by the model_type of the dense family. No constructor's `self` has a type, as
# vLLM holds the config against the annotation of the first parameter.
DECODERS = {model_type: _decoder_class(STEMS[model_type], config) for model_type, config in CONFIGS.items()}
LANGUAGE_MODELS = {
    model_type: _language_model_class(STEMS[model_type], model) for model_type, model in DECODERS.items()
}


def _dense_inside(config: Any) -> Any:
    """A copy of a wrapper's `config` whose text_config is the dense family's, of one layer: the wrapper's own class builds it."""
    plain, text = copy.copy(config), _one_layer(config.text_config)
    text.__class__ = type(config.text_config).__bases__[1]
    plain.text_config = text
    return plain


def _wrapped_decoder_class(stem: str, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    base = getattr(transformers, f"{stem}Model")

    def __init__(self, config: Any) -> None:
        base.__init__(self, _dense_inside(config))
        self.language_model = DECODERS[config.text_config.model_type.removeprefix("tune_prune_")](config.text_config)
        self.config = config
        self.post_init()

    return _pruned(f"{stem}Model", base, config_class, __init__)


def _wrapper_class(stem: str, decoder_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    base = getattr(transformers, f"{stem}ForConditionalGeneration")

    def __init__(self, config: Any) -> None:
        base.__init__(self, _dense_inside(config))
        _put_decoder(self, config, decoder_class)

    return _pruned(f"{stem}ForConditionalGeneration", base, decoder_class.config_class, __init__)


# PrunedMistral3Model, PrunedMistral3ForConditionalGeneration and so on, by the model_type of the dense wrapper.
WRAPPED_DECODERS = {
    model_type: _wrapped_decoder_class(WRAPPER_STEMS[model_type], config)
    for model_type, config in WRAPPER_CONFIGS.items()
}
WRAPPERS = {
    model_type: _wrapper_class(WRAPPER_STEMS[model_type], model) for model_type, model in WRAPPED_DECODERS.items()
}
_ALL = (*DECODERS.values(), *LANGUAGE_MODELS.values(), *WRAPPED_DECODERS.values(), *WRAPPERS.values())
globals().update({model.__name__: model for model in _ALL})
