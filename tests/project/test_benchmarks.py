"""Every benchmark runs at its smallest setting and says what must hold on any machine: counts, equalities, no mismatch.
How long anything took is nobody's business here."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tune_prune.core.config import ZERO_SHOT_TASKS
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models import catalog
from tune_prune.models.loading import load_model
from tune_prune.pruning.statistics.block_removal import KINDS, removal_losses
from tune_prune.pruning.statistics.taylor import taylor

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DATA = Path(os.environ.get("TUNE_PRUNE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set TUNE_PRUNE_DATA)")


def positive(*values: float) -> bool:
    return all(math.isfinite(value) and value > 0 for value in values)


def check_engine(values: dict[str, Any], items: int, tasks: tuple[str, ...] = ZERO_SHOT_TASKS) -> None:
    (model,) = values["models"]
    assert set(model["tasks"]) == set(tasks)
    for name, task in model["tasks"].items():
        assert task["items"] == items
        assert task["answers"]["largest_difference"] < 2e-4
        assert task["answers"]["acc_differs"] == task["answers"]["acc_norm_differs"] == 0
        tokens = task["tokens"]
        # Without sharing ours forwards what HFLM does; sharing never forwards more, padding never less.
        assert tokens["shared"] <= tokens["plain"] == tokens["hflm"] <= tokens["hflm_padded"], name
        assert positive(*task["seconds"].values())
    whole = model["all"]
    assert whole["tokens"]["hflm"] > whole["tokens"]["shared"] and whole["token_ratio"] > 1
    assert positive(whole["speedup"], whole["speedup_in_slices"], model["seconds_in_slices"])
    files = model["whole_files"]
    counted = {way: sum(task[way] for task in files["tasks"].values()) for way in ("shared", "plain")}
    assert files["at_hand"] == counted | {"ratio": counted["plain"] / counted["shared"]}
    if model["model"] == "tiny-llama":  # the embedded tasks are whole
        assert "hellaswag_whole" not in files
        return
    scale = 10_042 / files["tasks"]["hellaswag"]["items"]
    part = {way: files["tasks"]["hellaswag"][way] for way in counted}
    scaled = {way: counted[way] - part[way] + scale * part[way] for way in counted}
    assert files["hellaswag_whole"]["ratio"] == pytest.approx(scaled["plain"] / scaled["shared"])


def test_engine(bench: Callable[..., dict[str, Any]]) -> None:
    argv = ["--model", "tiny-llama", "--limit", "4", "--count-limit", "6", "--repeats", "1", "--threads", "1"]
    check_engine(bench("engine", *argv, "--batch-sizes", "2,4"), 4)


@pytest.mark.slow
def test_grid(bench: Callable[..., dict[str, Any]]) -> None:
    argv = [
        "--model",
        "tiny-llama",
        "--search-space",
        "smoke",
        "--sample",
        "2",
        "--limit",
        "4",
        "--tasks",
        "boolq,piqa",
    ]
    values = bench("grid", *argv, "--slots", "2", "--inline")
    (model,) = values["models"]
    assert (model["trials"], model["published_trials_run"]) == (6, 2)
    assert model["mismatches"] == []
    assert positive(model["search_seconds"], model["published_seconds"], *model["parts"].values())
    assert model["ratio"] == pytest.approx(model["published_seconds"] / model["search_seconds"])
    assert model["own_kernels_parts"].keys() == model["parts"].keys()
    assert model["own_kernels_parts"]["unused removal"] == 0
    for part in ("load", "pruning", "zero_shot", "start and imports"):  # what both ways do alike is measured once
        assert model["own_kernels_parts"][part] == model["parts"][part]


def test_the_published_way_finds_what_the_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importance, removal losses and perplexity of the published loops, which the grid's benchmark times."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    way = importlib.import_module("published_way")
    loaded = load_model(catalog.resolve("tiny-qwen2"), torch.float32, "cpu")  # its projections have biases
    windows = torch.randint(loaded.model.config.vocab_size, (11, 12), generator=torch.Generator().manual_seed(5))
    groups, own = way.gradient_pass(loaded, windows), taylor(loaded.model, loaded.family, windows, [11])[11].groups
    for published, searched in zip((*groups.attention, *groups.mlp), (*own.attention, *own.mlp), strict=True):
        np.testing.assert_allclose(published, searched, rtol=1e-4)
    assert not any(p.requires_grad or p.grad is not None for p in loaded.model.parameters())
    losses, removal = (
        way.removal_passes(loaded, windows, KINDS),
        removal_losses(loaded.model, loaded.family, windows, KINDS),
    )
    np.testing.assert_allclose(losses.pop("dense")[0], removal.dense, rtol=1e-5)
    for kind in KINDS:
        np.testing.assert_allclose(losses[kind], removal.removed[kind], rtol=1e-5)
    text = windows.flatten()[:101]  # its last window has one token, which counts nowhere
    assert way.perplexity(loaded.model, text, 20) == pytest.approx(perplexity(loaded.model, text, 20).ppl, rel=1e-5)


def test_grid_tells_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    differences = importlib.import_module("bench_grid").differences
    search = {"taylor-s16-n8": {"acc_boolq": 0.5, "acc_piqa": 0.25, "ppl": 10.0}}
    same = {"config": "taylor-s16-n8", "metrics": {"acc_boolq": 0.5, "ppl": 10.0001}}
    assert differences([same], search) == []
    other = {"config": "taylor-s16-n8", "metrics": {"acc_boolq": 0.5, "acc_piqa": 0.26}}
    assert [line.split(":")[1].split()[0] for line in differences([same, other], search)] == ["acc_piqa"]
