"""Models with the config.json that public models have, every key of it, in the versions of transformers that they were published
with: planned, searched, pruned, and loaded by transformers. Only sizes are smaller, and ids of tokens within the vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tune_prune
from tests.search_folders import TINY_FOLDER, data_folder
from tune_prune.commands import search

VOCABULARY = 600  # the tokenizer's 551, and some that no text makes
SMALL = {"num_hidden_layers": 4, "vocab_size": VOCABULARY}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8,
    "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
LLAMA_3 = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 590, "eos_token_id": 591, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "transformers_version": "4.40.0.dev0",
}  # fmt: skip
LLAMA_3_1 = LLAMA_3 | {
    "max_position_embeddings": 131072, "mlp_bias": False, "transformers_version": "4.43.0.dev0",
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "initializer_range": 0.02,
    "attention_dropout": 0.0, "bos_token_id": 590, "eos_token_id": 590, "hidden_size": 112, "intermediate_size": 148,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 131072, "max_window_layers": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip

PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 590, "embd_pdrop": 0.0, "eos_token_id": 591, "pad_token_id": 592, "hidden_act": "silu",
    "initializer_range": 0.02, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip

GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 590, "eos_token_id": 590, "pad_token_id": 591,
    "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.1, "intermediate_size": 256,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_proj_bias": False, "normalization_function": "rmsnorm", "num_attention_heads": 8, "num_experts_per_tok": 0,
    "num_key_value_heads": 2, "num_local_experts": 0, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 256, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
THREE_SLIDE = ["sliding_attention"] * 3 + ["full_attention"]

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": LLAMA | {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "intermediate_size": 172, "num_key_value_heads": 8,
        "max_position_embeddings": 4096, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
    },
    "Llama-3.1-8B": LLAMA_3_1,
    "Llama-3.2-1B": LLAMA_3_1 | {
        "head_dim": 8, "intermediate_size": 256, "rope_scaling": LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
        "tie_word_embeddings": True, "transformers_version": "4.45.0.dev0",
    },
    "Mistral-7B-v0.1": MISTRAL | {
        "rope_theta": 10000.0, "sliding_window": 16, "transformers_version": "4.34.0.dev0",
    },
    "Mistral-Nemo-Base-2407": MISTRAL | {
        "attention_dropout": 0.0, "head_dim": 8, "hidden_size": 80, "max_position_embeddings": 128000,
        "rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.43.0.dev0",
    },
    "Qwen2.5-7B": QWEN | {"transformers_version": "4.40.1", "use_mrope": False},
    "Qwen3-8B": QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "eos_token_id": 592,
        "head_dim": 16, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 8,
        "max_position_embeddings": 40960, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "transformers_version": "4.51.0",
    },
    "SmolLM2-135M": LLAMA_3 | {
        "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 72, "intermediate_size": 192, "is_llama_config": True,
        "initializer_range": 0.041666666666666664, "num_attention_heads": 9, "num_key_value_heads": 3,
        "rope_interleaved": False, "rope_theta": 100000, "tie_word_embeddings": True, "transformers_version": "4.40.1",
    },
    "SmolLM3-3B": LLAMA_3 | {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "eos_token_id": 592, "pad_token_id": 593,
        "intermediate_size": 344, "layer_types": ["full_attention"] * 4, "max_position_embeddings": 65536,
        "max_window_layers": 3, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0],
        "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "sliding_window": None,
        "tie_word_embeddings": True, "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False,
    },
    "Granite-3.3-2b": {name: value for name, value in LLAMA_3.items() if name != "pretraining_tp"} | {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.125,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "embedding_multiplier": 12.0, "intermediate_size": 256,
        "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "residual_multiplier": 0.22,
        "rope_theta": 10000000.0, "tie_word_embeddings": True, "transformers_version": "4.46.0.dev0",
    },
    "Phi-4": PHI | {
        "auto_map": {}, "hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_scaling": None,
        "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.47.0",
    },
    "Phi-4-mini": PHI | {
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoTokenizer": "Xenova/gpt-4o",
        },
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "hidden_size": 96,
        "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {
            "long_factor": [1, 1.1, 2, 8, 20, 30], "short_factor": [1.0, 1.0, 1.1, 1.5, 2.0, 2.5], "type": "longrope",
        },
        "sliding_window": 262144, "tie_word_embeddings": True, "transformers_version": "4.45.0",
    },
    "GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": [590, 591, 592], "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 216, "max_position_embeddings": 32768, "num_attention_heads": 8, "num_key_value_heads": 2,
        "pad_token_id": 590, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": True,
    },
    "Gemma-3-270m": {
        "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
        "pad_token_id": 0, "final_logit_softcapping": None, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 208, "layer_types": THREE_SLIDE,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 16, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0",
        "use_bidirectional_attention": False, "use_cache": True,
    },
    "Olmo-3-7B": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "eos_token_id": 590, "pad_token_id": 591, "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 172, "layer_types": THREE_SLIDE, "max_position_embeddings": 65536, "num_attention_heads": 8,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 16, "dtype": "bfloat16",
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_cache": False,
    },
    "Command-A": {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": False, "head_dim": 8,
        "hidden_size": 96, "intermediate_size": 288, "logit_scale": 0.25, "max_position_embeddings": 131072,
        "num_attention_heads": 12, "num_key_value_heads": 4, "order_of_interleaved_layers": "local_attn_first",
        "rope_theta": 50000, "sliding_window": 16, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 64,
        "block_ff_dim": 384, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
        "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
        "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64,
        "conv_use_xavier_init": True, "eos_token_id": 7, "full_attn_idxs": [2], "hidden_size": 64, "initializer_range": 0.02,
        "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 8, "num_heads": 8,
        "num_key_value_heads": 2, "pad_token_id": 0, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True,
        "use_pos_enc": True,
    },
    "Falcon-H1-0.5B": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attention_bias": False, "attention_dropout": 0.0,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
        "embedding_multiplier": 5.656854249492381, "head_dim": 8, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 256, "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 8,
        "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 12,
        "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True,
        "max_position_embeddings": 16384, "mlp_bias": False, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "num_attention_heads": 8, "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "Granite-4.0-h-350m": GRANITE_4 | {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 3, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_heads": 8, "max_position_embeddings": 32768, "position_embedding_type": "nope", "residual_multiplier": 0.246,
        "rope_theta": 10000,
    },
    "Granite-4.0-micro": GRANITE_4 | {
        "layer_types": ["attention"] * 4, "logits_scaling": 10, "mamba_d_head": 8, "mamba_d_state": 256, "mamba_n_heads": 16,
        "max_position_embeddings": 131072, "position_embedding_type": "rope", "residual_multiplier": 0.22,
        "rope_theta": 10000000,
    },
    "Mixtral-8x7B-v0.1": MISTRAL | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0, "intermediate_size": 112,
        "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "transformers_version": "4.36.0.dev0",
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 590, "decoder_sparse_step": 1, "eos_token_id": 591, "head_dim": 16, "hidden_act": "silu",
        "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 192, "max_position_embeddings": 40960,
        "max_window_layers": 4, "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True,
        "num_attention_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 2,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    },
}  # fmt: skip


PLANNED = (
    "Llama-3.2-1B", "Mistral-7B-v0.1", "Qwen2.5-7B", "SmolLM3-3B", "Phi-4-mini", "Granite-4.0-h-350m", "Mixtral-8x7B-v0.1",
)  # fmt: skip


def model(folder: Path) -> Path:
    """`folder`, whose name is a model's, with that one's config.json, random weights of its torch_dtype and a tokenizer."""
    published = json.dumps(PUBLISHED[folder.name] | SMALL)
    folder.mkdir()
    for path in TINY_FOLDER.glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(published)
    config = AutoConfig.from_pretrained(folder)
    made = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    made.save_pretrained(folder)
    (folder / "config.json").write_text(published)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, ...]:
    return ("--data-dir", str(data_folder(tmp_path / "data")), "--calibration", "embedded", "--tasks", "boolq,piqa")


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits of more tokens than the sliding window has."""
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_pruned_model_of_it_loads_and_gives_what_it_gave_in_memory(name: str, tmp_path: Path) -> None:
    folder = model(tmp_path / name)
    data = data_folder(tmp_path / "data")
    dense = tune_prune.open(folder, calibration="embedded", data_dir=data, device="cpu", dtype="float32")
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(dense.model), logits(own))
    for shape in ("free", "uniform"):
        pruned = dense.prune("taylor", 0.25, 16, 8, shape=shape)
        pruned.save(tmp_path / shape)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / shape, dtype=torch.float32)
        found, expected = logits(again), logits(pruned.model)
        assert (found - expected).abs().max() <= 1e-5 < (expected - logits(own)).abs().max()
        saved = json.loads((tmp_path / shape / "config.json").read_text())
        assert saved["dtype"] == PUBLISHED[name].get("torch_dtype", PUBLISHED[name].get("dtype"))
        assert saved.get("layer_types") == PUBLISHED[name].get("layer_types", saved.get("layer_types"))
        assert saved["model_type"] == "tune_prune_" * (shape == "free") + PUBLISHED[name]["model_type"]


@pytest.mark.parametrize("name", PLANNED)
def test_a_search_of_it_is_planned(
    name: str, data: tuple[str, ...], plan_text: Callable[..., str], tmp_path: Path
) -> None:
    folder = model(tmp_path / name)
    plan = plan_text("--model", folder, *data, "--search-space", "smoke", "--gpu", "4090")
    params = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert f"{name} " in plan and f" {params:,} " in plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Mistral-7B-v0.1", "Qwen3-8B", "Granite-3.3-2b", "Phi-4-mini"])
def test_it_is_searched(name: str, data: tuple[str, ...], printed: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("search: grid\nmethod: [blockwise, flap]\nseq_len: 16\nnum_samples: 8\n")
    small = (
        "--limit",
        "2",
        "--perplexity-tokens",
        "512",
        "--inline",
        "--save-best",
        "--storage-path",
        tmp_path / "results",
    )
    folder = model(tmp_path / name)
    out = printed(search.main, "--model", folder, *data, "--search-space", tmp_path / "two.yaml", *small)
    assert "2 trials (2 complete)" in out
    (best,) = (tmp_path / "results").rglob("best/*/config.json")
    assert logits(AutoModelForCausalLM.from_pretrained(best.parent)).isfinite().all()
