"""Makes transformers load pruned checkpoints without code from the checkpoint; `import tune_prune` arranges for it."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tune_prune.models.pruned import configuration_tune_prune, modeling_tune_prune

# The class file for mlx_lm, beside the weights; config.json names it as its model_file.
MODEL_FILE = "mlx_tune_prune.py"
# model_type of the dense family -> the stem of its class names
STEMS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
}


def register() -> None:
    """Let AutoConfig, AutoModel and AutoModelForCausalLM know the classes of every family, and take their files along when models
    are saved. May be called again."""
    for stem in STEMS.values():
        config = getattr(configuration_tune_prune, f"Pruned{stem}Config")
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class("AutoConfig")
        for auto, suffix in ((AutoModel, "Model"), (AutoModelForCausalLM, "ForCausalLM")):
            model = getattr(modeling_tune_prune, f"Pruned{stem}{suffix}")
            auto.register(config, model, exist_ok=True)
            model.register_for_auto_class(auto.__name__)


def auto_map(model_type: str) -> dict[str, str]:
    """Return the auto_map entries of a checkpoint's config.json for a dense family."""
    stem = STEMS[model_type]
    return {
        "AutoConfig": f"configuration_tune_prune.Pruned{stem}Config",
        "AutoModel": f"modeling_tune_prune.Pruned{stem}Model",
        "AutoModelForCausalLM": f"modeling_tune_prune.Pruned{stem}ForCausalLM",
    }
