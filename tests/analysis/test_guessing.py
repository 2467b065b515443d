"""Accuracies that may come from guessing, and those of 0 and 1."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint

from tests.findings import published_findings, simulated_findings
from tests.small_experiments import csv
from tune_prune.analysis.input.items import guessing
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.messages import cell_text
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.tables.table import Column
from tune_prune.core.store import ITEMS
from tune_prune.evaluation.item_scores import ItemScore, summarize, to_parquet


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


def test_where_several_choices_are_right_chance_is_not_known(tmp_path: Path) -> None:
    items = [ItemScore("own", index, 0, 1.0, None, (-2.0, -1.0), index % 2 - 1) for index in range(30)]
    (tmp_path / ITEMS).write_bytes(to_parquet(items))
    table = guessing(["own"], str(tmp_path), None)
    assert table[["chance", "threshold"]].isna().all(axis=None)
    assert math.isnan(summarize(items)["chance_acc_mean"])


def test_an_answer_that_is_only_asked_for_cannot_be_guessed(tmp_path: Path) -> None:
    """lm-eval's type loglikelihood, such as LAMBADA's: one log-likelihood for an item."""
    items = [ItemScore("own", index, 0, float(index % 3 > 0), None, (-2.0,), -1) for index in range(30)]
    (tmp_path / ITEMS).write_bytes(to_parquet(items))
    table = guessing(["own"], str(tmp_path), None)
    assert table.loc["own", ["chance", "threshold"]].tolist() == [0.0, 0.0]
    assert table.loc["mean", ["chance", "threshold"]].tolist() == [0.0, 0.0]


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


@pytest.mark.parametrize(("right", "items"), [(0, 5), (5, 5), (0, 240), (240, 240)])
def test_all_or_none_right_has_wilsons_interval(right: int, items: int) -> None:
    column = Column("acc", "Accuracy", "acc", "stderr", items="items")
    text = cell_text(column, {"acc": right / items, "stderr": 0.0, "items": items})
    bounds = proportion_confint(right, items, method="wilson")
    low, high = (f"{bound:.4f}".replace("0.", ".", 1) for bound in bounds)
    assert text == f"{right / items:.4f} [{low}, {high}]".replace("0.0000 ", ".0000 ") and "±" not in text


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
