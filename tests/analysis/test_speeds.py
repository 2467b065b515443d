"""Measured speeds in the analysis: the rule, the table and the figure, of an experiment's trials with speeds made by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from tune_prune.analysis.figures.figures import draw_all
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables, write_tables
from tune_prune.commands import analysis
from tune_prune.core.speed_records import Conditions, Rounds, SpeedRecord, write_speed
from tune_prune.core.store import FolderStore

FINISHED = Path(__file__).parents[1] / "finished"
DENSE = Rounds([2.0, 2.0, 2.0], [6.0, 6.0, 6.0])


def conditions(repeats: int = 3) -> Conditions:
    return Conditions(512, 64, 1, repeats, "float32", "CPU, 2 threads", "2.13.0")


def record(key: str, prefill: list[float], decode: list[float], at: str = "2026-01-02") -> SpeedRecord:
    dense = Rounds(DENSE.prefill_s[: len(prefill)], DENSE.decode_s[: len(decode)])
    return SpeedRecord(key, conditions(len(prefill)), dense, Rounds(prefill, decode), 1024, 1280, False, at)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    name = "tiny-llama-20-smoke-limit5"
    return Path(shutil.copytree(FINISHED / "storage" / name, tmp_path / name))


def keys(findings: Findings) -> list[str]:
    """Of the trials, the most accurate first."""
    return findings.models["tiny-llama"].eligible["key"].tolist()


@pytest.fixture
def measured(experiment: Path) -> Path:
    """With speeds of the three most accurate: the third is twice as fast in all, the others as fast as the dense model; and an
    older one of the fourth, under other conditions, of ten times the speed."""
    first, second, third, fourth = keys(find(read_study([experiment], [])))[:4]
    store = FolderStore(experiment)
    write_speed(store, record(first, [2.0, 2.0, 2.0], [6.0, 6.0, 6.0]))
    write_speed(store, record(second, [1.0, 2.0, 4.0], [6.0, 6.0, 6.0]))
    write_speed(store, record(third, [1.0, 1.0, 0.5], [3.0, 3.0, 2.0]))
    write_speed(store, record(fourth, [0.2], [0.6], at="2026-01-01"))
    return experiment


def test_the_rule_weighs_what_is_retained_with_seconds(measured: Path) -> None:
    found = find(read_study([measured], []), "retained-per-second").models["tiny-llama"]
    rows = found.eligible
    retained = rows["acc_mean"] / found.model.baseline["acc_mean"]
    assert rows["retained_per_second"].iloc[:3].tolist() == pytest.approx([*retained[:2], 2 * retained.iloc[2]])
    assert rows["retained_per_second"].iloc[3:].isna().all()
    assert found.best["name"] == rows["name"].iloc[2] and rows["acc_mean"].iloc[2] > rows["acc_mean"].iloc[0] / 2
    assert found.cross_fit is not None and set(found.cross_fit.chosen) <= set(rows["name"].iloc[:3])


@pytest.mark.slow
def test_the_table_has_what_was_measured_beside_the_dense_model(measured: Path, tmp_path: Path) -> None:
    findings = find(read_study([measured], []))
    found = findings.models["tiny-llama"]
    table = all_tables(findings)["pareto"]
    dense, first, second, third = table.rows
    assert [row["config"] for row in table.rows] == ["dense", *found.eligible["name"].iloc[:3]]
    assert (dense["prefill"], dense["decode"], dense["kv_bytes_per_token"], dense["pareto"]) == (1, 1, 1280, None)
    assert (second["prefill"], second["prefill_lowest"], second["prefill_highest"]) == (1.0, 0.5, 2.0)
    assert (third["prefill"], third["decode"], third["decode_highest"]) == (2.0, 2.0, 3.0)
    assert third["retained_per_second"] == pytest.approx(2 * third["retained"]) and first["kv_bytes_per_token"] == 1024
    yes = [row["pareto"].kind == "within_yes" for row in (first, second, third)]
    assert yes == [name in found.chosen["pareto"] for name in found.eligible["name"].iloc[:3]]
    texts = {
        path.suffix: path.read_text(encoding="utf-8")
        for path in write_tables(findings, tmp_path)
        if path.stem == "pareto"
    }
    assert "512" in texts[".md"] and "CPU, 2 threads" in texts[".md"]
    assert pd.read_csv(tmp_path / "pareto.csv")["prefill_highest"].tolist()[2:] == [2.0, 4.0]
    assert {path.name for path in draw_all(findings, tmp_path / "figures")} >= {"pareto.png", "pareto.pdf"}


def test_without_speeds_there_is_neither(experiment: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    findings = find(read_study([experiment], []))
    assert "pareto" not in all_tables(findings)
    assert "pareto.png" not in {path.name for path in draw_all(findings, tmp_path / "figures")}
    told = refused(analysis.main, experiment, "--rule", "retained-per-second", "--output", tmp_path / "out")
    assert "needs a speed, as tune-prune speed --config FOLDER measures it" in told
    assert "use --rule accuracy" in told


def test_a_damaged_speed_is_a_problem_and_not_the_end(measured: Path) -> None:
    third = keys(find(read_study([measured], [])))[2]
    (file,) = (measured / "speed").glob(f"{third}-*")
    file.write_text(file.read_text(encoding="utf-8").replace("3.0", "0.3"), encoding="utf-8")
    findings = find(read_study([measured], []))
    assert len(all_tables(findings)["pareto"].rows) == 3
    assert any(str(file) in problem.where for problem in findings.models["tiny-llama"].model.problems)
