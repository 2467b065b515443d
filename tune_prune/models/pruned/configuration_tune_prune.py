"""Configs of models that tune_prune has made smaller: the family's own, with sizes that differ from layer to layer.

`per_layer_config` says what a layer has instead of the sizes at the top level, which stay those of the dense model:
num_attention_heads, num_key_value_heads, intermediate_size (or shared_intermediate_size; or num_local_experts and
moe_intermediate_size, of Mixtral intermediate_size), and `skip`, a list of the blocks that it has lost ("attention", "mlp").

This file and modeling_tune_prune.py lie in every such checkpoint, and need transformers (5.10 or later) only.
"""

from __future__ import annotations

import copy
from typing import Any

import transformers
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

# model_type of the dense family -> what its classes' names in transformers begin with
STEMS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "phi3": "Phi3",
    "glm4": "Glm4",
    "gemma": "Gemma",
    "gemma3_text": "Gemma3Text",
    "gemma4_text": "Gemma4Text",
    "gemma4_unified_text": "Gemma4UnifiedText",
    "internlm3": "InternLM3",
    "seed_oss": "SeedOss",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "ernie4_5": "Ernie4_5",
    "cwm": "Cwm",
    "ministral": "Ministral",
    "olmo": "Olmo",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "exaone4": "Exaone4",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "qwen3_5_text": "Qwen3_5Text",
    "lfm2": "Lfm2",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
}

# The same of models that have such a language model inside, beside a vision tower.
WRAPPER_STEMS = {
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "gemma4_unified": "Gemma4Unified",
    "mistral3": "Mistral3",
    "qwen3_5": "Qwen3_5",
}

SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
SKIPPED = ("attention", "mlp")


class PrunedConfig(PreTrainedConfig):
    """What the configs of all families share."""

    def layer_config(self, index: int) -> PreTrainedConfig:
        """The family's config as layer `index` has it; its list `skip` names the blocks that are not there."""
        layers: Any = getattr(self, "per_layer_config", {})
        if not isinstance(layers, dict):  # transformers from 5.16 on resolves them itself
            return layers[index]
        config = copy.copy(self)
        config.skip = []
        for name, value in {int(at): own for at, own in layers.items()}.get(index, {}).items():
            setattr(config, name, value)
        return config

    def validate_rope(self) -> None:
        """Called by `strict`. The dense model's config was checked; the check of longrope divides by the number of heads, which
        differs between layers."""

    def validate_architecture(self) -> None:
        """Called by `strict`, in place of checks that know one size for all layers. Raises ValueError."""
        for index in range(self.num_hidden_layers):
            layer = self.layer_config(index)
            skip = getattr(layer, "skip", [])
            if not set(skip) <= set(SKIPPED):
                raise ValueError(f"layer {index} skips {skip}; it can skip {' and '.join(SKIPPED)}")
            sizes = [getattr(layer, name) for name in SIZES]
            if min(sizes) < 1 or sizes[0] % sizes[1]:
                raise ValueError(f"layer {index} has {dict(zip(SIZES, sizes, strict=True))}; heads must share evenly")


def _config_class(model_type: str, stem: str) -> type[PrunedConfig]:
    base = getattr(transformers, f"{stem}Config")
    fields = {"model_type": f"tune_prune_{model_type}", "__module__": __name__}
    return strict(type(f"Pruned{stem}Config", (PrunedConfig, base), fields))


# PrunedLlamaConfig and so on, of the families that the installed transformers has.
CONFIGS = {
    model_type: _config_class(model_type, stem)
    for model_type, stem in STEMS.items()
    if hasattr(transformers, f"{stem}Config")
}


def _wrapper_config_class(model_type: str, stem: str) -> type[PreTrainedConfig]:
    base: Any = getattr(transformers, f"{stem}Config")

    def __post_init__(self: Any, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):  # of a type that transformers need not know
            dense = self.text_config["model_type"].removeprefix("tune_prune_")
            self.text_config = CONFIGS[dense].from_dict(self.text_config)
        base.__post_init__(self, **kwargs)

    fields = {"model_type": f"tune_prune_{model_type}", "__post_init__": __post_init__, "__module__": __name__}
    return strict(type(f"Pruned{stem}Config", (base,), fields))


# PrunedMistral3Config and so on: a pruned config as its text_config.
WRAPPER_CONFIGS = {
    model_type: _wrapper_config_class(model_type, stem)
    for model_type, stem in WRAPPER_STEMS.items()
    if hasattr(transformers, f"{stem}Config")
}
globals().update({config.__name__: config for config in (*CONFIGS.values(), *WRAPPER_CONFIGS.values())})
