"""The README's table of the GPU that a model needs is what the memory plan says."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_random_model import config_of

from tune_prune.core.errors import UserError
from tune_prune.cost_model.machine import Memory
from tune_prune.cost_model.memory import MemoryPlan, choose
from tune_prune.cost_model.workload import memory_of
from tune_prune.models import loading
from tune_prune.planning import search_space
from tune_prune.pruning.selection import target_params
from tune_prune.tuning.ray_cluster.resources import MAX_TRIALS_PER_GPU, fitting_trials, usable_bytes

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
CARDS = (24, 48, 80, 141)  # GB
NAMES = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Mistral-7B", "Qwen2.5-7B", "Llama-3-8B")


def on_card(ways: list[MemoryPlan], gigabytes: int) -> str:
    """How many trials run at once on such a GPU with nothing else on it, and how they hold the model if not as a whole."""
    gpu = Memory(gigabytes * 2**30, gigabytes * 2**30)
    plan = choose(ways, {"device": usable_bytes(gpu)})
    try:
        trials = min(MAX_TRIALS_PER_GPU, fitting_trials(plan.total, gpu))
    except UserError:
        return "–"
    return f"{trials}{' by layer' * plan.way.by_layer}"


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_says_what_a_trial_needs_and_how_it_fits_on_which_card(name: str) -> None:
    """In bfloat16, with the largest perplexity window and the longest item of the real tasks (some 600 tokens)."""
    config = config_of(name.lower())
    _, geometry = loading.config_geometry(config)
    work: Any = SimpleNamespace(config=config, perplexity_window=2048, perplexity_tokens=300_000, longest_row=600)
    configs = search_space.load("paper_grid").configs()
    ways = memory_of(work, geometry, configs, target_params(geometry, 0.2, "free"), 2, "cuda")
    resident, lean = ways[0], min(ways, key=lambda plan: plan.total)
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.MULTILINE)
    assert row, f"no row of {name}"
    needs = [f"{plan.total / 2**30:.0f} GiB" for plan in (resident, lean)]
    assert [cell.strip() for cell in row[1].split("|")] == [
        f"{geometry.total_params / 1e9:.1f}B", *needs, *(on_card(ways, card) for card in CARDS)
    ]  # fmt: skip
