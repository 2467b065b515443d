"""scripts/replay_kl_filter.py, on trials of which it is known how often they are stopped, and on the study's grid."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from replay_kl_filter import groups, main, replay, winners

from tests.small_experiments import experiment, record
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.records import PER_ITEM, StageReport

ROOT = Path(__file__).resolve().parents[2]
GRID = ROOT / "docs" / "studies" / "smollm2-135m" / "grid.csv"
ORDERS = 2000


def trials_of(folder: Path, **far: float) -> Path:
    """An experiment of ten trials with equal KLs; those that are named have others."""
    records = []
    for place in range(10):
        one = record(f"taylor-s{16 + place}-n8", acc=0.5 + place / 100)
        kl = far.get(f"t{place}", 1.0)
        more = {"kl_text": kl, "kl_tasks": 2 * kl, "gold_logprob_mean": -float(place)}
        spent = [asdict(StageReport(name, seconds)) for name, seconds in (("perplexity", 2.0), ("zero_shot", 3.0))]
        spent = [
            {name: value for name, value in stage.items() if name not in ("metrics", *PER_ITEM)} for stage in spent
        ]
        records.append(replace(one, metrics=one.metrics | more, stages=spent, elapsed_time_s=10.0))
    return experiment(folder, records, planned=[f"taylor-s{16 + place}-n8" for place in range(10)])


def test_one_that_is_far_off_is_stopped_from_the_sixth_place_on(tmp_path: Path) -> None:
    """In half of the orders, then: the most accurate, if it is that one. Half of its ten seconds are saved, of a hundred."""
    ((name, trials),) = groups([str(trials_of(tmp_path / "one", t9=4.0))])
    row = replay(name, trials, ORDERS)
    lost = row["winners_stopped"]
    assert (name, row["trials"], lost["kl"], lost["gold_logprob"]) == ("tiny", 10, 0, 0)
    assert lost["accuracy"] == pytest.approx(ORDERS / 2, abs=4 * math.sqrt(ORDERS) / 2)
    assert row["stopped_share"] == pytest.approx(lost["accuracy"] / ORDERS / 10)
    assert row["seconds_saved_share"] == pytest.approx(row["stopped_share"] / 2)
    assert replay(name, trials, ORDERS) == row and replay(name, trials, ORDERS, seed=1) != row
    without = trials.drop(columns=["zero_shot_duration_s", "perplexity_duration_s"])
    assert replay(name, without, 10)["seconds_saved_share"] is None


def test_the_winners_are_the_best_of_each_measure(tmp_path: Path) -> None:
    ((_, trials),) = groups([str(trials_of(tmp_path / "one", t4=0.5))])
    chosen = {name: trials.loc[place, "seq_len"] for name, place in winners(trials).items()}
    assert chosen == {"accuracy": 25, "gold_logprob": 16, "kl": 20}
    trials.loc[trials["seq_len"] == 25, ["success", "status"]] = [False, "stopped_early"]
    assert trials.loc[winners(trials)["accuracy"], "seq_len"] == 24


def test_draws_are_replayed_apart(tmp_path: Path) -> None:
    table = pd.read_csv(GRID)
    pd.concat([table, table.assign(seed=1)]).to_csv(tmp_path / "both.csv", index=False)
    assert [(name, len(trials)) for name, trials in groups([str(tmp_path / "both.csv")])] == [
        ("both", 45),
        ("both draw 1", 45),
    ]


def test_trials_without_kl_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pd.read_csv(GRID).drop(columns=["kl_text", "kl_tasks"])
    table.to_csv(tmp_path / "old.csv", index=False)
    with pytest.raises(UserError, match="no trial of old has both kl_text and kl_tasks"):
        list(groups([str(tmp_path / "old.csv")]))
    assert exit_code(lambda: main([str(tmp_path / "old.csv")])) == 2
    assert capsys.readouterr().err.startswith("error: no trial of old has both")


def test_the_page_has_what_the_studys_grid_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(GRID), "--output", str(tmp_path / "replay.json")])
    found = json.loads((tmp_path / "replay.json").read_text(encoding="utf-8"))
    (row,) = found["replays"]
    assert (found["factor"], found["fewest"], row["trials"], row["orders"]) == (1.5, 5, 45, 1000)
    stopped, saved = (f"{row[name]:.1%}" for name in ("stopped_share", "seconds_saved_share"))
    assert re.search(rf"^grid +45 +{stopped} +0 +0 +0 +{saved}$", capsys.readouterr().out, re.MULTILINE)
    assert row["winners_stopped"] == {"accuracy": 0, "gold_logprob": 0, "kl": 0}
    page = (ROOT / "docs" / "studies" / "methods.md").read_text(encoding="utf-8")
    assert f"| SmolLM2-135M ([grid.csv](smollm2-135m/grid.csv)) | 45 | {stopped} | {saved} | none |" in page
