"""Several draws of calibration samples: means and errors against plain loops, coverage by simulation, the race over draws."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.messages import cell_text, format_message
from tune_prune.analysis.statistics.comparison import PairedScores
from tune_prune.analysis.statistics.cross_fit import by_draw, cross_fit
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.draws import DrawVariance, interaction, next_draws, pooled
from tune_prune.analysis.statistics.findings import ModelFindings, find
from tune_prune.analysis.tables.all_tables import all_tables

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import simulate_draws

SEVERAL = {"blockwise-s64-n512": 3, "blockwise-s64-n128": 3, "layerwise-s64-n512": 2}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return read_study(
        [simulated_study(tmp_path_factory.mktemp("draws"), models=("alpha",), items=60, draws=SEVERAL)], []
    )


@pytest.fixture(scope="module")
def findings(study):
    return find(study)


@pytest.fixture(scope="module")
def found(findings) -> ModelFindings:
    return findings.models["alpha"]


def trials_of(found: ModelFindings, name: str) -> pd.DataFrame:
    rows = found.model.rows
    return rows[(rows["name"] == name) | rows["name"].str.startswith(f"{name}-r")].sort_values("name")


def test_a_configuration_is_the_mean_of_its_draws(found: ModelFindings) -> None:
    assert len(found.eligible) == 18 and len(found.model.rows) == len(found.trials) == 18 + 2 + 2 + 1
    assert found.eligible["acc_mean"].is_monotonic_decreasing
    for name, count in SEVERAL.items():
        row, own = found.named(name), trials_of(found, name)
        assert len(own) == row["draws"] == count
        assert row["acc_mean"] == pytest.approx(sum(own["acc_mean"]) / count)
        assert row["acc_boolq"] == pytest.approx(sum(own["acc_boolq"]) / count)
        assert row["ppl"] == pytest.approx(math.prod(own["ppl"]) ** (1 / count))
        assert row["params_count"] == 80_000 and pd.isna(row["seed"]) and row["key"] == own["key"].iloc[0]
    assert set(found.eligible["draws"]) == {1, 2, 3}


def test_errors_are_those_of_items_and_draws(found: ModelFindings) -> None:
    """By plain loops: of three draws the items' error is of mean scores, the draws' what the items do not tell."""
    squares, interactions, freedom = 0.0, 0.0, 0
    for name, count in SEVERAL.items():
        items = np.stack([read_items(folder).to_numpy(float) for folder in trials_of(found, name)["output_dir"]])
        by_task = items.reshape(count, 7, 60)
        accuracy = by_task.mean(axis=(1, 2))
        squares += sum((value - accuracy.mean()) ** 2 for value in accuracy)
        for task in range(7):
            for draw in range(count):
                for item in range(60):
                    rest = by_task[draw, task, item] - by_task[:, task, item].mean()
                    rest -= by_task[draw, task].mean() - by_task[:, task].mean()
                    interactions += rest**2 / 59 / 60 / 49
        freedom += count - 1
    between = found.draw_variance
    assert (between.freedom, between.mean_square) == (freedom, pytest.approx(squares / freedom))
    assert between.interaction == pytest.approx(interactions / freedom)
    assert between.variance == pytest.approx(max(0, (squares - interactions) / freedom))
    for name in (*SEVERAL, "taylor-s16-n128"):
        row = found.named(name)
        items = np.mean([read_items(folder).to_numpy(float) for folder in trials_of(found, name)["output_dir"]], axis=0)
        of_items = math.sqrt(sum(part.var(ddof=1) / 60 for part in items.reshape(7, 60))) / 7
        assert row["acc_mean_stderr"] == pytest.approx(math.hypot(of_items, math.sqrt(between.variance / row["draws"])))
        place = found.eligible.index.get_loc(row.name)
        assert math.sqrt(found.comparison.variances[place]) == pytest.approx(row["acc_mean_stderr"])


def test_every_difference_has_both_parts(findings, found: ModelFindings) -> None:
    first, second = found.eligible.iloc[0], found.named("taylor-s16-n128")
    gap = difference(first, second, findings.items)
    place = found.eligible.index.get_loc(second.name)
    assert gap.basis == "paired" and gap.points == pytest.approx(-second["difference_points"])
    assert gap.stderr_points == pytest.approx(second["difference_stderr_points"])
    assert gap.stderr_points > 100 * math.sqrt(found.draw_variance.variance)  # one draw against several
    assert found.comparison.half_width(0, place) > 1.8 * gap.stderr_points / 100
    assert found.cross_fit.stderr > found.named(found.best["name"])["draw_stderr"]


def test_one_draw_everywhere_is_as_it_was(tmp_path: Path) -> None:
    found = find(read_study([simulated_study(tmp_path, models=("alpha",), items=20)], [])).models["alpha"]
    assert found.draw_variance is None and not found.draws and set(found.eligible["draws"]) == {1}
    recorded = found.model.rows.set_index("name")["acc_mean_stderr"]
    assert (found.eligible.set_index("name")["acc_mean_stderr"] == recorded[found.eligible["name"]]).all()
    assert "seeds_one" in {message.kind for message in found.warnings}


def test_tables_and_sentences_say_what_is_of_one_draw(findings, found: ModelFindings, tmp_path: Path) -> None:
    tables = all_tables(findings)
    draws = tables["draws"]
    assert [row["draws"] for row in draws.rows] == [SEVERAL[row["name"]] for row in draws.rows]
    seeds = [column.key for column in draws.columns if column.key.startswith("seed_")]
    assert seeds == ["seed_0", "seed_1", "seed_2"]
    for row in draws.rows:
        own = trials_of(found, row["name"])["acc_mean"].tolist()
        assert [row[seed] for seed in seeds if seed in row] == own
        assert row["low"] < row["acc_mean"] < row["high"]
    trials, accuracy = tables["trials"], next(c for c in tables["trials"].columns if c.key == "acc_mean")
    assert len(trials.rows) == 18  # no draw is a row beside its configuration
    marked = {row["name"] for row in trials.rows if cell_text(accuracy, row).endswith("‡")}
    assert marked == {row["name"] for row in trials.rows if row["draws"] == 1} and len(marked) == 15
    told = {message.kind: format_message(message) for message in found.warnings}
    assert "seeds_one" not in told and "15 of 18" in told["one_draw"] and "few_draws" in told


def test_a_winner_of_one_draw_is_called_so(tmp_path: Path) -> None:
    path = simulated_study(tmp_path, models=("alpha",), items=40, draws={"taylor-s16-n128": 2, "taylor-s16-n512": 2})
    found = find(read_study([path], [])).models["alpha"]
    leads = next(message for message in found.warnings if message.kind == "one_draw_leads")
    assert found.best["name"] in leads.values["names"] and found.best["draws"] == 1


def test_a_configuration_with_a_stopped_draw_is_not_eligible(study) -> None:
    model = study.models["alpha"]
    rows = model.rows.copy()
    stopped = rows.index[rows["name"] == "blockwise-s64-n512-r1"]
    rows.loc[stopped, ["status", "success"]] = ["stopped_early", False]
    changed = find(replace(study, models={"alpha": replace(model, rows=rows)}))
    found = changed.models["alpha"]
    assert "blockwise-s64-n512" not in set(found.eligible["name"]) and len(found.eligible) == 17
    states = {(row["name"], row["state"]) for row in all_tables(changed)["trials"].rows}
    assert {("blockwise-s64-n512", "complete"), ("blockwise-s64-n512-r1", "stopped early")} <= states


def test_cross_fitting_leaves_the_draw_out() -> None:
    """One configuration is right by its first draw alone: chosen by it, it is scored by the other one."""
    index = pd.MultiIndex.from_product([["a"], range(10)], names=["task", "doc_id"])
    draws = [[pd.Series(np.ones(10), index), pd.Series(np.zeros(10), index)], [pd.Series(np.full(10, 0.4), index)]]
    scores = PairedScores({"a": np.column_stack([np.full(10, 0.5), np.full(10, 0.4)])}, np.arange(2))
    tables = by_draw(scores, [2, 1], draws)
    fit = cross_fit(scores, ["x", "y"], lambda values: int(values.argmax()), np.random.default_rng(0), tables)
    assert fit.naive == 0.5 and fit.corrected == pytest.approx(0.2)  # 0 where x is chosen, .4 where y is
    assert fit.chosen == {"x": 0.5, "y": 0.5}


def test_interaction_is_that_of_known_components() -> None:
    """Scores of known parts: the mean square between draws is Var(b) + Var(e)/n, and the interaction its second part."""
    generator, parts = np.random.default_rng(0), []
    for _ in range(400):
        effect, items = 0.03 * generator.standard_normal((3, 1)), generator.standard_normal(100)
        scores = effect + items + 0.5 * generator.standard_normal((3, 100))
        parts.append((scores.mean(axis=1), interaction({"a": scores})["acc_mean"]))
    between = pooled(parts)
    assert between.freedom == 800 and between.interaction == pytest.approx(0.0025, rel=0.02)
    assert between.variance == pytest.approx(0.0009, rel=0.25)
    assert np.median(between.sampled(generator, 4000)) == pytest.approx(between.variance, rel=0.1)
    assert DrawVariance(1.0, 2.0, 3).variance == 0


@pytest.mark.parametrize(("who", "draws", "ratio"), [("all", 2, 1.0), ("four of 12", 3, 2.0), ("all", 3, 0.0)])
def test_intervals_cover_and_the_set_holds_the_best(who: str, draws: int, ratio: float) -> None:
    """A short form of scripts/simulate_draws.py; docs/draws.md has its whole table."""
    repeats = 60
    held = simulate_draws.coverage(who, draws, ratio, 0.0, repeats, np.random.default_rng(1), 250)
    error = math.sqrt(0.95 * 0.05 / repeats)
    for name in ("mean", "mean of the last", "difference", "to the last", "set"):
        assert held[name] > 0.95 - 3 * error, name
    together = np.mean([held[name] for name in ("mean", "mean of the last", "difference", "to the last")])
    assert 0.9 < together < 0.99


def test_the_race_over_draws() -> None:
    generator = np.random.default_rng(0)
    accuracies = np.array([0.50, 0.60, 0.40, 0.595, 0.30, 0.10])
    first, _ = next_draws(accuracies, np.ones(6, int), 3, None, generator)
    assert np.flatnonzero(first).tolist() == [0, 1, 2, 3]  # the four most accurate
    counts = np.array([2, 2, 2, 2, 1, 1])
    tight = DrawVariance(0.01**2, 0.0, 40)
    wanted, chances = next_draws(accuracies, counts, 3, tight, generator)
    assert np.flatnonzero(wanted).tolist() == [1, 3] and chances.sum() == pytest.approx(1)
    wide = DrawVariance(1.0, 0.0, 40)
    assert next_draws(accuracies, counts, 3, wide, generator)[0].all()  # those that were out come back
    assert not next_draws(accuracies, np.full(6, 3), 3, wide, generator)[0].any()


def test_few_draws_find_the_winner_of_all() -> None:
    found = simulate_draws.adaptive(60, 3, 0.007, 12, np.random.default_rng(2))
    assert found["lost"] == 0 and found["share"] < 0.8
