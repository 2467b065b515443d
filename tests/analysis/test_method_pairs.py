"""The differences of methods, against plain loops over items and settings, and against grids without any difference."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.findings import from_csv, published_findings, simulated_scores
from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.render.files import latex_table
from tune_prune.analysis.render.messages import note_sentences
from tune_prune.analysis.render.paragraphs import paragraphs
from tune_prune.analysis.statistics.comparison import PairedScores, compare
from tune_prune.analysis.statistics.effects import method_pairs
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.all_tables import all_tables

METHODS = ("taylor", "layerwise", "blockwise")


def test_a_difference_is_that_of_the_settings_both_completed(simulated: Findings) -> None:
    found = simulated.models["alpha"]
    rows = found.eligible.set_index(["method", "seq_len", "num_samples"])
    pair = found.method_pairs.loc[("blockwise", "taylor")]
    settings = [key[1:] for key in rows.index if key[0] == "taylor"]
    assert pair["n"] == len(settings) == 5
    gaps = [rows.loc[("blockwise", *s), "acc_mean"] - rows.loc[("taylor", *s), "acc_mean"] for s in settings]
    assert pair["points"] == pytest.approx(100 * np.mean(gaps))
    by_item = [  # of each item over the settings
        np.mean([read_items(rows.loc[(m, *s), "output_dir"]) for s in settings], axis=0)
        for m in ("blockwise", "taylor")
    ]
    tasks = read_items(rows["output_dir"].iloc[0]).index.get_level_values("task")  # type: ignore[union-attr]
    of_items = [pd.Series(by_item[0] - by_item[1])[tasks == task].var() / 150 for task in tasks.unique()]
    variance = sum(of_items) / 7**2 + np.var(gaps, ddof=1) / 5
    assert pair["stderr_points"] == pytest.approx(100 * math.sqrt(variance))


def test_of_one_setting_of_each_nothing_is_said_of_methods(tmp_path: Path) -> None:
    """Nobody knows what another setting would change, however many items there are."""
    levels = {"taylor": 0.6, "layerwise": 0.5, "blockwise": 0.4}
    found = from_csv(tmp_path, {"M": lambda method, s, n: levels[method] if (s, n) == (64, 128) else math.nan})
    pairs = found.models["M"].method_pairs
    assert pairs["n"].tolist() == [1, 1, 1] and pairs["points"].tolist() == pytest.approx([10, 20, 10])
    assert pairs[["stderr_points", "p_value"]].isna().all(axis=None) and not found.models["M"].methods["tied"].any()
    text = paragraphs(found)[0]
    assert "taylor and layerwise are not comparable" in text and "more accurate than" not in text
    table = all_tables(found)["methods"]
    assert [row["mean"] for row in table.rows] == pytest.approx([0.6, 0.5, 0.4])
    mean = next(column for column in table.columns if column.key == "mean")
    assert not any(map(mean.is_best, table.rows)) and r"\textbf{.6000}" not in latex_table(table)
    for language, names in (("en", "layerwise and blockwise"), ("zh", "layerwise、blockwise")):
        assert any("taylor" in note and names in note for note in note_sentences(table, language))


def test_a_method_that_was_compared_is_marked_and_one_that_was_not_is_not(tmp_path: Path) -> None:
    """taylor and layerwise share settings and differ by noise; blockwise shares one setting with either."""
    noise = np.random.default_rng(1)
    level = {"taylor": 0.601, "layerwise": 0.6, "blockwise": 0.4}
    found = from_csv(
        tmp_path,
        {
            "M": lambda method, s, n: (
                level[method] + noise.normal(0, 0.01) if method != "blockwise" or s + n == 20 else math.nan
            )
        },
    )
    methods = found.models["M"].methods
    assert sorted(methods.index[methods["tied"]]) == ["layerwise", "taylor"]
    assert math.isnan(methods.loc["blockwise", "p_below"])
    note = next(note for note in all_tables(found)["methods"].notes if note.kind == "note_not_compared")
    assert note.values["names"] == ["blockwise"]


@pytest.mark.slow
def test_equal_methods_are_distinguished_in_one_of_twenty_studies_at_most() -> None:
    generator = np.random.default_rng(3)
    settings = list(itertools.product((16, 32, 64), (128, 256)))
    grid = [(method, *setting) for method, setting in itertools.product(METHODS, settings)]
    trials = pd.DataFrame(grid, columns=["method", "seq_len", "num_samples"])
    found = []
    for _ in range(150):
        truth = 0.6 + np.tile(generator.normal(0, 0.05, len(settings)), 3)  # of each setting, the same for all methods
        outcomes = PairedScores({"one": simulated_scores(generator, truth, 150)}, np.arange(len(truth)))
        comparison = compare(outcomes.accuracies, np.full(len(truth), np.nan), outcomes, generator, 300)
        eligible = trials.assign(acc_mean=outcomes.accuracies)
        found.append(method_pairs(trials, eligible, comparison, generator)["p_value"].min() <= 0.05)
    assert np.mean(found) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(found))


def test_the_published_grid_orders_one_method_only() -> None:
    """Without items errors of a method's runs do not average out: that of a mean is the mean of theirs."""
    found = published_findings().models["Llama"]
    pairs = found.method_pairs
    assert (pairs["p_value"] <= 0.05).tolist() == [True, True, False]
    assert pairs.index[-1] == ("taylor", "layerwise")  # the layerwise of this grid is below taylor, by noise or not
    assert found.methods["tied"].tolist() == [True, False, False]
    rows = found.eligible.pivot_table(index=["seq_len", "num_samples"], columns="method", values="acc_mean")
    errors = found.eligible.groupby("method")["acc_mean_stderr"].mean()
    variance = (rows["taylor"] - rows["layerwise"]).var() / 15 + errors["taylor"] ** 2 + errors["layerwise"] ** 2
    assert pairs["stderr_points"].iloc[-1] == pytest.approx(100 * math.sqrt(variance))


