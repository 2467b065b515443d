"""Sizes of dense and pruned models against numbers worked out by hand.

The tiny models (conftest.py): 64 tokens, H = 32, 4 layers, K = 4 KV heads of d = 6 with g = 2 queries each, M = 40. A KV group
costs d·H·(2g + 2) = 1,152 weights, an MLP channel 3·H = 96, the head 2,048.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tune_prune.checkpoint.layers import Sizes, sizes
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import prune

# A layer: 4 x 1,152 + 40 x 96 + two norms of 32 = 8,512. Four layers, the last norm, embeddings and head: 38,176.
DENSE_PARAMS = {
    "llama-biases": 38_176 + 4 * (48 + 24 + 24 + 32 + 40 + 40 + 32),
    "qwen3-biases-tied": 38_176 + 4 * (6 + 6) + 4 * (48 + 24 + 24 + 32) - 2_048,
}
# Groups kept: 2, 0, 3, 1 of 4; channels kept: 10, 7, 0, 40 of 40. So 10 groups and 103 channels go.
KEPT_GROUPS = ((1, 3), (), (0, 1, 2), (2,))
KEPT_CHANNELS = (tuple(range(10)), tuple(range(20, 27)), (), tuple(range(40)))
REMOVED_WEIGHTS = 10 * 1_152 + 103 * 96
# 24 biases of q, k and v with each group, 2 of gate and up with each channel, the norms of layer 1.
REMOVED_BESIDE = {"llama-biases": 10 * 24 + 103 * 2, "qwen3-biases-tied": 10 * 24 + 12}


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


@pytest.mark.parametrize("variant", DENSE_PARAMS)
def test_dense_and_pruned_with_blocks_removed(variant: str, tiny: Callable[..., PreTrainedModel]) -> None:
    dense, params = tiny(variant), DENSE_PARAMS[variant]
    family, macs = FAMILIES[dense.config.model_type], 4 * (4 * 1_152 + 40 * 96) + 2_048
    assert sizes(dense, family) == Sizes(params, 8 * params, 4 * 4 * 6 * 2 * 8, macs)
    model = prune(dense, family, PruningPlan(KEPT_GROUPS, KEPT_CHANNELS, 0, 0, params))
    left = params - REMOVED_WEIGHTS - REMOVED_BESIDE[variant]
    assert sizes(model, family) == Sizes(left, 8 * left, 6 * 6 * 2 * 8, 6 * 1_152 + 57 * 96 + 2_048)


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
