"""The README's table of the GPU that a model needs is what the memory plan says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_random_model import config_of

from tune_prune.cost_model.workload import memory_of
from tune_prune.models import loading
from tune_prune.planning import search_space
from tune_prune.pruning.selection import target_params
from tune_prune.tuning.ray_cluster.resources import USABLE_GPU_MEMORY

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 141)  # GB
NAMES = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Mistral-7B", "Qwen2.5-7B", "Llama-3-8B")


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_says_what_a_trial_needs_and_on_which_card_it_fits(name: str) -> None:
    """In bfloat16, with the largest perplexity window and the longest item of the real tasks (some 600 tokens)."""
    config = config_of(name.lower())
    _, geometry = loading.config_geometry(config)
    work: Any = SimpleNamespace(config=config, perplexity_window=2048, perplexity_tokens=300_000, longest_row=600)
    configs = search_space.load("paper_grid").configs()
    bytes_needed = memory_of(work, geometry, configs, target_params(geometry, 0.2, "free"), 2, "cuda").total
    card = next(card for card in CARDS if bytes_needed <= USABLE_GPU_MEMORY * card * 2**30)
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|(.*)\|(.*)\|$", README, re.MULTILINE)
    assert row, f"no row of {name}"
    parameters = f"{geometry.total_params / 1e9:.1f}B"
    assert [cell.strip() for cell in row.groups()] == [parameters, f"{bytes_needed / 2**30:.0f} GiB", f"{card} GB"]
