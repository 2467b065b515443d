"""Every benchmark runs at its smallest setting and says what must hold on any machine: counts, equalities, no mismatch.
How long anything took is nobody's business here."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import published_way
import pytest
import torch

from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models import catalog
from tune_prune.models.loading import load_model
from tune_prune.pruning.statistics.block_removal import KINDS, removal_losses
from tune_prune.pruning.statistics.taylor import taylor


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function (name, *argv) -> the JSON that scripts/bench_<name>.py writes."""

    def run(name: str, *argv: str) -> dict[str, Any]:
        path = tmp_path / f"{name}.json"
        importlib.import_module(f"bench_{name}").main([*argv, "--output", str(path)])
        return json.loads(path.read_text(encoding="utf-8"))

    return run


def positive(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def test_engine(bench: Callable[..., dict[str, Any]]) -> None:
    argv = ["--model", "tiny-llama", "--limit", "4", "--repeats", "1", "--threads", "1"]
    (model,) = bench("engine", *argv, "--batch-sizes", "2,4")["models"]
    assert set(model["tasks"]) == set(ZERO_SHOT_TASKS)
    for name, task in model["tasks"].items():
        assert task["items"] == 4
        assert task["answers"]["largest_difference"] < 2e-4
        assert task["answers"]["acc_differs"] == task["answers"]["acc_norm_differs"] == 0
        tokens = task["tokens"]
        # Without sharing ours forwards what HFLM does; sharing never forwards more, padding never less.
        assert tokens["shared"] <= tokens["plain"] == tokens["hflm"] <= tokens["hflm_padded"], name
        assert positive(*task["seconds"].values())
    whole = model["all"]
    assert whole["tokens"]["hflm"] > whole["tokens"]["shared"] and whole["token_ratio"] > 1
    assert positive(whole["speedup"], whole["speedup_in_slices"], model["seconds_in_slices"])


@pytest.mark.slow
def test_grid(bench: Callable[..., dict[str, Any]]) -> None:
    argv = "--model tiny-llama --search-space smoke --sample 2 --limit 4 --tasks boolq,piqa --slots 2 --inline"
    (model,) = bench("grid", *argv.split())["models"]
    assert (model["trials"], model["published_trials_run"]) == (6, 2)
    assert model["mismatches"] == []
    assert positive(model["search_seconds"], model["published_seconds"], *model["parts"].values())
    assert model["ratio"] == pytest.approx(model["published_seconds"] / model["search_seconds"])
    assert model["own_kernels_parts"].keys() == model["parts"].keys()
    assert model["own_kernels_parts"]["unused removal"] == 0
    for part in ("load", "pruning", "zero_shot", "start and imports"):  # what both ways do alike is measured once
        assert model["own_kernels_parts"][part] == model["parts"][part]


def test_the_published_way_finds_what_the_search_finds() -> None:
    """Importance, removal losses and perplexity of the published loops, which the grid's benchmark times."""
    loaded = load_model(catalog.resolve("tiny-qwen2"), torch.float32, "cpu")  # its projections have biases
    windows = torch.randint(loaded.model.config.vocab_size, (11, 12), generator=torch.Generator().manual_seed(5))
    groups, own = (
        published_way.gradient_pass(loaded, windows),
        taylor(loaded.model, loaded.family, windows, [11])[11].groups,
    )
    for published, searched in zip((*groups.attention, *groups.mlp), (*own.attention, *own.mlp), strict=True):
        np.testing.assert_allclose(published, searched, rtol=1e-4)
    assert not any(p.requires_grad or p.grad is not None for p in loaded.model.parameters())
    losses = published_way.removal_passes(loaded, windows, KINDS)
    removal = removal_losses(loaded.model, loaded.family, windows, KINDS)
    np.testing.assert_allclose(losses.pop("dense")[0], removal.dense, rtol=1e-5)
    for kind in KINDS:
        np.testing.assert_allclose(losses[kind], removal.removed[kind], rtol=1e-5)
    text = windows.flatten()[:101]  # its last window has one token, which counts nowhere
    searched = perplexity(loaded.model, text, 20).ppl
    assert published_way.perplexity(loaded.model, text, 20) == pytest.approx(searched, rel=1e-5)
