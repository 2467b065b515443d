"""GGUF files against two truths: every array is the model's, and llama.cpp itself predicts as the model does."""

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
    HEAD_DIM,
    HIDDEN,
    LLAMA3,
    PAIRED,
    QUERIES_PER_KV,
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
from tune_prune.core.errors import UserError
from tune_prune.models.families import FAMILIES, Family
from tune_prune.pruning.surgery import Sketch

# Fields of the configs with which llama.cpp can say the variant at all, by name of the case.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama-biases", {}),
    "llama-tied": ("llama-tied", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-heads-fill-hidden": ("qwen2", {"head_dim": 4}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "yarn-rope": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 2.0}}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "granite": ("granite", {"rms_norm_eps": 0.05}),
    "granite-biases-tied": ("granite-biases-tied", {"rms_norm_eps": 0.05}),
}
WRITTEN = [(case, shape) for case in CASES for shape in SHAPES if case != "smollm3" or shape in ("dense", "uniform")]


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


def as_transformers_has_it(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of q or k with neighbours that turn together, sorted back so that they lie half a head apart."""
    back = np.empty_like(rows)
    for row in range(len(rows)):
        head, place = divmod(row, head_dim)
        back[head * head_dim + place // 2 + (place % 2) * (head_dim // 2)] = rows[row]
    return back


def expected_tensors(model: PreTrainedModel, family: Family, architecture: str) -> dict[str, np.ndarray]:
    """The tensors that the file must have, rows of q and k in transformers' order, from the model's parameters."""
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    found = {}
    moved: list[tuple[int, np.ndarray]] = []  # output biases of attention that is gone
    for name, p in model.named_parameters():
        values = p.detach().to(torch.float32).numpy()
        if not name.startswith("model.layers."):
            found[whole.get(name, "output.weight")] = values
            continue
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        if module == "self_attn.o_proj" and not hasattr(model.model.layers[int(index)].self_attn, "q_proj"):
            moved += [(int(index) - 1, values)] if kind == "bias" else []
        else:
            found[f"blk.{index}.{names[module]}.{kind}"] = values
    for index, layer in enumerate(model.model.layers):
        at = f"blk.{index}"
        if not hasattr(layer.mlp, "gate_proj"):
            found[f"{at}.ffn_gate.weight"] = found[f"{at}.ffn_up.weight"] = np.zeros((32, HIDDEN), np.float32)
            found[f"{at}.ffn_down.weight"] = np.zeros((HIDDEN, 32), np.float32)
        if architecture == "openelm":
            parts = [found.pop(f"{at}.attn_{name}.weight", np.zeros((HEAD_DIM, HIDDEN), np.float32)) for name in "qkv"]
            found[f"{at}.attn_qkv.weight"] = np.concatenate(parts)
            if not hasattr(layer.self_attn, "q_proj"):
                found[f"{at}.attn_output.weight"] = np.zeros((HIDDEN, HEAD_DIM), np.float32)
                found[f"{at}.attn_q_norm.weight"] = found[f"{at}.attn_k_norm.weight"] = np.ones(HEAD_DIM, np.float32)
        elif not hasattr(layer.self_attn, "q_proj"):
            del found[f"{at}.attn_norm.weight"]
    for index, bias in moved:
        found[f"blk.{index}.ffn_down.bias"] = bias + found.get(f"blk.{index}.ffn_down.bias", np.float32(0))
    return found


def granite_scales(model: PreTrainedModel) -> dict[str, float]:
    """What arrays of a file are multiplied by, of a model with Granite's multipliers: its residual stream is divided by the
    residual multiplier, so that what layers add is as it was."""
    if model.config.model_type != "granite":
        return {}
    config, d = model.config, model.model.layers[0].self_attn.head_dim
    embedding = config.embedding_multiplier / config.residual_multiplier
    found = {
        f"blk.{index}.attn_q.{kind}": config.attention_multiplier * d**0.5
        for index, layer in enumerate(model.model.layers)
        if hasattr(layer.self_attn, "q_proj")
        for kind in (("weight", "bias") if config.attention_bias else ("weight",))
    }
    tied = embedding if config.tie_word_embeddings else 1
    return found | {"token_embd.weight": embedding, "output_norm.weight": 1 / config.logits_scaling / tied}


@pytest.mark.parametrize(("case", "shape"), WRITTEN)
def test_every_array_is_the_model_s_and_sizes_are_those_of_the_modules(
    case: str, shape: str, write: Callable[..., File]
):
    variant, overrides = CASES[case]
    model = pruned(variant, shape, **overrides)
    file = write(variant, model)
    expected = expected_tensors(model, family_of(variant), file.architecture)
    if case == "llama3-rope":
        plain = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        expected["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        assert expected["rope_freqs.weight"].max() == pytest.approx(8)
    scaled = granite_scales(model)
    for name, factor in scaled.items():
        expected[name] = expected[name] * np.float64(factor)
    if case == "llama3-rope":
        scaled["rope_freqs.weight"] = 1.0
    assert set(file.tensors) == set(expected)
    assert set(file.types.values()) == {"F32"}
    for name, values in expected.items():
        read = file.tensors[name]
        if file.architecture in PAIRED and name.split(".")[-2] in ("attn_q", "attn_k"):
            read = as_transformers_has_it(read, model.model.layers[0].self_attn.head_dim)
        exact = name not in scaled and not name.endswith("ffn_down.bias")  # the latter may be sums
        np.testing.assert_allclose(read, values, rtol=0 if exact else 1e-6, err_msg=name)
    assert_sizes_are_said(file, model, case, shape)


def assert_sizes_are_said(file: File, model: PreTrainedModel, case: str, shape: str) -> None:
    variant, overrides = CASES[case]
    empty_attention = int(file.architecture == "openelm")
    groups, channels = (list(kept) for kept in SHAPES[shape])
    if shape == "layer dropped" and "biases" not in variant:  # there the biases of the layer stay
        del groups[1], channels[1]
    assert file.per_layer("attention.head_count_kv") == [len(kept) or empty_attention for kept in groups]
    assert file.per_layer("attention.head_count") == [QUERIES_PER_KV * len(kept) or empty_attention for kept in groups]
    assert file.per_layer("feed_forward_length") == [len(kept) or 32 for kept in channels]
    assert isinstance(file.meta["feed_forward_length"], list) == (file.architecture in ("deci", "openelm"))
    head_dim = overrides.get("head_dim", HEAD_DIM)
    assert {
        "block_count": len(groups),
        "embedding_length": HIDDEN,
        "vocab_size": 64,
        "context_length": 64,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": pytest.approx(
            model.config.rms_norm_eps / getattr(model.config, "residual_multiplier", 1) ** 2
        ),
        "rope.freq_base": model.config.rope_parameters["rope_theta"],
        "general.name": "a name",
        "general.file_type": 0,
        "tokenizer.ggml.model": "none",
    }.items() <= file.meta.items()


def test_rope_scaling(write: Callable[..., File]):
    file = write("llama", pruned("llama", rope_parameters=CASES["linear-rope"][1]["rope_parameters"]))
    assert file.meta["rope.scaling.type"] == "linear" and file.meta["rope.scaling.factor"] == 2.5
    file = write("qwen3", pruned("qwen3", "uniform", rope_parameters=YARN))
    assert file.architecture == "qwen3"
    assert file.meta["rope.scaling.type"] == "yarn" and file.meta["rope.scaling.factor"] == 4
    assert file.meta["rope.scaling.original_context_length"] == 16
    assert file.meta["rope.scaling.attn_factor"] == pytest.approx(1)
    file = write("qwen3", pruned("qwen3", "uniform", rope_parameters=YARN | {"attention_factor": 2.0}))
    assert file.meta["rope.scaling.attn_factor"] == pytest.approx(2 / (1 + 0.1 * np.log(4)))
    plain = write("llama", pruned("llama"))
    assert not [key for key in plain.meta if "scaling" in key] and "rope_freqs.weight" not in plain.tensors


@pytest.mark.parametrize(("case", "shape"), WRITTEN)
def test_llama_cpp_predicts_as_the_model(case: str, shape: str, byte_level: Path, tmp_path: Path):
    """A prompt at once, then token by token."""
    variant, overrides = CASES[case]
    vocabulary, then, times = 272, 5, 4
    model = pruned(variant, shape, vocab_size=vocabulary, **overrides)
    write_gguf(Sketch.of(model), family_of(variant), byte_level, tmp_path / "model.gguf", torch.float32)
    ids = torch.randint(262, (1, 24), generator=torch.Generator().manual_seed(2))
    whole = torch.cat([ids, torch.full((1, times), then)], dim=1)
    expected = torch.log_softmax(model(whole).logits[0, -times - 1 :], dim=-1).numpy()
    found = LlamaCpp(tmp_path / "model.gguf").log_probabilities(ids[0].tolist(), then, times, vocabulary)
    np.testing.assert_allclose(found, expected, atol=2e-5)


ARCHITECTURE_OF = {
    ("llama", "uniform"): "llama",
    ("llama", "widths"): "deci",
    ("mistral", "dense"): "llama",
    ("mistral", "no attention"): "deci",
    ("qwen2", "dense"): "deci",  # 48 query rows on a hidden size of 32
    ("qwen2-heads-fill-hidden", "dense"): "qwen2",
    ("qwen2-heads-fill-hidden", "uniform"): "deci",
    ("qwen3-tied", "uniform"): "qwen3",
    ("qwen3-tied", "no MLP"): "openelm",
    ("smollm3", "uniform"): "smollm3",
    ("granite", "uniform"): "llama",
    ("granite-biases-tied", "no attention"): "deci",
}


@pytest.mark.parametrize(("case", "shape"), ARCHITECTURE_OF)
def test_stock_architecture_where_it_fits(case: str, shape: str, write: Callable[..., File]):
    variant, overrides = CASES[case]
    file = write(variant, pruned(variant, shape, **overrides))
    assert file.architecture == ARCHITECTURE_OF[case, shape]
    said = [note for note in file.notes if f"llama.cpp reads it as architecture {file.architecture}, " in note]
    assert len(said) == (file.architecture in ("deci", "openelm"))  # layers that differ: who else reads that?


def test_families_have_an_architecture_for_layers_alike_and_all_but_smollm3_one_for_others():
    assert set(ARCHITECTURES) <= set(FAMILIES)
    assert {family_of(variant).model_type for variant, _ in CASES.values()} == set(ARCHITECTURES)
    assert not any(known[0].per_layer for known in ARCHITECTURES.values())
    assert {name for name, known in ARCHITECTURES.items() if not known[-1].per_layer} == {"smollm3"}


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


def test_a_weight_beyond_float16_is_refused_and_the_old_file_stays(words: Path, tmp_path: Path):
    model = pruned("llama")
    model.model.layers[2].mlp.down_proj.weight[0, 0] = 1e5
    path = tmp_path / "model.gguf"
    path.write_text("old")
    with pytest.raises(UserError, match=r"blk\.2\.ffn_down\.weight has weights up to 1e\+05.*bf16 or f32"):
        write_gguf(Sketch.of(model), FAMILIES["llama"], words, path, torch.float16)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    write_gguf(Sketch.of(model), FAMILIES["llama"], words, path, torch.bfloat16)
    assert File(path).architecture == "deci"


def test_notes_name_the_quantised_shapes(words: Path, tmp_path: Path):
    model = pruned("qwen3", "no MLP", tie_word_embeddings=True)
    notes = "\n".join(write_gguf(Sketch.of(model), FAMILIES["qwen3"], words, tmp_path / "model.gguf", torch.float16))
    assert "layers without an MLP (0, 2, 3) hold 32 channels of zeros" in notes
    assert "1 of 4 MLPs are no multiple of 32 wide: their last matrices stay F16" in notes
    assert "4 of 4 attention blocks are no multiple of 32 wide" in notes
    assert "multiple of 256" not in notes  # the hidden size is none itself
    model = pruned("qwen3", "no attention", tie_word_embeddings=True)
    notes = "\n".join(write_gguf(Sketch.of(model), FAMILIES["qwen3"], words, tmp_path / "model.gguf", torch.float16))
    assert "layers without attention (1, 3) hold one head of zeros" in notes
    assert "llama.cpp has no WordLevel tokenizer" in notes


def test_notes_name_biases_that_older_readers_refuse(words: Path, tmp_path: Path):
    for head_dim, noted in ((6, True), (4, False)):
        model = pruned("qwen2", "dense", head_dim=head_dim)
        notes = "\n".join(
            write_gguf(Sketch.of(model), FAMILIES["qwen2"], words, tmp_path / "model.gguf", torch.float16)
        )
        assert ("0.3.9 refuses the file" in notes) == noted