def test_a_method_that_reads_no_samples_is_compared_with_every_setting() -> None:
    trials = pd.DataFrame(
        [
            ("random", 64, 128, 0.3, math.nan),
            *(("taylor", s, 128, a, 1.0) for s, a in ((16, 0.5), (64, 0.6), (256, 0.7))),
        ],
        columns=["method", "seq_len", "num_samples", "acc_mean", "importance_duration_s"],
    ).assign(pruning_duration_s=1.0)
    comparison = compare(trials["acc_mean"].to_numpy(), np.full(4, 0.01), None, np.random.default_rng(0))
    (pair,) = method_pairs(trials, trials, comparison, np.random.default_rng(0)).to_dict("records")
    assert (pair["n"], pair["points"]) == (3, pytest.approx(30))
    assert pair["stderr_points"] == pytest.approx(100 * math.sqrt(2 * 0.01**2 + 0.1**2 / 3))


def test_the_method_that_is_higher_over_the_pairs_stands_first_whatever_its_mean_over_others(tmp_path: Path) -> None:
    """One that has failed where it is hard has the higher mean over all its own."""
    noise = np.random.default_rng(0)
    levels, gains = {16: 0.3, 32: 0.5, 64: 0.6, 128: 0.6}, {"taylor": 0.0, "layerwise": 0.03, "blockwise": -0.1}

    def accuracy(method: str, seq_len: int, _: int) -> float:
        easy = method != "taylor" or seq_len > 16
        return levels[seq_len] + gains[method] + noise.normal(0, 0.001) if easy else math.nan

    findings = from_csv(tmp_path, {"M": accuracy})
    found = findings.models["M"]
    assert found.methods.index[0] == "taylor" and found.methods["mean"].is_monotonic_decreasing
    pair = found.method_pairs.loc[("layerwise", "taylor")]
    assert 2 < pair["points"] < 4 and pair["p_value"] <= 0.05 and (found.method_pairs["points"] >= 0).all()
    assert found.methods["tied"].to_dict() == {"taylor": True, "layerwise": True, "blockwise": False}
    assert "layerwise is more accurate than taylor" in paragraphs(findings)[0]
