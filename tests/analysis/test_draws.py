"""Several draws of calibration samples, also of the random control: means and errors against plain loops, coverage by simulation,
the race over draws; and the rule gold_logprob, cross-fitted over items and draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import simulate_draws

from tests.findings import simulated_study
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import typed
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.files import markdown_table
from tune_prune.analysis.statistics import draws as of_draws
from tune_prune.analysis.statistics.comparison import PairedScores
from tune_prune.analysis.statistics.cross_fit import FOLDS, REPEATS, _deal, by_draw, cross_fit
from tune_prune.analysis.statistics.differences import difference
from tune_prune.analysis.statistics.draws import DrawItems, DrawVariance, interaction, next_draws, pooled
from tune_prune.analysis.statistics.findings import ModelFindings, find
from tune_prune.analysis.tables.all_tables import all_tables
from tune_prune.core.config import PruningConfig
from tune_prune.core.hashing import seed_for
from tune_prune.core.ledger import Ledger, put_sealed
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore

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
    """Plain loops give the same: of three draws the items' error is of mean scores, the draws' what the items do not tell."""
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


TAKEN, CONTROL = "taylor-s16-n128", "random-s16-n128"  # the trials of the first are made those of the second
SAMPLED = ("blockwise-s64-n512", "blockwise-s64-n128", "layerwise-s64-n512")
ITEMS = 60


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Three configurations and the control on three draws each, and others on one."""
    path = simulated_study(
        tmp_path_factory.mktemp("control"), ("alpha",), ITEMS, draws=dict.fromkeys((*SAMPLED, TAKEN), 3), draw_sd=0.06
    )
    controlled = read_study([path], [])
    model = controlled.models["alpha"]
    rows = model.rows
    rows.loc[rows["name"].str.startswith(TAKEN), "method"] = "random"
    rows["name"] = rows["name"].str.replace(TAKEN, CONTROL)
    return replace(controlled, models={"alpha": replace(model, rows=typed(rows))})


def by_loops(controlled: Study, name: str) -> tuple[float, float, float]:
    """Return the sum of squares between the three draws of a configuration, that of the interaction, the variance of items."""
    rows = controlled.models["alpha"].rows
    folders = rows.loc[(rows["name"] == name) | rows["name"].str.startswith(f"{name}-r"), "output_dir"]
    scores = np.stack([DrawItems(read_items).draws(folder)[0].to_numpy(float) for folder in folders]).reshape(
        3, 7, ITEMS
    )
    accuracy = scores.mean(axis=(1, 2))
    squares, interaction = sum((value - accuracy.mean()) ** 2 for value in accuracy), 0.0
    for task in range(7):
        for draw in range(3):
            for item in range(ITEMS):
                rest = scores[draw, task, item] - scores[:, task, item].mean()
                rest -= scores[draw, task].mean() - scores[:, task].mean()
                interaction += rest**2 / (ITEMS - 1) / ITEMS / 49
    return squares, interaction, sum(one.var(ddof=1) for one in scores.mean(axis=0)) / ITEMS / 49


def test_each_has_the_spread_of_its_own_population(controlled: Study) -> None:
    findings = find(controlled)
    found = findings.models["alpha"]
    sums = [by_loops(controlled, name) for name in SAMPLED]
    between = max(0.0, sum(squares - interaction for squares, interaction, _ in sums) / 6)
    squares, interaction, of_items = by_loops(controlled, CONTROL)
    own = (squares - interaction) / 2
    assert own > 0 and abs(own - between) > 0.2 * between > 0  # else the two could not be told apart
    pool = found.draw_variances["acc_mean"]
    assert (pool.freedom, pool.variance) == (6, pytest.approx(between))
    for name, variance, items in (
        (CONTROL, own, of_items),
        *((n, between, s[2]) for n, s in zip(SAMPLED, sums, strict=True)),
    ):
        row = found.named(name)
        place = found.eligible.index.get_loc(row.name)
        assert row["draw_stderr"] ** 2 == pytest.approx(variance / 3)
        assert row["acc_mean_stderr"] ** 2 == pytest.approx(items + variance / 3)
        assert found.comparison.variances[place] == pytest.approx(items + variance / 3)
        fresh = replace(found)
        vars(fresh)["uninformative"] = ["another"]  # the mean over the informative tasks is acc_mean then
        assert fresh.informative(row)[1] == pytest.approx(row["acc_mean_stderr"])
    gap = difference(found.named(SAMPLED[0]), found.named(CONTROL), findings.items)
    assert gap.stderr_points**2 > 1e4 * (between + own) / 3
    # Two degrees of freedom: tails far longer than the normal ones, as Student's t has them
    place = found.eligible.index.get_loc(found.named(CONTROL).name)
    assert found.comparison.half_width(place) > 2.4 * math.sqrt(of_items + own / 3)
    assert f"{100 * math.sqrt(between):.2f} points" in markdown_table(all_tables(findings)["draws"])


