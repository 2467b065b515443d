"""The ways in which a pass can hold a model, all of which must give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import VARIANTS
from tune_prune.models import fused
from tune_prune.models.families import FAMILIES
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.models.stored_experts import stored_buffers

# What passes over layers depends on little of a family: the variants that have most in them, biases, windows and what layers are
# given by others.
FEW = [("llama-biases", torch.bfloat16), ("qwen2-sliding", torch.float32), ("gemma4_text", torch.float32)]
# Every variant in the type of CPUs, and in the others these two.
CASES = [(variant, torch.float32) for variant in VARIANTS]
CASES += [
    (variant, dtype) for variant in ("llama-biases", "qwen2-sliding") for dtype in (torch.float64, torch.bfloat16)
]
WAYS = ("resident", "by layer", "streamed", "streamed in blocks", "spilled")


def in_way(model: PreTrainedModel, way: str) -> tuple[PreTrainedModel, Residency]:
    """The model as a pass gets it, and where its weights and hidden states are."""
    if way == "resident":
        return model, RESIDENT
    if way == "by layer":
        return model, replace(RESIDENT, gradients_by_layer=True, states="host")
    with init_empty_weights(include_buffers=False):
        empty = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    empty.tie_weights()
    for name, buffer in stored_buffers(empty).items():
        buffer.copy_(model.get_buffer(name))
    fused.take_apart(empty, FAMILIES[model.config.model_type])
    residency = Residency(dict(model.state_dict()), model.device)
    if way == "spilled":
        residency = replace(residency, states="file")
    if way == "streamed in blocks":
        residency = replace(residency, block_tokens=40)
    return empty.eval().requires_grad_(False), residency


class Counted(Mapping[str, torch.Tensor]):
    """Weights that remember what was asked of them."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)
