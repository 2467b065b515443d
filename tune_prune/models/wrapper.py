"""Models that have the language model of a family inside, beside a vision tower and what joins the two.

Without an image such a model is its language model: that alone is loaded, measured and pruned, as a model of the family's own
class. What stands around it is in the files, counts among the parameters, and is there again when a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from tune_prune.models.families import PRUNED_PREFIX
from tune_prune.models.pruned.configuration_tune_prune import WRAPPER_CONFIGS
from tune_prune.models.runner.layer_weights import Weights
from tune_prune.models.stored_experts import stored_tensors

INSIDE = "model.language_model."  # what the names of the language model's parameters begin with in a wrapper
_ALONE = "model."  # and in that model by itself; its output head is lm_head in both


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What stands around a language model: `model` is the whole, on the meta device; `weights` those of its parameters that are
    outside the language model, read when they are asked for; `stored` what all its parameters are called in its files."""

    model: PreTrainedModel
    weights: Weights
    stored: Mapping[str, str]

    @property
    def params(self) -> int:
        """Return the number of parameters outside the language model."""
        return outside_params(self.model)


def is_wrapper(config: PretrainedConfig) -> bool:
    return config.model_type.removeprefix(PRUNED_PREFIX) in WRAPPER_CONFIGS


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model: a wrapper's text_config, of others that itself."""
    return config.text_config if is_wrapper(config) else config


def outside(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the stored tensors of a wrapper that are not its language model's, by name."""
    head = {id(p) for p in model.get_output_embeddings().parameters()}
    return {name: p for name, p in stored_tensors(model) if not name.startswith(INSIDE) and id(p) not in head}


def outside_params(model: PreTrainedModel) -> int:
    """Return the number of parameters of a wrapper that are not its language model's."""
    return sum(p.numel() for p in outside(model).values() if isinstance(p, nn.Parameter))


def name_in_wrapper(name: str) -> str:
    """Return what a parameter of the language model is called in the wrapper."""
    return f"{INSIDE}{name.removeprefix(_ALONE)}" if name.startswith(_ALONE) else name