def test_the_control_changes_nothing_for_the_others(controlled: Study) -> None:
    model = controlled.models["alpha"]
    without = replace(model, rows=model.rows[model.rows["method"] != "random"])
    found, alone = (find(one).models["alpha"] for one in (controlled, replace(controlled, models={"alpha": without})))
    columns = ["acc_mean_stderr", "acc_piqa_stderr", "draw_stderr"]
    rows = found.eligible.set_index("name")[columns]
    others = alone.eligible.set_index("name")[columns]
    assert len(others) == 17 and (rows.loc[others.index] == others).all(axis=None)
    assert alone.draw_variances == found.draw_variances and not alone.control_variances


Draws = list[list[pd.Series]]


def most(values: np.ndarray) -> int:
    return int(values.argmax())


def simulated(
    generator: np.random.Generator, counts: Sequence[int], n: int = 80, sd: float = 0.3
) -> tuple[Draws, Draws]:
    """Accuracies and log-probabilities by item, of equal configurations with these counts of draws: an item is right where its
    log-probability is above -5, half of them on average over draws, which each raise or lower all items of a configuration."""
    index = pd.MultiIndex.from_product([["a", "b"], range(n)], names=["task", "doc_id"])
    shared = generator.standard_normal(2 * n)
    golds = [
        [
            pd.Series(sd * generator.standard_normal() + shared + generator.standard_normal(2 * n) - 5, index)
            for _ in range(count)
        ]
        for count in counts
    ]
    return [[(one > -5).astype(float) for one in series] for series in golds], golds


