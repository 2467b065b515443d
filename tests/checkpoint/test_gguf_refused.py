"""Models that llama.cpp cannot represent: each is refused in a sentence, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gguf_reading import LLAMA3, YARN, family_of, pruned
from tune_prune.checkpoint.gguf.architecture import ARCHITECTURES, choose_architecture
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.core.errors import UserError
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.surgery import Sketch

ROTATED = {"no_rope_layers": [1, 1, 1, 0]}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "untied Qwen3": ("qwen3", "widths", {}, r"openelm has no output head of its own.*--shape uniform, or .*--format hf"),
    "biased Qwen3": ("qwen3-biases-tied", "dense", {}, r"qwen3 has no place for biases of key, output, query, value proj"),
    "sliding Mistral": ("mistral-sliding", "dense", {}, r"sliding_window is 5, less than max_position_embeddings \(64\)"),
    "sliding Qwen2": ("qwen2-sliding", "widths", {}, r"sliding_window is 5, .*attend to everything; save .* hf-padded"),
    "SmolLM3 whose layers differ": ("smollm3", "widths", ROTATED, r"smollm3 has one width .*search with --shape uniform, or"),
    "SmolLM3 with biases": ("smollm3", "uniform", ROTATED | {"attention_bias": True}, r"smollm3 has no place for biases of key"),
    "other layers without rotary embedding": ("smollm3", "dense", {}, r"no_rope_layers is \[1, 1, 0, 1\], and its graph leaves"),
    "a layer of SmolLM3 dropped": ("smollm3", "layer dropped", ROTATED, r"no_rope_layers is \[1, 1, 0\], .*every 4th layer and no"),
    "a part of each head": ("phi3-window-partial", "dense", {"sliding_window": None}, r"partial_rotary_factor of .* is 0\.7,"),
    "longrope": ("phi3-longrope-tied", "dense", {}, "rope_type is 'longrope', its graphs for this family support default"),
    "a scale of 0": ("granite", "dense", {"logits_scaling": 0.0}, r"logits_scaling is 0\.0; its graph has no scales, and"),
    "a scale below 0": ("granite", "widths", {"residual_multiplier": -0.5}, r"is -0\.5; .* one between 1e-06 and 1e\+06"),
    "Ministral-3 whose layers differ": ("ministral3", "widths", {}, r"mistral3 has one width .*search with --shape uniform, or"),
    "sliding Ministral-3": ("ministral3-sliding-tied", "dense", {}, r"sliding_window is 5, less than"),
    "queries scaled by position without yarn": ("ministral3", "dense", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.3}},
        r"queries are scaled by their position .* for 'yarn' alone"),
    "activation": ("llama", "dense", {"hidden_act": "gelu"}, r"hidden_act is 'gelu', its graphs support only 'silu'"),
    "dynamic rope": ("llama", "dense", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
                     r"rope_type is 'dynamic', its graphs for this family support default, linear, llama3, yarn"),
    "yarn with other ramps": ("llama", "dense", {"rope_parameters": YARN | {"beta_fast": 16.0}}, r"beta_fast .* is 16\.0, .* 32"),
    "llama3 rope in Qwen3": ("qwen3", "dense", {"rope_parameters": LLAMA3}, r"does not read the frequency factors of rope_type"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_represented_is_refused(what: str, tmp_path: Path):
    variant, shape, overrides, message = REFUSED[what]
    sketch = Sketch.of(pruned(variant, shape, **overrides))
    with pytest.raises(UserError, match=message):
        write_gguf(sketch, family_of(variant), tmp_path, tmp_path / "model.gguf", torch.float32)
    assert not list(tmp_path.iterdir())


def test_unknown_parameters_are_refused():
    model = pruned("llama")
    model.model.layers[1].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"no place for the parameter 'mlp\.extra\.weight' of layer 1"):
        choose_architecture(model, FAMILIES["llama"])
    model = pruned("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(UserError, match="no place for the bias of the output head"):
        choose_architecture(model, FAMILIES["llama"])


def test_a_family_without_an_architecture_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(ARCHITECTURES, "granite")
    with pytest.raises(
        UserError, match=r"written of llama, mistral, .* models, and this is a granite model; save it with "
    ):
        choose_architecture(pruned("granite"), FAMILIES["granite"])
