"""Thousands of configurations: the bounds that spare comparisons change no number, work grows with their number and not with its
square, and nothing of its square is held."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.findings import simulated_scores
from tune_prune.analysis.statistics import comparison as module
from tune_prune.analysis.statistics.comparison import PairedScores, compare


def study(generator: np.random.Generator, truth: np.ndarray, items: int = 120) -> PairedScores:
    """Simulate two tasks; every fifth configuration answers as its neighbour does, but for a few items."""
    scores = {task: simulated_scores(generator, truth + extra, items) for task, extra in (("a", 0.1), ("b", 0.0))}
    for values in scores.values():
        values[5:, 5::5] = values[5:, 4:-1:5]
        values[:, 3] = values[:, 4]
    return PairedScores({task: values.astype(np.int8) for task, values in scores.items()}, np.arange(len(truth)))


def by_plain_loops(accuracies: np.ndarray, errors: np.ndarray, stderr: np.ndarray) -> list[float]:
    """p values as `compare` defines them, every configuration against every other in every draw."""
    values = []
    for k, own in enumerate(accuracies):
        apart = stderr[k] > 0
        if (accuracies[~apart] - own > 1e-12).any():
            values.append(1 / (1 + len(errors)))
            continue
        scale = 1 / stderr[k][apart]
        observed = max([0.0, *((accuracies[apart] - own) * scale)])
        largest = ((errors[:, apart] - errors[:, [k]]) * scale).max(axis=1, initial=0.0)
        values.append((1 + int((largest >= observed - 1e-5).sum())) / (1 + len(errors)))
    return values


@pytest.mark.parametrize(
    "truth",
    [np.full(150, 0.6), np.linspace(0.7, 0.2, 150), np.r_[np.full(75, 0.62), np.full(75, 0.4)], np.full(9, 0.5)],
    ids=["all equal", "spread", "two groups", "few"],
)
def test_no_bound_changes_a_p_value(truth: np.ndarray) -> None:
    outcomes = study(np.random.default_rng(3), truth)
    found = compare(outcomes.accuracies, np.full(len(truth), np.nan), outcomes, np.random.default_rng(1), 300)
    loops = by_plain_loops(outcomes.accuracies, found.errors, found.stderr())
    assert found.p_value.tolist() == loops
    assert len(set(loops)) > 3


def test_covariances_are_those_of_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 4)
    outcomes = study(np.random.default_rng(3), np.linspace(0.7, 0.4, 11), 30)
    found = compare(outcomes.accuracies, np.full(11, np.nan), outcomes, np.random.default_rng(1), 50)
    truth = sum(np.cov(scores.T) / 30 for scores in outcomes.by_task.values()) / 4
    np.testing.assert_allclose(found.covariance(), truth, rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(found.covariance(np.array([7, 2])), found.covariance()[[7, 2]])
    weight = np.linspace(-1, 1, 11)
    assert found.variances_of([weight]) == pytest.approx([weight @ truth @ weight])
    gaps = np.sqrt(np.diag(truth)[:, None] + np.diag(truth) - 2 * truth)
    np.testing.assert_allclose(found.stderr(slice(3, 5)), gaps[3:5], rtol=1e-9, atol=1e-12)


class Counted(np.ndarray):
    """An array that counts the single numbers that were picked out of it."""

    picked = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if isinstance(at, tuple) and all(isinstance(index, np.ndarray) for index in at):
            Counted.picked += found.size
        return found


@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["all equal", "spread"])
def test_comparisons_grow_with_configurations_and_not_with_their_square(spread: float) -> None:
    counts = {}
    for configurations in (150, 1200):
        outcomes = study(np.random.default_rng(4), np.linspace(0.7, 0.7 - spread, configurations), 100)
        found = compare(outcomes.accuracies, np.full(configurations, np.nan), outcomes, np.random.default_rng(1), 200)
        Counted.picked = 0
        again = module._p_values(outcomes.accuracies, found.errors.view(Counted), found.stderr)
        assert again.tolist() == found.p_value.tolist()
        counts[configurations] = Counted.picked
    assert counts[1200] < 3 * 8 * counts[150]  # the square would be 64 times as many
    assert counts[1200] < 0.06 * 200 * 1200**2


def test_nothing_of_the_square_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 32)
    monkeypatch.setattr(module, "_CHUNK", 100_000)
    configurations, draws = 1500, 100
    outcomes = study(np.random.default_rng(4), np.linspace(0.7, 0.4, configurations), 60)
    tracemalloc.start()
    compare(outcomes.accuracies, np.full(configurations, np.nan), outcomes, np.random.default_rng(1), draws)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 8 * configurations**2
