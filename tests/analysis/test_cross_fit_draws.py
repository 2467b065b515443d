"""The rule gold_logprob, cross-fitted over items and draws: against simulated draws of known truth and against plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import simulated_study
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.comparison import PairedScores
from tune_prune.analysis.statistics.cross_fit import FOLDS, REPEATS, _deal, by_draw, cross_fit
from tune_prune.analysis.statistics.findings import ModelFindings, find
from tune_prune.core.hashing import seed_for

SEVERAL = {"blockwise-s64-n512": 3, "blockwise-s64-n128": 3, "layerwise-s64-n512": 2}  # the others: one
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
    """Of 12 equal configurations, right on half of the items: the best by log-probability has the luckiest draws. Leaving out items
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


def with_log_probabilities(folder: Path, generator: np.random.Generator) -> None:
    """Puts into the items of a trial log-probabilities that are a little higher where an item is right."""
    table = pd.read_parquet(folder / "items.parquet")
    rows = []
    for choices, gold, score in zip(table["loglikelihoods"], table["gold"], table["score"], strict=True):
        values = generator.normal(-9, 1, len(choices))
        values[gold] += score
        rows.append(values)
    table.assign(loglikelihoods=rows).to_parquet(folder / "items.parquet")


def study_folder(folder: Path) -> Path:
    experiment, generator = (
        simulated_study(folder, models=("alpha",), items=30, draws=SEVERAL),
        np.random.default_rng(5),
    )
    for trial in sorted((experiment / "trials").iterdir()):
        with_log_probabilities(trial, generator)
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


def test_without_the_log_probabilities_of_a_draw_it_is_not_known(tmp_path: Path) -> None:
    experiment = study_folder(tmp_path)
    found = found_in(experiment)
    draw = found.draws[found.named("layerwise-s64-n512").name]["output_dir"].iloc[1]
    path = Path(draw) / "items.parquet"
    table = pd.read_parquet(path)
    assert found.cross_fit is not None
    table.assign(gold=[-1, *table["gold"][1:]]).to_parquet(path)  # an item without a single right choice
    assert found_in(experiment).cross_fit is None