def averaged(draws: Draws) -> PairedScores:
    table = np.column_stack([sum(series).to_numpy() / len(series) for series in draws])
    return PairedScores({"a": table[: len(table) // 2], "b": table[len(table) // 2 :]}, np.arange(len(draws)))


@pytest.mark.parametrize("count", [2, 3])
def test_neither_items_nor_draws_choose_what_they_score(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best by log-probability of 12 equal configurations, right on half of the items, has the luckiest draws. Leaving out items
    alone keeps the draws' part of the bias, leaving out both none."""
    monkeypatch.setattr("tune_prune.analysis.statistics.cross_fit._BOOTSTRAP_DRAWS", 2)  # its error is not looked at
    generator, names = np.random.default_rng(3), [str(k) for k in range(12)]
    found: dict[str, list[float]] = {"naive": [], "items": [], "both": []}
    for _ in range(60):
        draws, golds = simulated(generator, [count] * 12)
        scores, by_gold = averaged(draws), averaged(golds)
        items = [(list(by_gold.by_task.values()), list(scores.by_task.values()))]
        both = by_draw(draws, golds)
        for name, tables in (("items", items), ("both", both)):
            fit = cross_fit(scores, names, most, generator, tables, measure=by_gold.accuracies)
            assert fit is not None
            found[name].append(fit.corrected - 0.5)
        found["naive"].append(fit.naive - 0.5)
    means = {name: np.mean(values) for name, values in found.items()}
    errors = {name: np.std(values, ddof=1) / math.sqrt(len(values)) for name, values in found.items()}
    assert means["naive"] >= means["items"] > 0.06 > 5 * errors["items"]
    assert abs(means["both"]) < 3 * errors["both"] and errors["both"] < 0.015


def test_of_one_draw_its_own_luck_stays() -> None:
    """A configuration is chosen and scored by its only draw; the one with two draws is chosen by each and scored by the other."""
    index = pd.MultiIndex.from_product([["a"], range(10)], names=["task", "doc_id"])
    one, two = ([pd.Series(np.full(10, value), index) for value in values] for values in ((0.4,), (1.0, 0.0)))
    golds = [[pd.Series(np.full(10, -3.0), index)], [pd.Series(np.full(10, value), index) for value in (-1.0, -9.0)]]
    scores = PairedScores({"a": np.column_stack([np.full(10, 0.4), np.full(10, 0.5)])}, np.arange(2))
    tables, measure = by_draw([one, two], golds), np.array([-3.0, -5.0])
    fit = cross_fit(scores, ["one", "two"], most, np.random.default_rng(0), tables, measure=measure)
    assert fit is not None and fit.naive == pytest.approx(0.4)  # on all draws the first
    assert fit.corrected == pytest.approx(0.2)  # .4 where the draw of -9 chooses, 0 where that of -1 does
    assert fit.chosen == {"one": 0.5, "two": 0.5}


# of a search


def with_log_probabilities(experiment: Path, record: TrialRecord, generator: np.random.Generator) -> None:
    """Put into the items of a trial log-probabilities that are a little higher where an item is right, and their mean into its
    record."""
    path = experiment / "trials" / record.key / "items.parquet"
    table = pd.read_parquet(path)
    rows = []
    for choices, gold, score in zip(table["loglikelihoods"], table["gold"], table["score"], strict=True):
        values = generator.normal(-9, 1, len(choices))
        values[gold] += score
        rows.append(values)
    table.assign(loglikelihoods=rows).to_parquet(path)
    golds = pd.Series([values[gold] for values, gold in zip(rows, table["gold"], strict=True)])
    metrics = {"gold_logprob_mean": float(golds.groupby(table["task"]).mean().mean()), "gold_logprob_mean_stderr": 0.1}
    record = replace(record, metrics=record.metrics | metrics)
    put_sealed(FolderStore(experiment), f"ledger/{record.key}.json", record.to_dict())


def study_folder(folder: Path) -> Path:
    experiment = simulated_study(folder, models=("alpha",), items=30, draws=SEVERAL)
    generator = np.random.default_rng(5)
    for record in Ledger(FolderStore(experiment)).records():
        with_log_probabilities(experiment, record, generator)
    return experiment


def found_in(experiment: Path) -> ModelFindings:
    return find(read_study([experiment], []), "gold_logprob").models["alpha"]


def test_the_choice_of_a_search_with_draws_is_that_of_plain_loops(tmp_path: Path) -> None:
    found = found_in(study_folder(tmp_path))
    tasks, measured = sorted(found.model.tasks), {}  # by name: log-probabilities and scores [draws, tasks, items]
    for name in found.eligible["name"]:
        rows = found.model.rows
        own = rows[(rows["name"] == name) | rows["name"].str.startswith(f"{name}-r")].sort_values("name")
        golds, scores = [], []
        for folder in own["output_dir"]:
            table = pd.read_parquet(Path(folder) / "items.parquet").sort_values(["task", "doc_id"])
            chosen = [values[gold] for values, gold in zip(table["loglikelihoods"], table["gold"], strict=True)]
            golds.append(np.reshape(chosen, (len(tasks), 30)))
            scores.append(table["score"].to_numpy(float).reshape(len(tasks), 30))
        measured[name] = (np.array(golds), np.array(scores))
        assert len(golds) == SEVERAL.get(name, 1)
    means = {name: golds.mean() for name, (golds, _) in measured.items()}
    assert found.best["name"] == max(means, key=means.__getitem__)
    generator = np.random.default_rng(seed_for(found.seed, "folds of alpha"))
    members = [_deal(30, generator) for _ in tasks]
    total, counts = 0.0, dict.fromkeys(measured, 0)
    for split in range(FOLDS * REPEATS):
        number = split // FOLDS % 3
        held = [member[split].astype(bool) for member in members]
        choice, highest = "", -math.inf
        for name, (golds, _) in measured.items():
            draw = number % len(golds)
            others = [golds[k] for k in range(len(golds)) if k != draw or len(golds) == 1]
            mean = np.mean([one[task][~held[task]].mean() for one in others for task in range(len(tasks))])
            if mean > highest:
                choice, highest = name, mean
        counts[choice] += 1
        own = measured[choice][1][number % len(measured[choice][1])]
        total += sum(own[task][held[task]].sum() for task in range(len(tasks))) / 30 / len(tasks) / REPEATS
    fit = found.cross_fit
    assert fit is not None and fit.corrected == pytest.approx(total, abs=1e-6)
    assert fit.chosen == pytest.approx({name: n / FOLDS / REPEATS for name, n in counts.items() if n})
    assert fit.naive == pytest.approx(found.best["acc_mean"])
    assert set(fit.chosen) & set(SEVERAL) and set(fit.chosen) - set(SEVERAL)  # of several draws and of one
