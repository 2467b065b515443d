"""Makes transformers load pruned checkpoints without code from the checkpoint; `import tune_prune` arranges for it."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tune_prune.models.pruned.configuration_tune_prune import CONFIGS
from tune_prune.models.pruned.modeling_tune_prune import DECODERS, LANGUAGE_MODELS

# The class file for mlx_lm, beside the weights; config.json names it as its model_file.
MODEL_FILE = "mlx_tune_prune.py"


def register() -> None:
    """Let AutoConfig, AutoModel and AutoModelForCausalLM know the classes of every family, and take their files along when models
    are saved. May be called again."""
    for model_type, config in CONFIGS.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class("AutoConfig")
        for auto, models in ((AutoModel, DECODERS), (AutoModelForCausalLM, LANGUAGE_MODELS)):
            auto.register(config, models[model_type], exist_ok=True)
            models[model_type].register_for_auto_class(auto.__name__)


def auto_map(model_type: str) -> dict[str, str]:
    """Return the auto_map entries of a checkpoint's config.json for a dense family."""
    return {
        "AutoConfig": f"configuration_tune_prune.{CONFIGS[model_type].__name__}",
        "AutoModel": f"modeling_tune_prune.{DECODERS[model_type].__name__}",
        "AutoModelForCausalLM": f"modeling_tune_prune.{LANGUAGE_MODELS[model_type].__name__}",
    }
