"""GGUF files: llama.cpp itself predicts as the model does. That arrays are the model's is tests/models/test_gguf_models.py's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.gguf_reading import (
    LLAMA3,
    SHAPES,
    YARN,
    File,
    LlamaCpp,
    family_of,
    pruned,
)
from tests.models.conftest import tokenizer
from tune_prune.checkpoint.gguf.architecture import ARCHITECTURES
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.surgery import Sketch

# Six layers are needed for one that attends to everything, and the windows are shorter than the prompt.
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 6,
}

# Fields of the configs with which llama.cpp can say the variant at all, by name of the case.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama-biases", {}),
    "llama-tied": ("llama-tied", {}),
    "mistral": ("mistral", {}),
    "ministral3": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
    "qwen2": ("qwen2", {}),
    "qwen2-heads-fill-hidden": ("qwen2", {"head_dim": 4}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "yarn-rope": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 2.0}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "granite": ("granite", {"rms_norm_eps": 0.05}),
    "granite-biases-tied": ("granite-biases-tied", {"rms_norm_eps": 0.05}),
    "phi3": ("phi3", {}),
    "gemma-tied": ("gemma", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-tied-linear-rope": (
        "gemma3_text",
        GEMMA3
        | {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "seed_oss": ("seed_oss", {}),
    "ministral": ("ministral", {"sliding_window": 64}),
    "ernie4_5": ("ernie4_5", {}),
}
ONE_WIDTH = ("smollm3", "ministral3", "gemma-tied", "gemma3", "gemma3-tied-linear-rope")
# Every case in two shapes, and the architectures that state every layer in all of them.
WHOLE = ("llama-biases", "qwen3-tied", "granite-biases-tied")
WRITTEN = [(case, shape) for case in CASES for shape in ("dense", "uniform" if case in ONE_WIDTH else "widths")]
WRITTEN = list(dict.fromkeys([*WRITTEN, *((case, shape) for case in WHOLE for shape in SHAPES)]))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer small enough for the tiny models."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer that llama.cpp has."""
    return tokenizer(tmp_path_factory.mktemp("bytes"), pre_tokenizers.ByteLevel(add_prefix_space=False))


@pytest.fixture
def write(words: Path, tmp_path: Path) -> Callable[..., File]:
    def run(variant: str, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> File:
        notes = write_gguf(Sketch.of(model), family_of(variant), words, tmp_path / "model.gguf", dtype, "a name")
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
        return File(tmp_path / "model.gguf", notes)

    return run


class HalfGelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.half().double(), approximate="tanh").half().double()


@pytest.mark.parametrize(("case", "shape"), WRITTEN)
def test_llama_cpp_predicts_as_the_model(case: str, shape: str, byte_level: Path, tmp_path: Path):
    """A prompt at once, then token by token."""
    variant, overrides = CASES[case]
    vocabulary, then, times = 272, 5, 4
    model = pruned(variant, shape, vocab_size=vocabulary, **overrides)
    write_gguf(Sketch.of(model), family_of(variant), byte_level, tmp_path / "model.gguf", torch.float32)
    tolerance = 2e-5
    if "gemma" in case:
        # On CPUs llama.cpp looks GELU up in a table of half precision, where a number may fall on the other side of a step.
        tolerance = 1e-3
        for layer in model.model.layers:
            layer.mlp.act_fn = HalfGelu()
    ids = torch.randint(262, (1, 24), generator=torch.Generator().manual_seed(2))
    whole = torch.cat([ids, torch.full((1, times), then)], dim=1)
    expected = torch.log_softmax(model(whole).logits[0, -times - 1 :], dim=-1).numpy()
    found = LlamaCpp(tmp_path / "model.gguf").log_probabilities(ids[0].tolist(), then, times, vocabulary)
    np.testing.assert_allclose(found, expected, atol=tolerance)


ARCHITECTURE_OF = {
    ("llama", "uniform"): "llama",
    ("mistral", "no attention"): "deci",
    ("qwen2", "dense"): "deci",  # 48 query rows on a hidden size of 32
    ("qwen2-heads-fill-hidden", "dense"): "qwen2",
    ("qwen2-heads-fill-hidden", "uniform"): "deci",
    ("qwen3-tied", "uniform"): "qwen3",
    ("qwen3-tied", "no MLP"): "openelm",
    ("smollm3", "uniform"): "smollm3",
    ("ministral3", "uniform"): "mistral3",
    ("granite", "uniform"): "llama",
    ("granite-biases-tied", "no attention"): "deci",
    ("phi3", "uniform"): "llama",
    ("phi3", "widths"): "deci",
}


@pytest.mark.parametrize(("case", "shape"), ARCHITECTURE_OF)
def test_stock_architecture_where_it_fits(case: str, shape: str, write: Callable[..., File]):
    variant, overrides = CASES[case]
    file = write(variant, pruned(variant, shape, **overrides))
    assert file.architecture == ARCHITECTURE_OF[case, shape]
    said = [note for note in file.notes if f"llama.cpp reads it as architecture {file.architecture}, " in note]
    assert len(said) == (file.architecture in ("deci", "openelm"))  # layers that differ: who else reads that?


def test_families_have_an_architecture_for_layers_alike_and_most_have_one_for_others():
    assert set(ARCHITECTURES) <= set(FAMILIES)
    assert {family_of(variant).model_type for variant, _ in CASES.values()} == set(ARCHITECTURES) - {"qwen3_moe"}
    assert not any(known[0].per_layer for known in ARCHITECTURES.values())
    one_width = {CASES[case][0] for case in ONE_WIDTH} | {"qwen3_moe"}
    assert {name for name, known in ARCHITECTURES.items() if not known[-1].per_layer} == one_width


def test_half_precision_is_of_matrices_only(write: Callable[..., File]):
    model = pruned("llama-biases")
    for name, dtype, file_type in (("F16", torch.float16, 1), ("BF16", torch.bfloat16, 32)):
        file = write("llama-biases", model, dtype)
        assert file.meta["general.file_type"] == file_type
        assert {name for name, kind in file.types.items() if kind == "F32"} == {
            name for name, values in file.tensors.items() if values.ndim == 1
        }
        assert file.types["blk.1.ffn_up.weight"] == name
        up = model.model.layers[1].mlp.up_proj
        np.testing.assert_array_equal(file.tensors["blk.1.ffn_up.weight"], up.weight.to(dtype).float().numpy())
        np.testing.assert_array_equal(file.tensors["blk.1.ffn_up.bias"], up.bias.float().numpy())
