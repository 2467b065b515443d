"""The embedded models are good enough that a search on them means something: through the real loop, on all items."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet
import pytest

from tune_prune import embedded
from tune_prune.analysis.statistics.differences import paired_difference, read_items
from tune_prune.core.config import ZERO_SHOT_TASKS, EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.store import FolderStore
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import run_trial

pytestmark = pytest.mark.slow  # five trials on each model, or six


@pytest.mark.parametrize("name", embedded.MODEL_NAMES)
def test_pruning_hurts_and_every_method_beats_chance_removal(name: str, tmp_path: Path) -> None:
    run = ModelRun(name, name, None, "embedded", None, EvaluationProtocol(slices=(1.0,)), 0, "float32")
    context = TrialContext.open(run, tmp_path / "artifacts", device="cpu")
    dense = run_trial(None, context, FolderStore(tmp_path / "dense")).metrics
    assert dense["acc_mean"] >= 0.80
    rows = pyarrow.parquet.read_table(tmp_path / "dense" / "items.parquet").to_pylist()
    for task in ZERO_SHOT_TASKS:
        mine = [row for row in rows if row["task"] == task]
        chance = sum(1 / len(row["loglikelihoods"]) for row in mine) / len(mine)
        assert len(mine) >= 200
        assert dense[f"acc_{task}"] > chance + 4 * math.sqrt(chance * (1 - chance) / len(mine)), task

    configs = {method: PruningConfig(method, 64, 128) for method in ("random", "taylor", "layerwise", "blockwise")}
    if context.loaded.family.experts:  # half of this model: without channels inside of experts 16 of 40 go
        configs["inside"] = PruningConfig("taylor", 64, 128, whole_experts=0.0)
    scores = {
        name: run_trial(config, context, FolderStore(tmp_path / name)).metrics["acc_mean"]
        for name, config in configs.items()
    }
    by_item = {method: read_items(str(tmp_path / method)) for method in scores}
    for method in ("taylor", "layerwise", "blockwise"):
        assert scores[method] < dense["acc_mean"] - 0.01
        difference = paired_difference(by_item[method], by_item["random"])
        assert difference is not None
        assert difference[0] > 4 * difference[1], method
    assert max(scores.values()) > 0.9 * dense["acc_mean"]
