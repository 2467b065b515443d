"""Trained configurations beside the same ones untrained; everywhere else the two are models of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_findings, simulated_study
from tune_prune.analysis.input.measures import gold_logprobs
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.final_table import final_table
from tune_prune.analysis.tables.sizes import by_size
from tune_prune.core.config import ZERO_SHOT_TASKS

GAINS = {"taylor-s64-n512": 0.04, "blockwise-s64-n512": 0.03, "layerwise-s256-n512": -0.02}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return simulated_findings(tmp_path_factory.mktemp("recovery"), models=("alpha",), trained=GAINS)


def test_trained_models_are_a_group_of_their_own(findings) -> None:
    assert list(findings.models) == ["alpha", "alpha+lora"]
    untrained, trained = findings.models.values()
    assert (len(untrained.eligible), len(trained.eligible)) == (18, 3)
    assert {name.endswith("-lora") for name in trained.eligible["name"]} == {True}
    assert {name.endswith("-lora") for name in untrained.eligible["name"]} == {False}
    assert trained.model.base == untrained.model.base == "alpha" and trained.model.series == "alpha+lora"
    assert by_size(findings) is None  # a training is no other size
    for key, table in all_tables(findings).items():
        of_untrained = [row for row in table.rows if row.get("model") == "alpha" and key != "transfer"]
        assert not [row for row in of_untrained if "lora" in str(row.get("name", ""))], key


def test_each_is_shown_beside_itself_untrained(findings) -> None:
    table = all_tables(findings)["recovery"]
    assert [row["config"] for row in table.rows] == [
        name.removesuffix("-lora") for name in findings.models["alpha+lora"].eligible["name"]
    ]
    untrained, trained = (found.eligible.set_index("name") for found in findings.models.values())
    for row in table.rows:
        before, after = untrained.loc[row["config"]], trained.loc[f"{row['config']}-lora"]
        assert (row["before_acc_mean"], row["acc_mean"]) == (before["acc_mean"], after["acc_mean"])
        scores = [
            pd.read_parquet(Path(one["output_dir"]) / "items.parquet").set_index(["task", "doc_id"])["score"]
            for one in (before, after)
        ]
        gaps = (scores[1].astype(float) - scores[0]).groupby(level="task")
        assert row["gain"] == pytest.approx(100 * gaps.mean().mean())
        errors = gaps.std() / np.sqrt(gaps.count())
        assert row["gain_stderr"] == pytest.approx(100 * np.sqrt((errors**2).sum()) / len(ZERO_SHOT_TASKS))
        assert row["gain"] == pytest.approx(100 * GAINS[row["config"]], abs=4 * row["gain_stderr"])
    assert "Training after pruning, gain in points" in final_table(findings)


def test_what_a_training_changes_in_the_other_measures_has_the_error_of_the_same_items(tmp_path: Path) -> None:
    path = simulated_study(tmp_path, models=("alpha",), trained=GAINS)
    for number, file in enumerate(sorted(path.glob("trials/*/items.parquet"))):
        items, generator = pd.read_parquet(file), np.random.default_rng(number)
        items["loglikelihoods"] = [generator.normal(-5, 1, len(own)) for own in items["loglikelihoods"]]
        items.to_parquet(file)
    found = find(read_study([path], []))
    untrained, trained = (one.eligible.set_index("name") for one in found.models.values())
    rows = all_tables(found)["recovery"].rows
    assert len(rows) == len(GAINS)
    for row in rows:
        folders = (untrained.loc[row["config"]]["output_dir"], trained.loc[f"{row['config']}-lora"]["output_dir"])
        before, after = map(gold_logprobs, folders)
        gaps = (after - before).groupby(level="task")
        assert row["gold_logprob_mean_change"] == pytest.approx(gaps.mean().mean())
        error = np.sqrt((gaps.var() / gaps.count()).sum()) / len(ZERO_SHOT_TASKS)
        assert row["gold_logprob_mean_change_stderr"] == pytest.approx(error) and error > 0


def test_a_trained_configuration_alone_has_no_gain(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), trained=GAINS, failed=["taylor-s64-n512"])
    assert {row["config"] for row in all_tables(found)["recovery"].rows} == set(GAINS) - {"taylor-s64-n512"}


def test_without_training_there_is_no_such_table(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",))
    assert "recovery" not in all_tables(found) and "Training after" not in final_table(found)
