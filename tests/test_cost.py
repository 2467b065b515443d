"""cost.json from records and passes whose sums are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tune_prune.analysis.cost import write_cost
from tune_prune.records import TrialRecord


def stage(name: str, seconds: float, tokens: int) -> dict[str, object]:
    return {"stage": name, "duration_s": seconds, "tokens": tokens}


def test_cost_counts_what_was_computed(tmp_path: Path) -> None:
    """One gradient pass was made for all and one inside a trial; a third trial found its statistics in the cache."""
    evaluated = [stage("perplexity", 2.0, 100), stage("zero_shot", 6.0, 300)]
    own = TrialRecord("a", "m", {}, "complete", stages=[stage("importance", 4.0, 50), *evaluated], elapsed_time_s=12.0)
    cached = TrialRecord("b", "m", {}, "complete", stages=[stage("importance", 0.0, 0), *evaluated], elapsed_time_s=8.0)
    dense = TrialRecord("c", "m", {}, "complete", stages=evaluated, elapsed_time_s=8.0)
    for record in (own, cached, dense):
        record.resources = {"cpu": 1.0, "gpu": 0.5}
    passes = [stage("importance", 5.0, 60), stage("removal", 3.0, 40)]
    write_cost(tmp_path / "cost.json", [own, cached], {"m": dense}, passes)
    cost = json.loads((tmp_path / "cost.json").read_text())
    assert (cost["trials"], cost["gradient_passes"], cost["removal_passes"]) == (2, 2, 1)
    assert cost["tokens_per_stage"] == {"importance": 110, "removal": 40, "perplexity": 300, "zero_shot": 900}
    assert cost["worker_seconds"] == pytest.approx(4 + 5 + 3 + 3 * 8)
    assert cost["evaluation_fraction"] == pytest.approx(24 / 36)
    assert cost["gpu_hours"] == pytest.approx((28 + 8) * 0.5 / 3600)
    assert cost["shared_passes"] == passes
