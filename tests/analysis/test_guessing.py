"""Accuracies that may come from guessing, and those of 0 and 1, which are not certain: their standard errors say so."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from statsmodels.stats.proportion import proportion_confint

from tests import findings as simulated
from tests.findings import published_findings, simulated_findings, simulated_study
from tests.small_experiments import csv
from tune_prune.analysis.input.items import guessing, read_items
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.comparison import PairedScores
from tune_prune.analysis.statistics.cross_fit import cross_fit
from tune_prune.analysis.statistics.findings import find
from tune_prune.core.ledger import Ledger, read_baselines
from tune_prune.core.measures import wilson_interval, wilson_stderr
from tune_prune.core.store import ITEMS, FolderStore
from tune_prune.evaluation.item_scores import ItemScore, to_parquet


def test_guessing_is_what_the_items_say(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), items=150).models["alpha"]
    guess = found.guessing
    assert guess.loc["boolq", ["chance", "majority"]].tolist() == [0.5, 0.6]  # three of five answers are yes
    assert guess.loc["piqa", "chance"] == 0.5 and guess.loc["hellaswag", "chance"] == 0.25
    assert math.isnan(guess.loc["piqa", "majority"])
    assert guess.loc["piqa", "threshold"] == pytest.approx(0.5 + 2 * math.sqrt(0.25 / 150))
    levels = np.array([0.6, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])
    mean = levels.mean() + 2 * math.sqrt((levels * (1 - levels) / 150).sum()) / 7
    assert guess.loc["mean", "threshold"] == pytest.approx(mean)
    assert (guess.loc["mean", "items"], guess.loc["piqa", "items"]) == (1050, 150)


def test_without_items_it_is_what_holds_of_the_seven_tasks() -> None:
    table = guessing(["boolq", "arc_easy", "own"], "", {"protocol": {"limit": 100}})
    assert table.loc["boolq", "majority"] == pytest.approx(0.6217, abs=1e-4)  # yes, in the validation split
    assert table.loc["arc_easy", "threshold"] == pytest.approx(0.25 + 2 * math.sqrt(0.25 * 0.75 / 100))
    assert table.loc[["own", "mean"], "threshold"].isna().all()


@pytest.mark.parametrize(
    ("likelihoods", "golds", "chance"),
    [
        ((-2.0, -1.0), (-1, 0), math.nan),  # several choices are right
        ((-2.0,), (-1, -1), 0.0),  # an answer that is only asked for, as LAMBADA's, cannot be guessed
    ],
)
def test_chance_of_items_without_a_single_right_choice(likelihoods, golds, chance, tmp_path):
    items = [
        ItemScore("own", index, 0, float(index % 3 > 0), None, likelihoods, golds[index % 2]) for index in range(30)
    ]
    (tmp_path / ITEMS).write_bytes(to_parquet(items))
    table = guessing(["own"], str(tmp_path), None)
    assert table.loc[["own", "mean"], ["chance", "threshold"]].to_numpy().ravel() == pytest.approx(
        [chance] * 4, nan_ok=True
    )


def test_accuracy_retained_is_not_given_where_the_dense_model_is_at_chance(tmp_path: Path) -> None:
    found = simulated_findings(tmp_path, models=("alpha",), items=150).models["alpha"]
    dense = found.model.baseline
    assert found.retained(0.5) == pytest.approx(0.5 / dense["acc_mean"])
    found.model.baseline["acc_piqa"] = 0.55  # type: ignore[index]
    assert found.tasks.loc["piqa"].isna()["retained"] and found.tasks["retained"].notna().sum() == 7
    found.model.baseline["acc_mean"] = 0.39  # type: ignore[index]
    assert found.retained(0.5) is None
    assert next(found.warnings.__iter__()).kind == "dense_at_chance"


def test_published_boolq_is_marked_below_the_more_frequent_answer() -> None:
    """The run at 16 tokens answers 49% of boolq: below "always yes"."""
    found = published_findings().models["Llama"]
    worst = found.eligible[found.eligible["name"] == "taylor-s16-n128"].iloc[0]
    assert found.at_chance(worst["acc_boolq"], "boolq") and not found.at_chance(found.best["acc_boolq"], "boolq")
    assert not found.at_chance(worst["acc_mean"])


def test_the_mean_over_fewer_tasks_is_judged_by_those(tmp_path: Path) -> None:
    """An accuracy of .4 over a task with four choices is no guess, though it were one over all seven, and .55 over one with two."""
    header = "method,seq_len,num_samples,pruning_ratio,acc_{0},acc_{0}_stderr,acc_mean,acc_mean_stderr\n"
    for task, accuracy, level, guessed in (("arc_easy", 0.4, 0.25, False), ("piqa", 0.55, 0.5, True)):
        error = math.sqrt(accuracy * (1 - accuracy) / 99)  # of 100 items
        row = f"taylor,16,8,0.2,{accuracy},{error},{accuracy},{error}"
        found = find(read_study([], [("m", csv(tmp_path, row, header=header.format(task)))])).models["m"]
        assert found.model.tasks == [task] and list(found.guessing.index) == [task, "mean"]
        assert found.guessing.loc["mean", "threshold"] == pytest.approx(
            level + 2 * math.sqrt(level * (1 - level) / 100)
        )
        assert found.at_chance(accuracy) == guessed


COUNT, TASKS = 150, 7


@pytest.mark.parametrize("items", [1, 5, 240, 10042])
def test_error_and_interval_are_wilsons(items: int) -> None:
    for right in (0, items):
        low, high = proportion_confint(right, items, method="wilson")
        assert wilson_interval(right / items, items) == pytest.approx((low, high), abs=1e-6)
        assert wilson_stderr(items) == pytest.approx((high - low) / 2 / 1.959964, rel=1e-6)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration, nor the dense model, answers an item of boolq."""
    monkeypatch.setitem(simulated.TASK_LEVELS, "boolq", -math.inf)
    return simulated_study(tmp_path, models=("alpha",), items=COUNT, failed=["taylor-s16-n128"])


