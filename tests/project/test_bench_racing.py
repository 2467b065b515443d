"""scripts/bench_racing.py replays a finished search by each rule, and the race by log-probabilities by these."""

from __future__ import annotations

from pathlib import Path

import bench_racing
import pandas as pd
import pytest

from tests.findings import published_folder, simulated_study


@pytest.mark.slow
def test_a_finished_search_is_replayed_by_both_measures(tmp_path: Path) -> None:
    folder = simulated_study(tmp_path, ("alpha",), items=300)
    for number, path in enumerate(sorted((folder / "trials").glob("*/items.parquet"))):
        items = pd.read_parquet(path).sort_values(["task", "doc_id"]).assign(slice=0)
        if number < 9:  # half of them: far behind on every right choice
            items["loglikelihoods"] = [[-9.0] * len(choices) for choices in items["loglikelihoods"]]
        items.to_parquet(path)
    grid = published_folder() / "consolidated_Llama_20" / "all_methods_results.csv"
    found = bench_racing.main(["--grid", str(grid), "--grids", "1", "--experiment", str(folder)])["replayed"]["alpha"]
    assert {name.partition(",")[0] for name in found} == {"race", "asha", "race-gold"}
    for name, row in found.items():
        if name.startswith("race-gold"):  # the other half are equal: none of these is stopped
            assert 0.5 < row["tokens"] < 0.75 and row["best_stopped"] == 0
        if name.startswith("race,"):
            assert row["tokens"] < 1 and row["best_stopped"] == 0 and row["same_winner"] == 1
