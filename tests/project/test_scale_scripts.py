"""The simulated cluster: every trial once, none before what it needs, no faster than is possible; and it says what it is. And the
synthetic experiments: a search takes them for its own."""

from __future__ import annotations

import contextlib
import io
import json
from argparse import Namespace
from pathlib import Path

import bench_scale
import pytest
import simulate_cluster

from tune_prune.tuning.work import PrepareJob, TrialSpec


def test_trials_wait_for_their_statistics_and_all_are_done(tmp_path: Path) -> None:
    costs, specs = simulate_cluster.specs_of(135)
    args = Namespace(seed=0, jitter=0.1, controller_ms=10.0, no_files=False)
    cluster = simulate_cluster.Cluster(costs, specs, 16, tmp_path, args)
    makespan = cluster.run()
    jobs = {(work.run, work.samples): ended for work, ended in cluster.ended.items() if isinstance(work, PrepareJob)}
    assert len(jobs) == 3 * (5 + 1)
    trials = [work for work in cluster.began if isinstance(work, TrialSpec)]
    assert sorted(work.key for work in trials) == sorted(spec.key for spec in specs)
    assert all(cluster.began[work] >= jobs[work.run, work.config.samples] for work in trials)
    assert {record.key for record in cluster.settings.ledger.records()} == {spec.key for spec in specs}
    assert cluster.work_s / 16 <= cluster.bound() <= makespan


@pytest.mark.slow
def test_sixteen_nodes_reach_nine_tenths_of_the_ideal_where_there_is_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "simulated.json"
    assert simulate_cluster.main(["--nodes", "16", "--trials", "135,2000", "--no-files", "--output", str(output)]) == 0
    few, many = json.loads(output.read_text())["simulated"]
    assert few["gpus"] == many["gpus"] == 128
    assert few["efficiency"] < 0.75  # 135 trials on 128 GPUs: some GPU has two, most have one
    assert many["efficiency"] >= 0.9
    assert "A simulation" in capsys.readouterr().out


@pytest.mark.slow
def test_a_synthetic_experiment_is_a_finished_search(tmp_path: Path) -> None:
    folder = bench_scale.make(tmp_path, 40, limit=5)
    argv = bench_scale.search_argv(tmp_path, 40, "--limit", "5")
    with contextlib.redirect_stdout(io.StringIO()):
        for part in ("start", "message", "end", "status"):
            bench_scale.PARTS[part](folder, argv)()
    written = {path.name for path in folder.iterdir() if path.is_file()}
    assert {"global_best_config.json", "all_methods_results.csv"} <= written
    assert len((folder / "all_methods_results.csv").read_text().splitlines()) == 1 + 40
