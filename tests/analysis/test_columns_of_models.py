"""Tables with a column for each model: what stands in it whatever the model is called, and what is not pooled over models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from tests.findings import simulated_findings, simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.final_table import final_table


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