def test_a_task_without_a_right_answer_adds_its_error_to_what_was_recorded(experiment: Path) -> None:
    found = find(read_study([experiment], [])).models["alpha"]
    rows, added = found.eligible.set_index("key"), wilson_stderr(COUNT) ** 2 / TASKS**2
    records = [record for record in Ledger(FolderStore(experiment)).records() if record.status == "complete"]
    assert len(records) == len(rows) == 17
    for record in records:
        assert record.metrics["acc_boolq"] == record.metrics["acc_boolq_stderr"] == 0
        row = rows.loc[record.key]
        assert row["acc_boolq_stderr"] == wilson_stderr(COUNT)
        assert row["acc_mean_stderr"] == pytest.approx(math.sqrt(record.metrics["acc_mean_stderr"] ** 2 + added))
        assert row["acc_piqa_stderr"] == record.metrics["acc_piqa_stderr"]
    dense, recorded = found.model.baseline, read_baselines(FolderStore(experiment))["alpha"].metrics
    assert dense["acc_mean_stderr"] == pytest.approx(math.sqrt(recorded["acc_mean_stderr"] ** 2 + added))
    assert {name for name in recorded if dense[name] != recorded[name]} == {"acc_mean_stderr", "acc_boolq_stderr"}


def test_cross_fitted_it_has_that_error_too(experiment: Path) -> None:
    """The bootstrap draws from items that are all wrong. With one configuration chosen everywhere it is the whole error."""
    found = find(read_study([experiment], []), "perplexity").models["alpha"]
    assert found.cross_fit is not None
    assert found.cross_fit.stderr == pytest.approx(found.best["acc_mean_stderr"], rel=0.3)  # 7% is the bootstrap's own
    everything = PairedScores({"one": np.ones((6, 2)), "two": np.ones((3, 2))}, np.arange(2))
    fit = cross_fit(everything, ["a", "b"], lambda accuracies: 0, np.random.default_rng(0))
    assert fit is not None and fit.stderr == pytest.approx(math.hypot(wilson_stderr(6), wilson_stderr(3)) / 2)


def test_a_mean_of_draws_has_the_error_of_certainty_only_where_all_of_them_are_right(tmp_path, monkeypatch):
    """Else its error is that of the items' means, item by item; and what draws add."""
    monkeypatch.setitem(simulated.TASK_LEVELS, "boolq", 0.385)
    names = ("blockwise-s64-n512", "blockwise-s64-n128", "layerwise-s64-n512")
    study = simulated_study(tmp_path, models=("alpha",), items=30, draws=dict.fromkeys(names, 3), draw_sd=0.005)
    found, mixed, whole = find(read_study([study], [])).models["alpha"], 0, 0
    between = found.draw_variances["acc_boolq"].variance / 3
    for name in names:
        row = found.named(name)
        own = found.draws[row.name]["output_dir"]
        scores = np.mean([read_items(folder).loc["boolq"] for folder in own], axis=0)
        certain = scores.min() == scores.max() == 1
        error = wilson_stderr(30) if certain else scores.std(ddof=1) / math.sqrt(30)
        assert row["acc_boolq_stderr"] == pytest.approx(math.hypot(error, math.sqrt(between)))
        mixed += not certain and any(read_items(folder).loc["boolq"].all() for folder in own)
        whole += certain
    assert mixed and whole


def test_sizes_are_what_other_errors_of_the_task_tell(tmp_path: Path) -> None:
    rows = pd.DataFrame({"seq_len": 16, "num_samples": [4, 128, 512], "method": "taylor", "pruning_ratio": 0.2})
    rows["acc_mean"] = rows["acc_boolq"] = [1.0, 0.75, 0.0]
    rows["acc_mean_stderr"] = rows["acc_boolq_stderr"] = [0.0, math.sqrt(0.75 * 0.25 / 39), 0.0]
    rows.to_csv(tmp_path / "results.csv", index=False)
    found = find(read_study([], [("M", tmp_path / "results.csv")])).models["M"].eligible
    expected = [wilson_stderr(40), math.sqrt(0.75 * 0.25 / 39), wilson_stderr(40)]
    assert found["acc_boolq_stderr"].tolist() == found["acc_mean_stderr"].tolist() == expected
