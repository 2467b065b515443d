"""The README's table of the GPU that a model needs is what the memory plan says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from tune_prune.cost_model.workload import memory_of
from tune_prune.models import loading
from tune_prune.planning import search_space
from tune_prune.pruning.selection import target_params
from tune_prune.tuning.ray_cluster.resources import USABLE_GPU_MEMORY

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)  # GB
LLAMA_3: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
# As in the models' own config.json.
CONFIGS: dict[str, PretrainedConfig] = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LlamaConfig(
        **LLAMA_3 | {"head_dim": 64}, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "Llama-3.2-3B": LlamaConfig(
        **LLAMA_3, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "Mistral-7B": MistralConfig(vocab_size=32768, sliding_window=None, max_position_embeddings=32768),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=131072,
    ),
    "Llama-3-8B": LlamaConfig(
        **LLAMA_3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=8192,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_readme_says_what_a_trial_needs_and_on_which_card_it_fits(name: str) -> None:
    """In bfloat16, with the largest perplexity window and the longest item of the real tasks (some 600 tokens)."""
    config = CONFIGS[name]
    _, geometry = loading.config_geometry(config)
    work: Any = SimpleNamespace(config=config, perplexity_window=2048, perplexity_tokens=300_000, longest_row=600)
    configs = search_space.load("paper_grid").configs()
    bytes_needed = memory_of(work, geometry, configs, target_params(geometry, 0.2, "free"), 2, "cuda").total
    card = next(card for card in CARDS if bytes_needed <= USABLE_GPU_MEMORY * card * 2**30)
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|(.*)\|(.*)\|$", README, re.MULTILINE)
    assert row, f"no row of {name}"
    parameters = f"{geometry.total_params / 1e9:.1f}B"
    assert [cell.strip() for cell in row.groups()] == [parameters, f"{bytes_needed / 2**30:.0f} GiB", f"{card} GB"]
