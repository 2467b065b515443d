"""Sizes of dense and pruned models against numbers worked out by hand.

The tiny models (conftest.py): 64 tokens, H = 32, 4 layers, K = 4 KV heads of d = 6 with g = 2 queries each, M = 40. A KV group
costs d·H·(2g + 2) = 1,152 weights, an MLP channel 3·H = 96, the head 2,048.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tune_prune.checkpoint.layers import Sizes, size_table, sizes
from tune_prune.models.families import FAMILIES
from tune_prune.models.pruned.configuration_tune_prune import PrunedLlamaConfig
from tune_prune.models.pruned.modeling_tune_prune import PrunedLlamaForCausalLM
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import prune

# A layer: 4 x 1,152 + 40 x 96 + two norms of 32 = 8,512. Four layers, the last norm, embeddings and head: 38,176.
DENSE_PARAMS = {
    "llama": 38_176,
    "mistral": 38_176,
    "qwen2": 38_176 + 4 * (48 + 24 + 24),  # biases of q, k, v
    "qwen3": 38_176 + 4 * (6 + 6),  # norms of q and k
    "llama-biases": 38_176 + 4 * (48 + 24 + 24 + 32 + 40 + 40 + 32),
    "llama-tied": 38_176 - 2_048,
    "mistral-sliding": 38_176,
    "qwen2-sliding": 38_176 + 4 * (48 + 24 + 24),
    "qwen3-biases-tied": 38_176 + 4 * (6 + 6) + 4 * (48 + 24 + 24 + 32) - 2_048,
    "smollm3": 38_176,
    "smollm3-sliding-biases": 38_176 + 4 * (48 + 24 + 24 + 32 + 40 + 40 + 32),
    "granite": 38_176,
    "granite-biases-tied": 38_176 + 4 * (48 + 24 + 24 + 32 + 40 + 40 + 32) - 2_048,
}
# Groups kept: 2, 0, 3, 1 of 4; channels kept: 10, 7, 0, 40 of 40. So 10 groups and 103 channels go.
KEPT_GROUPS = ((1, 3), (), (0, 1, 2), (2,))
KEPT_CHANNELS = (tuple(range(10)), tuple(range(20, 27)), (), tuple(range(40)))
REMOVED_WEIGHTS = 10 * 1_152 + 103 * 96
REMOVED_BESIDE = {  # 24 biases of q, k and v with each group, 2 of gate and up with each channel, the norms of layer 1
    "qwen2": 10 * 24,
    "qwen2-sliding": 10 * 24,
    "qwen3": 12,
    "llama-biases": 10 * 24 + 103 * 2,
    "qwen3-biases-tied": 10 * 24 + 12,
    "smollm3-sliding-biases": 10 * 24 + 103 * 2,
    "granite-biases-tied": 10 * 24 + 103 * 2,
}


def test_llama_3_8b() -> None:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    found = sizes(model, FAMILIES["llama"])
    assert found.params == 8_030_261_248
    assert found.weight_bytes == 16_060_522_496
    assert found.kv_bytes_per_token == 32 * 8 * 128 * 2 * 2 == 131_072
    # 32 layers of 8 groups of 5,242,880 and 14,336 channels of 12,288, and the head; all but embeddings and norms
    assert found.macs_per_token == 32 * (8 * 5_242_880 + 14_336 * 12_288) + 128_256 * 4096 == 7_504_658_432
    assert found.params - found.macs_per_token == 128_256 * 4096 + 65 * 4096


def test_dense(variant: str, tiny: Callable[..., PreTrainedModel]) -> None:
    model = tiny(variant)
    params = DENSE_PARAMS[variant]
    macs = 4 * (4 * 1_152 + 40 * 96) + 2_048
    assert sizes(model, FAMILIES[model.config.model_type]) == Sizes(params, 8 * params, 4 * 4 * 6 * 2 * 8, macs)


def test_pruned_with_blocks_removed(variant: str, tiny: Callable[..., PreTrainedModel]) -> None:
    dense = tiny(variant)
    family = FAMILIES[dense.config.model_type]
    model = prune(dense, family, PruningPlan(KEPT_GROUPS, KEPT_CHANNELS, 0, 0, DENSE_PARAMS[variant]))
    params = DENSE_PARAMS[variant] - REMOVED_WEIGHTS - REMOVED_BESIDE.get(variant, 0)
    macs = 6 * 1_152 + 57 * 96 + 2_048
    assert sizes(model, family) == Sizes(params, 8 * params, 6 * 6 * 2 * 8, macs)
    assert sizes(dense, family).params == DENSE_PARAMS[variant]  # they share tensors, and the dense model is as it was


@pytest.mark.parametrize("biases", [False, True])
def test_checkpoint_class_on_the_meta_device(biases: bool) -> None:
    config = PrunedLlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        attention_bias=biases,
        mlp_bias=biases,
        per_layer_config={
            "0": {"num_attention_heads": 2, "num_key_value_heads": 1},
            "1": {"skip": ["attention"], "intermediate_size": 7},
            "2": {"skip": ["mlp"]},
        },
    )
    with torch.device("meta"):
        model = PrunedLlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    # 5 groups, 47 channels; 7 norms; o biases in all three layers, and down biases, too
    weights = 5 * 1_152 + 47 * 96
    params = weights + 2 * 2_048 + 7 * 32 + biases * (5 * 24 + 3 * 32 + 47 * 2 + 3 * 32)
    assert sizes(model, FAMILIES["llama"]) == Sizes(params, 2 * params, 5 * 6 * 2 * 2, weights + 2_048)


def test_counted_in_another_dtype(tiny: Callable[..., PreTrainedModel]) -> None:
    found = sizes(tiny("llama"), FAMILIES["llama"], torch.bfloat16)
    assert (found.params, found.weight_bytes, found.kv_bytes_per_token) == (38_176, 2 * 38_176, 4 * 4 * 6 * 2 * 2)


def test_cache_is_as_large_as_said(tiny: Callable[..., PreTrainedModel]) -> None:
    dense = tiny("qwen3", dtype=torch.float32)
    family = FAMILIES["qwen3"]
    model = prune(dense, family, PruningPlan(KEPT_GROUPS, KEPT_CHANNELS, 0, 0, 0))
    for one in (dense, model):
        with torch.inference_mode():
            cache = one(input_ids=torch.arange(11)[None], use_cache=True).past_key_values
        layers = [layer for layer in cache.layers if layer.keys is not None]
        held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
        assert held == 11 * sizes(one, family).kv_bytes_per_token


def test_table() -> None:
    rows = {
        "dense": Sizes(8_030_261_248, 16_060_522_496, 131_072, 7_504_658_432),
        "pruned": Sizes(6_424_209_000, 12_848_418_000, 98_304, 5_898_606_184),
        "padded": Sizes(8_030_261_248, 16_060_522_496, 0, 7_504_658_432),
    }
    assert size_table(rows, {"dense": 16_060_522_496, "pruned": 12_848_461_234}).splitlines() == [
        "             parameters           bytes on disk          cache bytes/token          multiply-adds/token",
        "original  8,030,261,248  100.0%  16,060,522,496  100.0%            131,072  100.0%        7,504,658,432  100.0%",
        "pruned    6,424,209,000   80.0%  12,848,461,234   80.0%             98,304   75.0%        5,898,606,184   78.6%",
        "padded    8,030,261,248  100.0%               -       -                  0    0.0%        7,504,658,432  100.0%",
    ]
