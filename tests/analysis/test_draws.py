"""Several draws of calibration samples: means and errors against plain loops, coverage by simulation, the race over draws."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import typed
from tune_prune.analysis.render.files import markdown_table
from tune_prune.analysis.render.page import render
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.render.report import report
from tune_prune.analysis.statistics import differences
from tune_prune.analysis.statistics import draws as of_draws
from tune_prune.analysis.statistics.comparison import PairedScores
from tune_prune.analysis.statistics.cross_fit import by_draw, cross_fit
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.draws import DrawVariance, draw_variance, interaction, next_draws, pooled
from tune_prune.analysis.statistics.findings import ModelFindings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.analysis.tables.final_table import final_table
from tune_prune.core.config import PruningConfig

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


def test_one_perplexity_for_several_runs_wherever_it_stands(tmp_path: Path) -> None:
    """20, 50 and 125 are 50, as 50^3 is their product: not 65, their arithmetic mean, nor any of them."""
    best = "blockwise-s64-n512"
    study = read_study([simulated_study(tmp_path, models=("alpha",), items=30, draws=SEVERAL)], [])
    rows = study.models["alpha"].rows
    own = rows.index[(rows["name"] == best) | rows["name"].str.startswith(f"{best}-r")]
    rows["ppl"], rows["extreme_pruning_layers"] = 300.0, 0.0
    rows.loc[own, ["ppl", "extreme_pruning_layers"]] = [[20.0, 1.0], [50.0, 1.0], [125.0, 1.0]]
    findings = find(study, "perplexity")
    found = findings.models["alpha"]
    assert found.best["name"] == best and found.best["ppl"] == pytest.approx(50, rel=1e-12)
    tables = all_tables(findings)
    texts = {
        "screen": final_table(findings),
        "report": report(findings),
        "page": re.sub(r'data-sort="[^"]*"', "", render(findings, [])),
        "paragraphs": paragraphs(findings)[0],
        **{key: markdown_table(tables[key]) for key in ("optimal_configurations", "selection_rules", "extreme_layers")},
    }
    for name, text in texts.items():
        assert re.search(r"\b50\.00\b", text) and not re.search(r"\b65\.00\b", text), name
    # Of several configurations, too
    rows.loc[rows.index.difference(own), "extreme_pruning_layers"] = 1.0
    (row,) = all_tables(find(study))["extreme_layers"].rows
    others = len(found.eligible) - 1
    assert row["ppl"] == pytest.approx((50 * 300**others) ** (1 / (others + 1)))


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


def test_a_draw_moves_the_tasks_of_a_mean_together(found: ModelFindings) -> None:
    """Where all tasks are informative, the mean over them is acc_mean, and so is its error."""
    fresh = replace(found)
    vars(fresh)["uninformative"] = ["another"]
    for _, row in found.eligible.iterrows():
        assert fresh.informative(row) == pytest.approx((row["acc_mean"], row["acc_mean_stderr"]))
    vars(some := replace(found))["uninformative"] = ["piqa", "boolq"]
    row, tasks = found.eligible.iloc[0], [task for task in found.model.tasks if task not in ("piqa", "boolq")]
    items = np.mean([read_items(folder).unstack() for folder in trials_of(found, row["name"])["output_dir"]], axis=0)
    of_items = items[[sorted(found.model.tasks).index(task) for task in tasks]].var(axis=1, ddof=1).sum() / 60 / 25
    between = draw_variance(found.draws, found.interactions, [f"acc_{task}" for task in tasks])
    assert between.freedom == found.draw_variance.freedom
    assert some.informative(row)[1] == pytest.approx(math.sqrt(of_items + between.variance / row["draws"]))


def test_gaps_of_measures_have_both_parts_in_every_row() -> None:
    """Rows of two draws and of one: the difference of scores averaged over draws, and what draws add to both sides."""
    generator, index = (
        np.random.default_rng(0),
        pd.MultiIndex.from_product([["a"], range(50)], names=["task", "doc_id"]),
    )
    scores = {name: pd.Series(generator.standard_normal(50), index) for name in ("a0", "a1", "b", "c")}
    rows = pd.DataFrame(
        {"output_dir": ["a0", "b", "c"], "gold_logprob_mean": [3.0, 2.0, 1.0], "draw_share": [0.5, 1, 0]}
    )
    rows["gold_logprob_mean_stderr"] = 9.0
    draws = {0: pd.DataFrame({"output_dir": ["a0", "a1"]})}
    gaps = differences.measure_gaps(rows, draws, {"gold_logprob_mean": DrawVariance(0.04, 0.0, 1)}, scores.get)
    best = (scores["a0"] + scores["a1"]) / 2
    for row, name, share in ((1, "b", 1.0), (2, "c", 0.0)):
        of_items = (scores[name] - best).var(ddof=1) / 50
        expected = math.sqrt(of_items + 0.04 * (0.5 + share))
        assert gaps.loc[row, "gold_logprob_mean_gap_stderr"] == pytest.approx(expected)
    scores["a0"] = None
    apart = differences.measure_gaps(rows, draws, {}, scores.get)["gold_logprob_mean_gap_stderr"]
    assert apart[1] == pytest.approx(math.hypot(9, 9))


def test_one_draw_everywhere_is_as_it_was(tmp_path: Path) -> None:
    found = find(read_study([simulated_study(tmp_path, models=("alpha",), items=20)], [])).models["alpha"]
    assert found.draw_variance is None and not found.draws and set(found.eligible["draws"]) == {1}
    recorded = found.model.rows.set_index("name")["acc_mean_stderr"]
    assert (found.eligible.set_index("name")["acc_mean_stderr"] == recorded[found.eligible["name"]]).all()
    assert "seeds_one" in {message.kind for message in found.warnings}


def test_a_method_that_reads_no_seed_has_no_draws(study, found: ModelFindings) -> None:
    """Neither the error of draws, nor the mark, nor the advice to measure more of them."""
    whole = find(replace(study, models={"alpha": replace(study.models["alpha"], seedless=("taylor",))}))
    told, name = whole.models["alpha"], "taylor-s16-n128"
    assert found.named(name)["draw_stderr"] == pytest.approx(math.sqrt(found.draw_variance.variance))
    assert found.draw_variance.variance > 0
    row, recorded = told.named(name), trials_of(found, name)["acc_mean_stderr"].iloc[0]
    assert row["draws"] == 1 and row["draw_stderr"] == 0 and row["acc_mean_stderr"] == pytest.approx(recorded)
    place = told.eligible.index.get_loc(row.name)
    assert told.comparison.errors[:, place].std() == pytest.approx(recorded, rel=0.1)
    other = told.named("layerwise-s64-n128")
    assert other["draw_stderr"] == pytest.approx(math.sqrt(told.draw_variance.variance))
    trials = all_tables(whole)["trials"]
    assert not any(row["_one_draw"] for row in trials.rows if row["method"] == "taylor")
    warnings = list(of_draws.warnings(told.eligible, name, told.draw_variance))
    assert not any(name in message.values.get("names", ()) for message in warnings)
    assert next(message for message in warnings if message.kind == "one_draw").values["count"] == 15 - 6


def test_a_refit_of_a_method_that_reads_no_seed_reads_one() -> None:
    configs = [
        PruningConfig("magnitude", 16, 8, compensation=compensation, seed=seed)
        for compensation, seed in (("none", None), ("least_squares", None), ("least_squares", 1))
    ]
    trials = typed(pd.DataFrame([config.to_dict() | {"name": config.name} for config in configs]))
    trials = trials.assign(acc_mean=[0.5, 0.6, 0.7], ppl=2.0, tokens=1, status="complete", success=True)
    rows, several = of_draws.configurations(trials, trials, ("magnitude",))
    assert rows.set_index("name")["draw_share"].to_dict() == {configs[0].name: 0.0, configs[1].name: 0.5}
    assert list(several) == [1]


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
    tables = by_draw(draws)
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
    """A short form of scripts/simulate_draws.py; docs/studies/draws.md has its whole table."""
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
    some, _ = next_draws(accuracies, np.array([1, 3, 1, 3, 1, 1]), 3, None, generator)
    assert np.flatnonzero(some).tolist() == [0, 2, 4, 5]  # the leaders have none left
    unknown = np.array([-math.inf, 0.1, -math.inf])  # which lack the measure
    assert next_draws(unknown, np.ones(3, int), 3, None, generator)[0].tolist() == [False, True, False]
    counts = np.array([2, 2, 2, 2, 1, 1])
    tight = DrawVariance(0.01**2, 0.0, 40)
    wanted, chances = next_draws(accuracies, counts, 3, tight, generator)
    assert np.flatnonzero(wanted).tolist() == [1, 3] and chances.sum() == pytest.approx(1)
    wide = DrawVariance(1.0, 0.0, 40)
    assert next_draws(accuracies, counts, 3, wide, generator)[0].all()  # those that were out come back
    assert not next_draws(accuracies, np.full(6, 3), 3, wide, generator)[0].any()


def test_draws_that_tie_are_not_taken_for_certain() -> None:
    tied, generator = DrawVariance(0.0, 0.01**2, 2), np.random.default_rng(0)
    assert tied.sampled(generator, 1000).max() > 0.01**2
    wanted, _ = next_draws(np.array([0.60, 0.599]), np.array([2, 2]), 3, tied, generator)
    assert wanted.all()


@pytest.mark.parametrize("by", ["accuracy", "gold_logprob"])
def test_few_draws_find_the_winner_of_all(by: str) -> None:
    found = simulate_draws.adaptive(60, 3, 0.007, 12, np.random.default_rng(2), by)
    assert found["lost"] == 0 and found["share"] < 0.8
