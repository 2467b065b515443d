"""The race: its rule held against computations from the formulas, by accuracies and by log-probabilities; and its guarantee, by
simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest

from tune_prune.core.config import TASK_ITEMS
from tune_prune.evaluation.suite import even_slices
from tune_prune.tuning.stopping import ACCURACY, GOLD_LOGPROB, ItemValues, Race

SLICES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
EMBEDDED = {f"task{i}": 240 for i in range(7)}
SIZES = {"even": EMBEDDED, "tiny": {"a": 12, "b": 30, "c": 400}, "one": {"t": 120}}
Scores = dict[str, np.ndarray]  # task -> [configurations, items]: whether right (bool), or nats


def proportional(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    return [{task: math.ceil(part * n) for task, n in sizes.items()} for part in SLICES]


def values_of(scores: np.ndarray) -> ItemValues:
    """One task's items as messages have them."""
    if scores.dtype != bool:
        return tuple(scores)
    return (scores.astype(np.uint8) + ord("0")).tobytes().decode()


def added(scores: Scores, config: int, counts, index: int) -> dict[str, ItemValues]:
    before = counts[index - 1] if index else dict.fromkeys(scores, 0)
    return {task: values_of(values[config, before[task] : counts[index][task]]) for task, values in scores.items()}


def race_of(scores: Scores, slices: int, confidence: float = 0.95) -> Race:
    first = next(iter(scores.values()))
    measure = ACCURACY if first.dtype == bool else GOLD_LOGPROB
    return Race(len(first), {task: values.shape[1] for task, values in scores.items()}, slices, confidence, measure)


def stops_of_the_best(scores: Scores, counts) -> bool:
    """Whether any look stops the configuration that is best on all items, when it meets every other at every slice."""
    means = np.mean([values.mean(axis=1) for values in scores.values()], axis=0)
    best, race, stopped = int(means.argmax()), race_of(scores, len(counts)), False
    for index in range(len(counts) - 1):
        for config in [*(other for other in range(len(means)) if other != best), best]:
            verdict = race.add(str(config), index, added(scores, config, counts, index))
            stopped |= config == best and verdict is not None
    return stopped


def exchangeable(correlation: float) -> Callable[..., Scores]:
    """Outcomes of equally good configurations, correlated by a latent difficulty of the items: any may lead at any slice."""

    def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> Scores:
        limits = rng.uniform(-0.8, 0.8, len(sizes))
        return {
            task: math.sqrt(correlation) * rng.standard_normal(n)
            + math.sqrt(1 - correlation) * rng.standard_normal((20, n))
            < limit
            for (task, n), limit in zip(sizes.items(), limits, strict=True)
        }

    return draw


