"""cost.json from records and passes whose sums are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tune_prune.analysis.cost import between, cost_line, totals, write_cost
from tune_prune.core.ledger import read_costs
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import FolderStore


def stage(name: str, seconds: float, tokens: int) -> dict[str, object]:
    return {"stage": name, "duration_s": seconds, "tokens": tokens}


def trial(key: str, seconds: float, *stages: StageReport) -> TrialRecord:
    resources = {"cpu": 1.0, "gpu": 0.5}
    return TrialRecord(key, "m", None, "complete", stages=[*stages], elapsed_time_s=seconds, resources=resources)


EVALUATED = [StageReport("perplexity", 2.0, tokens=100), StageReport("zero_shot", 6.0, tokens=300)]
OWN = trial("a", 12.0, StageReport("importance", 4.0, tokens=50), *EVALUATED)
CACHED = trial("b", 8.0, StageReport("importance", 0.0), *EVALUATED)
DENSE = trial("c", 8.0, *EVALUATED)
PASSES = [stage("importance", 5.0, 60), stage("removal", 3.0, 40)]


def test_cost_counts_what_was_computed(tmp_path: Path) -> None:
    """One gradient pass was made for all and one inside a trial; a third trial found its statistics in the cache."""
    returned = write_cost(FolderStore(tmp_path), [OWN, CACHED], {"m": DENSE}, PASSES)
    cost = read_costs(FolderStore(tmp_path))
    assert cost == returned
    assert (cost["trials"], cost["gradient_passes"], cost["removal_passes"]) == (2, 2, 1)
    assert cost["tokens_per_stage"] == {"importance": 110, "removal": 40, "perplexity": 300, "zero_shot": 900}
    assert cost["worker_seconds"] == pytest.approx(4 + 5 + 3 + 3 * 8)
    assert cost["evaluation_fraction"] == pytest.approx(24 / 36)
    assert cost["gpu_hours"] == pytest.approx((28 + 8) * 0.5 / 3600)
    assert cost["shared_passes"] == PASSES
    assert cost_line(cost) == "time         36s of computing in all"


def test_what_was_predicted_stands_beside_what_this_start_measured(tmp_path: Path) -> None:
    """The first start had done one trial, the baseline and the passes; the second one runs the other trial."""
    before = totals([OWN], {"m": DENSE}, PASSES)
    predicted = {
        "stages": {
            "perplexity": {"runs": 1, "seconds": 2.5, "tokens": 90, "flops": 1e9},
            "removal": {"runs": 0, "seconds": 0.0, "tokens": 0, "flops": 0.0},
        },
        "wall_seconds": [100.0, 184.0],
        "load": {"average": 0.8, "cpus": 2},
        "gpu_hours": 0.25,
        "notes": ["~ estimated"],
    }
    cost = write_cost(
        FolderStore(tmp_path), [OWN, CACHED], {"m": DENSE}, PASSES, predicted, before=before, wall_seconds=91.0
    )
    last = cost["last_start"]
    assert last["wall_seconds"] == {"predicted": [100.0, 184.0], "measured": 91.0}
    assert last["load"] == {"average": 0.8, "cpus": 2}
    assert last["seconds_per_stage"]["perplexity"] == {"predicted": 2.5, "measured": 2.0}
    assert last["tokens_per_stage"]["perplexity"] == {"predicted": 90, "measured": 100}
    assert last["tokens_per_stage"]["removal"] == {"predicted": 0, "measured": 0}
    assert last["predicted_gpu_hours"] == 0.25
    assert cost_line(cost) == "time         1m31s; the plan said 1m40s to 3m00s"
    first = write_cost(FolderStore(tmp_path), [OWN], {"m": DENSE}, PASSES, predicted, wall_seconds=9.0)
    assert first["last_start"]["seconds_per_stage"]["removal"] == {"predicted": 0.0, "measured": 3.0}
    assert cost_line(first) == "time         9.0s; the plan said 1m40s to 3m00s"
    everything = totals([OWN], {"m": DENSE}, PASSES)
    again = write_cost(
        FolderStore(tmp_path), [OWN], {"m": DENSE}, PASSES, predicted, before=everything, wall_seconds=0.5
    )
    assert cost_line(again) == "time         0.5s; nothing was left to compute"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((58.4, 107.0), "58s to 1m50s"),
        ((0.04, 0.04), "0.0s"),
        ((99.9, 100.2), "1m40s"),
        ((7523, 1e5), "2h05m to 27h46m"),
    ],
)
def test_ranges_have_two_digits(seconds, said):
    assert between(seconds) == said
