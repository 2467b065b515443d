"""Tables with a column for each model: what stands in it whatever the model is called, and what is not pooled over models."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest

from tests.findings import simulated_findings, simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.differences import transfer
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.final_table import final_table
from tune_prune.core.config import PruningConfig


def test_models_that_are_named_as_columns_are(tmp_path: Path) -> None:
    names = ("model", "name", "statistic", "title")
    made = all_tables(simulated_findings(tmp_path, models=names, items=10))
    assert [(row["model"], row["of_model"] is None) for row in made["transfer"].rows] == [
        (name, False) for name in names
    ]
    assert [column.label for column in made["transfer"].columns[2:6]] == [*names]
    for row in made["experiment_statistics"].rows:
        assert isinstance(row["statistic"], str) and isinstance(row["_title"], str)
    assert final_table(simulated_findings(tmp_path / "again", models=names, items=10)).count("Best for all: ") == 1


def test_trained_models_are_not_pooled_with_others(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), items=10, trained={"taylor-s16-n128": 0.02})
    rows = {row["statistic"]: row for row in all_tables(found)["experiment_statistics"].rows}
    assert rows["runs"]["of_All models"] == 19 and math.isnan(rows["mean"]["of_All models"])
    assert rows["mean"]["of_alpha"] == found.models["alpha"].eligible["acc_mean"].mean()


def test_ratios_are_not_pooled(tmp_path: Path) -> None:
    study = read_study([simulated_study(tmp_path, items=10)], [])
    label, other = study.models
    study.models[other] = replace(study.models[other], rows=study.models[other].rows.assign(pruning_ratio=0.3))
    rows = {row["statistic"]: row for row in all_tables(find(study))["experiment_statistics"].rows}
    assert math.isnan(rows["max"]["of_All models"]) and rows["max"][f"of_{label}"] > 0.5


TRAINED = PruningConfig("taylor", 32, 8, recovery="lora", recovery_steps=2)
LONGER = replace(TRAINED, recovery_steps=10)


def rows_of(accuracies: dict[PruningConfig, float]) -> pd.DataFrame:
    common = {"acc_mean_stderr": 0.01, "ppl": 2.0, "output_dir": ""}
    found = [{**asdict(one), **common, "name": one.name, "acc_mean": acc} for one, acc in accuracies.items()]
    return pd.DataFrame(found).sort_values("acc_mean", ascending=False, ignore_index=True)


def test_models_that_are_all_trained_are_compared_by_their_trainings() -> None:
    """Not by what each gained most from: another number of steps is another configuration."""
    eligible = {"a": rows_of({TRAINED: 0.90, LONGER: 0.85}), "b": rows_of({TRAINED: 0.8375, LONGER: 0.875})}
    best = {label: found.iloc[0] for label, found in eligible.items()}
    found = transfer(eligible, best, lambda _: None)
    assert found.losses["a"]["b"]["loss_points"] == pytest.approx(5)
    assert found.losses["b"]["a"]["loss_points"] == pytest.approx(3.75)
    assert found.best_for_all["config"] == TRAINED.name and found.best_for_all["num_candidates"] == 2
    assert found.best_for_all["acc_mean"] == pytest.approx((0.90 + 0.8375) / 2)


def test_a_trained_model_is_compared_with_others_by_what_was_trained() -> None:
    untrained = TRAINED.untrained()
    eligible = {"a": rows_of({untrained: 0.8}), "a+lora": rows_of({TRAINED: 0.9, LONGER: 0.85})}
    found = transfer(eligible, {label: rows.iloc[0] for label, rows in eligible.items()}, lambda _: None)
    assert found.losses["a"]["a+lora"]["name"] == untrained.name
    assert found.losses["a+lora"]["a"]["name"] == TRAINED.name
    assert found.best_for_all["config"] is None