def opposed(sizes: Mapping[str, int], rng: np.random.Generator) -> Scores:
    """Configuration 0 is best by one item, which it owes to the smallest task, of which few items are seen early; its rivals win
    in the largest at once."""
    small, large = min(sizes, key=lambda task: sizes[task]), max(sizes, key=lambda task: sizes[task])
    scores = {task: np.ones((20, n), dtype=bool) for task, n in sizes.items()}
    scores[large][0, : sizes[large] // 10 - 1] = False
    for rival in range(1, 20):
        scores[small][rival, rng.choice(sizes[small], sizes[small] // 10, replace=False)] = False
    return {task: values[:, rng.permutation(values.shape[1])] for task, values in scores.items()}


def of_equal_means(draw: Callable[..., np.ndarray]) -> Callable[..., Scores]:
    """Log-probabilities that differ in nothing but which items they do well on; 0 is the best by a millionth of a nat."""

    def make(sizes: Mapping[str, int], rng: np.random.Generator) -> Scores:
        scores = {task: draw((20, n), rng) for task, n in sizes.items()}
        means = np.mean([values.mean(axis=1) for values in scores.values()], axis=0) - 1e-6 * (np.arange(20) == 0)
        return {task: values - means[:, None] for task, values in scores.items()}

    return make


def against_steady(losses: np.ndarray) -> np.ndarray:
    """Rivals lose much on few items, the best the same on every one: small samples show the rivals ahead."""
    losses[0] = losses.mean()
    return -losses


NATS = {
    "normal": of_equal_means(lambda shape, rng: rng.standard_normal(shape)),
    "heavy tails": of_equal_means(lambda shape, rng: rng.standard_t(3, shape)),
    "skewed": of_equal_means(lambda shape, rng: against_steady(rng.exponential(1.0, shape))),
    # 600 runs give up to 4%, of which so few runs may show more.
    "lognormal": of_equal_means(lambda shape, rng: against_steady(rng.lognormal(0.0, 1.0, shape))),
}
GUARANTEE = {f"correlated {c}": (exchangeable(c), EMBEDDED, proportional, 60, 0.05) for c in (0.0, 0.98)}
GUARANTEE |= {
    "unseen wins, even slices": (opposed, TASK_ITEMS, lambda sizes: even_slices(sizes, SLICES), 20, 0.05),
}
GUARANTEE |= {
    f"{name}, {which}": (make, sizes, proportional, 40, 0.1 if name == "lognormal" else 0.05)
    for (name, make), (which, sizes) in zip(NATS.items(), [*SIZES.items(), ("even", EMBEDDED)], strict=True)
}


@pytest.mark.parametrize(("make", "sizes", "slices", "runs", "share"), GUARANTEE.values(), ids=GUARANTEE)
def test_the_best_is_not_stopped_more_often_than_said(make, sizes, slices, runs: int, share: float) -> None:
    rng = np.random.default_rng(5)
    assert sum(stops_of_the_best(make(sizes, rng), slices(sizes)) for _ in range(runs)) <= share * runs


def clearly_worse(make: Callable[..., Scores]) -> Callable[..., Scores]:
    """The second half of the configurations is one spread behind."""

    def draw(sizes: Mapping[str, int], rng: np.random.Generator) -> Scores:
        scores = make(sizes, rng)
        return {task: np.concatenate([values[:10], values[10:] - 1.0]) for task, values in scores.items()}

    return draw


def right_or_wrong(sizes: Mapping[str, int], rng: np.random.Generator) -> Scores:
    chances = np.array([0.8] * 10 + [0.3] * 10)[:, None]
    return {task: rng.random((20, n)) < chances for task, n in sizes.items()}


@pytest.mark.parametrize(
    "make", [right_or_wrong, *(clearly_worse(NATS[name]) for name in ("normal", "heavy tails", "skewed"))]
)
def test_clearly_worse_configurations_are_stopped_early(make: Callable[..., Scores]) -> None:
    """All of them are stopped by a quarter of the items, and some at the first look."""
    scores = make(EMBEDDED, np.random.default_rng(1))
    race, counts = race_of(scores, len(SLICES)), proportional(EMBEDDED)
    stopped = {
        (config, index)
        for index in range(3)
        for config in range(20)
        if race.add(str(config), index, added(scores, config, counts, index)) is not None
    }
    assert {config for config, _ in stopped} == set(range(10, 20))
    assert any(index == 0 for _, index in stopped)


def test_a_verdict_is_what_the_formulas_say() -> None:
    rng = np.random.default_rng(3)
    sizes = {"a": 160, "b": 320}
    scores = {"a": rng.random((3, 160)) < 0.5, "b": rng.random((3, 320)) < 0.5}
    scores["a"][2, :40], scores["b"][2, :80] = True, True  # the last one is far ahead where all three have been
    race = Race(10, sizes, 3, confidence=0.9)
    seen = {"a": 40, "b": 80}
    parts = [{task: values_of(values[config, : seen[task]]) for task, values in scores.items()} for config in range(3)]
    assert race.add("two", 0, parts[2]) is None
    verdict = race.add("nought", 0, parts[0])

    difference = sum(sum(scores[t][2, :n]) / n - sum(scores[t][0, :n]) / n for t, n in seen.items()) / 2
    variance = sum((scores[t][2, :n] != scores[t][0, :n]).sum() * (1 - 0.25) / (n * 2) ** 2 for t, n in seen.items())
    error = math.sqrt(variance + difference * 0.75 / (40 * 2))  # an item of a weighs most
    limit = NormalDist().inv_cdf(1 - 0.1 / (9 * 2))  # nine rivals, two looks
    assert verdict is not None
    assert (verdict.rival, verdict.items) == ("two", 120)
    assert (verdict.difference, verdict.standard_error) == pytest.approx((difference, error))
    assert verdict.limit == pytest.approx(limit)
    assert difference > limit * error

    # The trial catches up, pair by pair, until it goes on.
    spared = {task: scores[task][0, :n].copy() for task, n in seen.items()}
    decisions = []
    for name, index in [(task, index) for task in seen for index in np.flatnonzero(~spared[task])]:
        spared[name][index] = True
        gap = sum(1 - values.mean() for values in spared.values()) / 2
        differ = sum((~values).sum() / (2 * len(values)) ** 2 for values in spared.values())
        decisions.append(bool(gap > limit * math.sqrt(0.75 * (differ + gap / 80))))
        fresh = Race(10, sizes, 3, confidence=0.9)
        fresh.add("two", 0, parts[2])
        verdict = fresh.add("nought", 0, {task: values_of(values) for task, values in spared.items()})
        assert (verdict is not None) == decisions[-1]
    assert decisions == sorted(decisions, reverse=True)
    assert len(set(decisions)) == 2


def test_a_verdict_by_log_probabilities_is_what_the_formulas_say() -> None:
    rng = np.random.default_rng(3)
    sizes, seen = {"a": 160, "b": 320}, {"a": 40, "b": 80}
    trial = {task: rng.normal(-5, 2, n) for task, n in seen.items()}
    rival = {task: values + rng.normal(1, 1, len(values)) for task, values in trial.items()}
    limit = NormalDist().inv_cdf(1 - 0.1 / (9 * 2))  # nine rivals, two looks
    for win in (0.0, 20.0):  # the trial's largest, beside what it is by chance
        rival["b"][7] = trial["b"][7] - win
        gains = {task: [r - t for r, t in zip(rival[task], trial[task], strict=True)] for task in seen}
        difference = sum(sum(d) / len(d) for d in gains.values()) / 2
        squares = {task: sum(value * value for value in d) for task, d in gains.items()}
        variance = sum(0.75 * squares[task] / (2 * n) ** 2 for task, n in seen.items())
        typical = 3 * math.sqrt(sum(squares[task] / n for task, n in seen.items()) / 2)
        largest = max(typical, *(-value for d in gains.values() for value in d))
        assert (largest == typical) == (win == 0)
        error = math.sqrt(variance + 0.75 / 80 * largest * difference)  # an item of a weighs most
        race = Race(10, sizes, 3, 0.9, GOLD_LOGPROB)
        assert race.add("rival", 0, rival) is None
        verdict = race.add("trial", 0, trial)
        assert (verdict is not None) == (difference > limit * error) == (win == 0)
        if verdict is not None:
            assert (verdict.rival, verdict.items) == ("rival", 120)
            assert (verdict.difference, verdict.standard_error) == pytest.approx((difference, error))
            assert verdict.limit == pytest.approx(limit)


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_a_trial_with_a_value_that_is_not_finite_neither_stops_nor_is_stopped(value: float) -> None:
    good, bad = [-1.0 - 0.01 * i for i in range(100)], [-5.0 - 0.01 * i for i in range(100)]
    race = Race(3, {"t": 400}, 3, measure=GOLD_LOGPROB)
    race.add("broken", 0, {"t": good})
    assert race.add("bad", 0, {"t": bad}) is not None
    race.add("broken", 0, {"t": [*good[:-1], value]})
    assert race.add("bad", 0, {"t": bad}) is None  # nor by what it showed before
    assert race.add("good", 0, {"t": good}) is None
    assert race.add("broken", 1, {"t": bad}) is None
    assert race.add("bad", 0, {"t": bad}) is not None
    assert race.add("broken", 0, {"t": bad}) is not None  # tried again, and finite


def test_a_trial_meets_each_rival_on_what_both_have_seen() -> None:
    race = Race(3, {"t": 400}, 3)
    assert race.add("weak", 0, {"t": "0" * 100}) is None  # nobody to compare with
    assert race.add("good", 0, {"t": "1" * 60 + "0" * 40}) is None
    assert race.add("strong", 0, {"t": "1" * 100}) is None
    verdict = race.add("weak", 1, {"t": "0" * 100})  # its rivals have not been there, but in the first slice
    assert verdict is not None
    assert (verdict.rival, verdict.items, verdict.difference) == ("strong", 100, 1.0)  # the one that is furthest ahead


def test_ties_and_few_items_stop_nobody() -> None:
    same = {task: np.tile(np.random.default_rng(1).random(240) < 0.7, (6, 1)) for task in EMBEDDED}
    race, counts = race_of(same, len(SLICES), confidence=0.01), proportional(EMBEDDED)
    for index in range(len(SLICES)):
        assert [race.add(str(c), index, added(same, c, counts, index)) for c in range(6)] == [None] * 6
    # A look at one item a task, all of which the rival wins, is no evidence at any usual confidence.
    race = Race(45, EMBEDDED, 5)
    race.add("lucky", 0, dict.fromkeys(EMBEDDED, "1"))
    assert race.add("unlucky", 0, dict.fromkeys(EMBEDDED, "0")) is None
    values = tuple(-float(i) for i in range(12))
    race = Race(2, {"t": 192}, 5, measure=GOLD_LOGPROB)
    race.add("a", 0, {"t": values})
    assert race.add("b", 0, {"t": tuple(value - 9.0 for value in values)}) is None  # a dozen of 192: could be chance


def test_all_items_seen_leave_nothing_to_chance() -> None:
    """Once a slice before the last has all items, the difference is exact, however small."""
    race = Race(2, {"t": 50}, 3)
    race.add("one more", 0, {"t": "1" * 25 + "0" * 25})
    assert race.add("one less", 0, {"t": "1" * 24 + "0" * 26}) is not None


def test_a_trial_that_is_tried_again_starts_over() -> None:
    race = Race(2, {"t": 400}, 3)
    race.add("strong", 0, {"t": "1" * 100})
    race.add("retried", 0, {"t": "1" * 100})
    race.add("retried", 1, {"t": "1" * 100})
    assert race.add("retried", 0, {"t": "1" * 100}) is None
    assert race.add("retried", 1, {"t": "1" * 100}) is None
    assert race.add("strong", 1, {"t": "1" * 100}) is None  # 200 items each, not 300


def test_even_slices_hold_their_fraction_as_evenly_as_sizes_allow() -> None:
    counts = even_slices(TASK_ITEMS, SLICES)
    assert counts[-1] == TASK_ITEMS
    for part, seen in zip(SLICES, counts, strict=True):
        assert sum(seen.values()) == pytest.approx(part * sum(TASK_ITEMS.values()), abs=len(TASK_ITEMS))
        level = max(seen.values())
        assert all(n in (TASK_ITEMS[task], level) for task, n in seen.items())
    assert counts[0] == dict.fromkeys(TASK_ITEMS, 183)
    assert all(a[t] <= b[t] for a, b in pairwise(counts) for t in TASK_ITEMS)
    assert even_slices(EMBEDDED, SLICES) == proportional(EMBEDDED)
    assert even_slices({"t": 30}, (0.1, 1.0)) == [{"t": 3}, {"t": 30}]
    assert even_slices({"a": 1, "b": 2}, (1 / 16, 1.0)) == [{"a": 1, "b": 1}, {"a": 1, "b": 2}]
