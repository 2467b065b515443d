"""The confidence set of the best and the cross-fitted score, against simulated grids of known truth and against scipy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.findings import simulated_scores
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.statistics.comparison import Comparison, PairedScores, compare, paired_scores
from tune_prune.analysis.statistics.cross_fit import cross_fit
from tune_prune.analysis.statistics.differences import difference
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError

K = 45
TASKS = {"easy": 0.1, "hard": 0.0}  # above the configuration's accuracy


def most_accurate(accuracies: np.ndarray) -> int:
    return int(accuracies.argmax())


def grid(generator: np.random.Generator, truth: np.ndarray, items: int) -> PairedScores:
    scores = {task: simulated_scores(generator, truth + extra, items) for task, extra in TASKS.items()}
    return PairedScores(scores, np.arange(len(truth)))


def compared(outcomes: PairedScores, generator: np.random.Generator, draws: int = 500) -> Comparison:
    unknown = np.full(len(outcomes.rows), np.nan)
    return compare(outcomes.accuracies, unknown, outcomes, generator, draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "at_most"),
    [
        (np.full(K, 0.6), K),  # the hardest case: any of 45 equal ones is the best
        (np.r_[0.62, np.full(K - 1, 0.6)], K),
        (np.linspace(0.6, 0.3, K), 18),
    ],
    ids=["all equal", "one ahead", "spread"],
)
def test_confidence_set_holds_the_truly_best(truth: np.ndarray, at_most: int) -> None:
    generator = np.random.default_rng(5)
    held, in_two_errors, sizes = [], [], []
    for _ in range(250):
        outcomes = grid(generator, truth, 120)
        comparison = compared(outcomes, generator)
        winner = outcomes.accuracies.argmax()
        held.append(comparison.in_confidence_set[0])
        sizes.append(comparison.in_confidence_set.sum())
        gap = outcomes.accuracies[winner] - outcomes.accuracies[0]
        in_two_errors.append(gap <= 2 * comparison.stderr()[winner, 0])
    sampling_error = 3 * math.sqrt(0.95 * 0.05 / len(held))
    assert np.mean(held) >= 0.95 - sampling_error
    assert np.mean(sizes) <= at_most
    if truth.min() == truth.max():
        assert np.mean(in_two_errors) < 0.85  # each pair on its own, without regard to how many there are


@pytest.mark.parametrize("few", [2, 3, 5])
def test_a_task_of_few_items_does_not_exclude_the_truly_best(few: int) -> None:
    generator, held, studies = np.random.default_rng(few), 0, 120
    for _ in range(studies):
        scores = {str(i): simulated_scores(generator, np.full(20, 0.6), n) for i, n in enumerate((few, 150, 150))}
        held += compared(PairedScores(scores, np.arange(20)), generator, 200).in_confidence_set[0]
    assert held / studies >= 0.95 - 1.5 * math.sqrt(0.95 * 0.05 / studies)


def test_a_difference_of_two_items_that_are_all_alike_is_not_certain() -> None:
    """On seven tasks of two items two trials differ in both items of the first: each has 1/4 over 2 of variance more a task."""
    scores = {f"t{i}": np.array([[1.0, 0.0], [1.0, 0.0]]) if not i else np.ones((2, 2)) for i in range(7)}
    comparison = compared(PairedScores(scores, np.arange(2)), np.random.default_rng(0))
    expected = math.sqrt(2 * 7 * 0.25 / 2) / 7
    assert comparison.stderr() == pytest.approx(np.array([[0, expected], [expected, 0]]))
    assert comparison.p_value[1] == pytest.approx(
        stats.norm.sf(1 / 7 / expected), abs=0.03
    )  # which goes by the same error
    index = pd.MultiIndex.from_product([scores, range(2)], names=["task", "doc_id"])
    items = {f"{k}": pd.Series(np.concatenate([scores[task][:, k] for task in scores]), index) for k in range(2)}
    rows = [{"output_dir": folder, "configuration": PruningConfig("taylor", 16, 8)} for folder in items]
    gap = difference(rows[0], rows[1], items.__getitem__)
    assert gap.points == pytest.approx(100 / 7) and gap.stderr_points == pytest.approx(100 * expected)
    assert (
        difference(rows[0], rows[0] | {"output_dir": "2"}, (items | {"2": items["0"]}).__getitem__).stderr_points == 0
    )


def test_pairing_tells_more_apart_than_each_error_alone() -> None:
    generator = np.random.default_rng(2)
    outcomes = grid(generator, np.linspace(0.6, 0.45, K), 400)
    alone = compare(outcomes.accuracies, np.sqrt(np.diag(outcomes.covariance())), None, generator)
    together = compared(outcomes, generator)
    assert (together.basis, alone.basis) == ("paired", "unpaired")
    assert together.in_confidence_set.sum() < alone.in_confidence_set.sum()


def test_unpaired_chance_is_that_of_the_normal_distribution() -> None:
    stderrs = np.full(5, 0.01)
    gap = 2.3  # standard errors of a difference
    accuracies = np.r_[0.5, 0.5 - gap * 0.01 * math.sqrt(2), np.full(3, 0.4)]
    comparison = compare(accuracies, stderrs, None, np.random.default_rng(0), draws=40_000)
    four = stats.multivariate_normal(cov=0.5 + 0.5 * np.eye(4), seed=0)  # that share one's error
    assert comparison.p_value[1] == pytest.approx(1 - four.cdf(np.full(4, gap)), abs=0.003)
    assert comparison.p_value[0] == 1
    two = compare(accuracies[:2], stderrs[:2], None, np.random.default_rng(0), draws=40_000)
    assert two.p_value[1] == pytest.approx(stats.norm.sf(gap), abs=0.002)


def test_bootstrap_spread_is_the_analytic_one() -> None:
    """Counted by hand: scores 1 1 1 0 in task a (variance 1/4), 1 0 1 0 in task b (1/3), against one that is always wrong."""
    scores = {"a": np.array([[1.0, 0], [1, 0], [1, 0], [0, 0]]), "b": np.array([[1.0, 0], [0, 0], [1, 0], [0, 0]])}
    scores = {task: np.tile(values, (30, 1)) for task, values in scores.items()}
    outcomes = PairedScores(scores, np.arange(2))
    analytic = math.sqrt((3 / 16 + 1 / 4) * (120 / 119) / 120) / 2
    comparison = compared(outcomes, np.random.default_rng(0))
    np.testing.assert_allclose(comparison.stderr(), [[0, analytic], [analytic, 0]], rtol=1e-12)
    # the chance of a gap of z standard errors is the normal one only if the draws spread as far
    gap = 1.5 * analytic
    shifted = compare(np.array([gap, 0.0]), np.zeros(2), outcomes, np.random.default_rng(0), draws=40_000)
    assert shifted.p_value[1] == pytest.approx(stats.norm.sf(1.5), abs=0.006)


def test_identical_outcomes_are_never_told_apart() -> None:
    generator = np.random.default_rng(4)
    scores = {task: s[:, [0, 0, 1]] for task, s in grid(generator, np.array([0.8, 0.2]), 100).by_task.items()}
    comparison = compared(PairedScores(scores, np.arange(3)), generator)
    assert comparison.stderr()[0, 1] == 0
    assert comparison.in_confidence_set.tolist() == [True, True, False]
    assert comparison.p_value[:2].tolist() == [1, 1]


def test_unknown_errors_stay_in_the_set() -> None:
    comparison = compare(np.array([0.9, 0.1]), np.array([np.nan, np.nan]), None, np.random.default_rng(0))
    assert comparison.basis == "unknown" and comparison.in_confidence_set.all() and np.isnan(comparison.p_value).all()
    one = {"a": np.array([[1.0, 0.0]])}  # one item has no spread
    assert compared(PairedScores(one, np.arange(2)), np.random.default_rng(0)).basis == "unknown"


def test_rows_without_items_count_by_their_own_error() -> None:
    generator = np.random.default_rng(6)
    outcomes = PairedScores(grid(generator, np.array([0.8, 0.6]), 500).by_task, np.array([0, 2]))
    accuracies = np.r_[outcomes.accuracies[0], 0.3, outcomes.accuracies[1]]
    comparison = compare(accuracies, np.array([9.0, 0.02, 9.0]), outcomes, generator)
    assert comparison.basis == "unpaired"
    assert comparison.stderr()[0, 1] == pytest.approx(math.hypot(0.02, math.sqrt(outcomes.covariance()[0, 0])))
    assert comparison.in_confidence_set.tolist() == [True, False, False]


@pytest.mark.slow
def test_cross_fitting_removes_the_winners_bias() -> None:
    generator = np.random.default_rng(8)
    truth = np.full(K, 0.6)
    names = [str(k) for k in range(K)]
    fits = [cross_fit(grid(generator, truth, 100), names, most_accurate, generator) for _ in range(120)]
    naive = np.array([fit.naive for fit in fits if fit]) - 0.65
    corrected = np.array([fit.corrected for fit in fits if fit]) - 0.65
    assert naive.mean() > 0.04  # the highest of 45 that are all the same
    assert abs(corrected.mean()) < 3 * corrected.std(ddof=1) / math.sqrt(len(fits))
    covered = np.abs(corrected) < 2 * np.array([fit.stderr for fit in fits if fit])
    assert covered.mean() > 0.93


def test_no_item_chooses_the_configuration_that_it_scores() -> None:
    """Configuration c is right on item c alone: whoever saw the item it is scored on would score above 0."""
    outcomes, names = PairedScores({"a": np.eye(20)}, np.arange(20)), list("abcdefghijklmnopqrst")
    fit = cross_fit(outcomes, names, most_accurate, np.random.default_rng(0))
    assert fit is not None
    assert (fit.naive, fit.corrected, fit.stderr) == (0.05, 0.0, 0.0)


def test_cross_fitting_leaves_a_clear_winner_as_it_is() -> None:
    outcomes = grid(np.random.default_rng(9), np.array([0.3, 0.7]), 300)
    fit = cross_fit(outcomes, ["low", "high"], most_accurate, np.random.default_rng(0))
    assert fit is not None
    assert fit.chosen == {"high": 1.0}
    assert fit.corrected == pytest.approx(fit.naive, abs=1e-12)
    assert fit.stderr == pytest.approx(math.sqrt(outcomes.covariance()[1, 1]), rel=0.25)


# reading


def eligible(**accuracies: float) -> pd.DataFrame:
    return pd.DataFrame(accuracies.items(), columns=["name", "acc_mean"]).assign(output_dir=list(accuracies))


def items_of(scores: Mapping[str, str]) -> pd.Series:
    pairs = [(task, i, float(score)) for task, text in scores.items() for i, score in enumerate(text)]
    frame = pd.DataFrame(pairs, columns=["task", "doc_id", "score"])
    return frame.set_index(["task", "doc_id"])["score"]


def test_items_become_columns_task_by_task() -> None:
    items = {"first": items_of({"a": "110", "b": "01"}), "second": items_of({"a": "100", "b": "00"})}
    outcomes, message = paired_scores(eligible(first=(2 / 3 + 1 / 2) / 2, second=1 / 6), items.get)
    assert outcomes is not None and message is None
    assert outcomes.by_task["a"].tolist() == [[1, 1], [1, 0], [0, 0]]
    assert outcomes.by_task["b"].tolist() == [[0, 0], [1, 0]]


def test_rows_with_other_items_are_left_out_by_name() -> None:
    items = {name: items_of({"a": "10"}) for name in ("first", "third")} | {"second": items_of({"a": "1000"})}
    rows = eligible(first=0.5, second=0.25, third=0.5, fourth=0.1)
    outcomes, message = paired_scores(rows, items.get)
    assert outcomes is not None and outcomes.rows.tolist() == [0, 2]
    assert message == Message("partly_unpaired", {"names": ["second", "fourth"]})
    assert paired_scores(rows.iloc[:2], items.get)[0] is None
    for subset, kind in ((rows.iloc[:2], "unpaired"), (rows.iloc[3:], "no_items")):
        message = paired_scores(subset, items.get)[1]
        assert message is not None and message.kind == kind


def test_items_that_contradict_the_record_are_refused() -> None:
    items = {name: items_of({"a": "10"}) for name in ("first", "second")}
    with pytest.raises(
        UserError,
        match=r"trial second in items.parquet have acc_mean 0\.500000, but its record says 0\.400000; restore",
    ):
        paired_scores(eligible(first=0.5, second=0.4), items.get)
