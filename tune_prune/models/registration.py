"""Makes transformers load pruned checkpoints without code from the checkpoint; `import tune_prune` arranges for it."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from tune_prune.models.pruned.configuration_tune_prune import CONFIGS, WRAPPER_CONFIGS
from tune_prune.models.pruned.modeling_tune_prune import DECODERS, LANGUAGE_MODELS, WRAPPED_DECODERS, WRAPPERS

# The class file for mlx_lm, beside the weights; config.json names it as its model_file.
MODEL_FILE = "mlx_tune_prune.py"
# The families that it computes; it would run others wrongly.
MLX_FAMILIES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "granite", "phi3", "glm4", "gemma", "gemma3_text",
)  # fmt: skip
MLX_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # as in that file

# The classes of each kind of model: of its config, and of its models by the auto class that loads them.
_KINDS = (
    (CONFIGS, {AutoModel: DECODERS, AutoModelForCausalLM: LANGUAGE_MODELS}),
    (WRAPPER_CONFIGS, {AutoModel: WRAPPED_DECODERS, AutoModelForImageTextToText: WRAPPERS}),
)


def register() -> None:
    """Let the auto classes of transformers know the classes of every family and wrapper, and take their files along when models
    are saved. May be called again."""
    for configs, by_auto in _KINDS:
        for model_type, config in configs.items():
            AutoConfig.register(config.model_type, config, exist_ok=True)
            config.register_for_auto_class("AutoConfig")
            for auto, models in by_auto.items():
                auto.register(config, models[model_type], exist_ok=True)
                models[model_type].register_for_auto_class(auto.__name__)


def auto_map(model_type: str) -> dict[str, str]:
    """Return the auto_map entries of a checkpoint's config.json for a dense family or wrapper."""
    configs, by_auto = next(kind for kind in _KINDS if model_type in kind[0])
    models = {auto.__name__: f"modeling_tune_prune.{of[model_type].__name__}" for auto, of in by_auto.items()}
    return {"AutoConfig": f"configuration_tune_prune.{configs[model_type].__name__}", **models}
