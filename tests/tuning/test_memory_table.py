"""The tables of the GPU that a model needs, docs/costs.md's and the README's short one, are what the memory plan says."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_random_model import config_of
from transformers import PretrainedConfig

from tune_prune.core.errors import UserError
from tune_prune.core.machine import Memory
from tune_prune.models import loading
from tune_prune.models.geometry import Geometry
from tune_prune.pruning.selection import target_params
from tune_prune.pruning.statistics import by_statistic
from tune_prune.trial.statistics import by_samples
from tune_prune.tuning import space
from tune_prune.tuning.cost import Arithmetic, ModelWork, ZeroShotTokens, computed, estimate
from tune_prune.tuning.gpus import Card, parse_card
from tune_prune.tuning.memory import MemoryPlan, choose, memory_of
from tune_prune.tuning.resources import MAX_TRIALS_PER_GPU, fitting_trials, usable_bytes

ROOT = Path(__file__).parents[2]
README, COSTS = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/costs.md"))
CARDS = tuple(map(parse_card, ("RTX 4090", "L40S", "A100", "H200")))
# The seven tasks of the hub, all items, and WikiText-2: about.
ZERO_SHOT = ZeroShotTokens(items=20_465, tokens=1_650_000, scored=600_000, exact=True)
TEXT = 300_000
SIZES = {  # a row of the README, and its models
    "up to 0.5B": ("SmolLM2-135M", "Qwen2.5-0.5B"),
    "1B": ("Llama-3.2-1B",),
    "3B": ("Llama-3.2-3B",),
    "7B, 8B": ("Mistral-7B", "Qwen2.5-7B", "Llama-3-8B"),
    "70B": ("Llama-3-70B",),
}
NAMES = tuple(name for names in SIZES.values() for name in names)


def on_card(ways: list[MemoryPlan], card: Card, geometry: Geometry, vocab_size: int) -> str:
    """How many trials run at once on such a GPU with nothing else on it, how they hold the model if not as a whole, and how long
    the grid takes."""
    gpu = Memory(card.memory, card.memory)
    plan = choose(ways, {"device": usable_bytes(gpu)})
    try:
        # What waits in host memory is there for one trial.
        trials = 1 if plan.away else min(MAX_TRIALS_PER_GPU, fitting_trials(plan.total, gpu))
    except UserError:
        return "–"
    arithmetic = Arithmetic.of(geometry, vocab_size)
    speed = computed(card, "bfloat16")
    assert speed
    configs = space.load("paper_grid").configs()
    passes = {
        samples: [need for needs in by_statistic(shared).values() for need in needs]
        for samples, shared in by_samples(configs).items()
    }
    removed = target_params(geometry, 0.2, "free")
    work = ModelWork(
        "", arithmetic, "cuda", ways[0].weights, speed, passes, True, len(configs), removed, TEXT, 2048, ZERO_SHOT,
        plan.way, geometry.hidden_size * 2, 2,
    )  # fmt: skip
    hours = estimate([work], 1, 1).wall_seconds / 3600  # trials at once share what the GPU reaches
    shown = f"{hours:.2g} h" if hours >= 0.95 else f"{60 * hours:.0f} min"
    how = (
        "copies whole "
        if plan.way.pruned_whole
        else "streamed "
        if plan.way.from_files
        else "by layer "
        if plan.way.by_layer
        else ""
    )
    return f"{trials} {how}({shown})"


@functools.cache
def planned(name: str) -> tuple[PretrainedConfig, Geometry, list[MemoryPlan]]:
    """Plan in bfloat16, with the largest perplexity window and the longest item of the real tasks (some 600 tokens)."""
    config = config_of(name.lower())
    _, geometry = loading.config_geometry(config)
    work: Any = SimpleNamespace(
        config=config, perplexity_window=2048, perplexity_tokens=TEXT, longest_row=600, zero_shot=ZERO_SHOT
    )
    configs = space.load("paper_grid").configs()
    return config, geometry, memory_of(work, geometry, configs, target_params(geometry, 0.2, "free"), 2, "cuda")


def row_of(page: str, name: str) -> list[str]:
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
    assert row, f"no row of {name}"
    return [cell.strip() for cell in row[1].split("|")]


def gib(plan: MemoryPlan) -> str:
    return f"{plan.total / 2**30:.0f} GiB"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_a_trial_needs_and_how_it_fits_on_which_card(name: str) -> None:
    config, geometry, ways = planned(name)
    by_layer = min((plan for plan in ways if not plan.way.from_files), key=lambda plan: plan.total)
    copies = min((plan for plan in ways if plan.way.pruned_whole), key=lambda plan: plan.total)
    lean = min(ways, key=lambda plan: plan.total)
    assert row_of(COSTS, name) == [
        f"{geometry.total_params / 1e9:.1f}B", *map(gib, (ways[0], by_layer, copies, lean)),
        *(on_card(ways, card, geometry, config.vocab_size) for card in CARDS),
    ]  # fmt: skip
    if name == "Mistral-7B":
        minutes = on_card(ways, parse_card("h100"), geometry, config.vocab_size)
        assert f"grid of {name} takes {minutes.partition('(')[2].rstrip(')')} by this" in " ".join(COSTS.split())


@pytest.mark.parametrize("size", SIZES)
def test_the_readme_says_the_most_that_models_of_a_size_take(size: str) -> None:
    least = max(min(planned(name)[2], key=lambda plan: plan.total).total for name in SIZES[size])
    longest = []
    for card in CARDS:
        times = [
            on_card(ways, card, geometry, config.vocab_size).partition("(")[2].rstrip(")")
            for config, geometry, ways in map(planned, SIZES[size])
        ]
        longest.append(max(times, key=lambda time: float(time.split()[0]) * (60 if time.endswith("h") else 1)))
    assert row_of(README, size) == [f"{least / 2**30:.0f} GiB", *longest]
