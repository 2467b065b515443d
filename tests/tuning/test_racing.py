"""The race's rule, held against a computation of its own from the formulas, and its guarantee, by simulation."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest

from tune_prune.core.config import TASK_ITEMS
from tune_prune.evaluation.suite import even_slices
from tune_prune.tuning.stopping import Race

SLICES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
EMBEDDED = {f"task{i}": 240 for i in range(7)}
Scores = dict[str, np.ndarray]  # task -> bool [configurations, items]


def proportional(sizes):
    return [{task: math.ceil(part * n) for task, n in sizes.items()} for part in SLICES]


def text(scores) -> str:
    return (np.asarray(scores, dtype=np.uint8) + ord("0")).tobytes().decode()


def added(scores: Scores, config: int, counts, index: int) -> dict[str, str]:
    before = counts[index - 1] if index else dict.fromkeys(scores, 0)
    return {task: text(values[config, before[task] : counts[index][task]]) for task, values in scores.items()}


def shuffled(scores: Scores, rng) -> Scores:
    return {task: values[:, rng.permutation(values.shape[1])] for task, values in scores.items()}


def stops_of_the_best(scores: Scores, counts, confidence=0.95) -> bool:
    """Whether any look stops the configuration that is best on all items, when it meets every other at every slice."""
    accuracy = np.mean([values.mean(1) for values in scores.values()], axis=0)
    best, num = int(accuracy.argmax()), len(accuracy)
    race = Race(num, {task: values.shape[1] for task, values in scores.items()}, len(counts), confidence)
    stopped = False
    for index in range(len(counts) - 1):
        for config in [*(c for c in range(num) if c != best), best]:
            verdict = race.add(str(config), index, added(scores, config, counts, index))
            stopped |= config == best and verdict is not None
    return stopped


def test_a_verdict_is_what_the_formulas_say():
    rng = np.random.default_rng(3)
    sizes = {"a": 160, "b": 320}
    scores = {"a": rng.random((3, 160)) < 0.5, "b": rng.random((3, 320)) < 0.5}
    scores["a"][2, :40], scores["b"][2, :80] = True, True  # the last one is far ahead where all three have been
    race = Race(10, sizes, 3, confidence=0.9)
    seen = {"a": 40, "b": 80}
    parts = [{task: text(values[config, : seen[task]]) for task, values in scores.items()} for config in range(3)]
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
        verdict = fresh.add("nought", 0, {task: text(values) for task, values in spared.items()})
        assert (verdict is not None) == decisions[-1]
    assert decisions == sorted(decisions, reverse=True)
    assert len(set(decisions)) == 2


def test_a_trial_meets_each_rival_on_what_both_have_seen():
    race = Race(3, {"t": 400}, 3)
    ahead, behind = "1" * 100, "0" * 100
    assert race.add("slow", 0, {"t": ahead}) is None
    race = Race(3, {"t": 400}, 3)
    assert race.add("weak", 0, {"t": behind}) is None  # nobody to compare with
    assert race.add("strong", 0, {"t": ahead}) is None
    verdict = race.add("weak", 1, {"t": behind})  # its rival has not been there, but in the first slice
    assert verdict is not None
    assert (verdict.rival, verdict.items, verdict.difference) == ("strong", 100, 1.0)


def test_the_reported_rival_is_the_one_that_is_furthest_ahead():
    race = Race(3, {"t": 400}, 2)
    race.add("good", 0, {"t": "1" * 60 + "0" * 40})
    race.add("best", 0, {"t": "1" * 100})
    verdict = race.add("bad", 0, {"t": "0" * 100})
    assert verdict is not None
    assert verdict.rival == "best"


def test_planted_bad_configurations_are_stopped_at_the_first_slice():
    rng = np.random.default_rng(0)
    for sizes, counts in (
        (EMBEDDED, proportional(EMBEDDED)),
        (TASK_ITEMS, proportional(TASK_ITEMS)),
        (TASK_ITEMS, even_slices(TASK_ITEMS, SLICES)),
    ):
        p = np.array([0.8] * 5 + [0.3] * 5)[:, None]
        scores = {task: rng.random((10, n)) < p for task, n in sizes.items()}
        race = Race(10, sizes, len(SLICES))
        verdicts = [race.add(str(c), 0, added(scores, c, counts, 0)) for c in range(10)]
        assert [verdict is not None for verdict in verdicts] == [False] * 5 + [True] * 5


def test_ties_are_never_stopped():
    rng = np.random.default_rng(1)
    same = rng.random(240) < 0.7
    scores = {task: np.tile(same, (6, 1)) for task in EMBEDDED}
    counts = proportional(EMBEDDED)
    race = Race(6, EMBEDDED, len(SLICES), confidence=0.01)
    for index in range(len(SLICES)):
        assert [race.add(str(c), index, added(scores, c, counts, index)) for c in range(6)] == [None] * 6


def test_a_few_items_stop_nobody():
    """A look at one item a task, all of which the rival wins, is no evidence at any usual confidence."""
    race = Race(45, EMBEDDED, 5)
    race.add("lucky", 0, dict.fromkeys(EMBEDDED, "1"))
    assert race.add("unlucky", 0, dict.fromkeys(EMBEDDED, "0")) is None


def test_all_items_seen_leave_nothing_to_chance():
    """Where a slice before the last has them all, the difference is what it is, however small."""
    race = Race(2, {"t": 50}, 3)
    race.add("one more", 0, {"t": "1" * 25 + "0" * 25})
    assert race.add("one less", 0, {"t": "1" * 24 + "0" * 26}) is not None


def exchangeable(sizes, configs: int, correlation: float, rng) -> Scores:
    """Outcomes of equally good configurations, correlated by a latent difficulty of the items."""
    limits = rng.uniform(-0.8, 0.8, len(sizes))
    return {
        task: math.sqrt(correlation) * rng.standard_normal(n)
        + math.sqrt(1 - correlation) * rng.standard_normal((configs, n))
        < limit
        for (task, n), limit in zip(sizes.items(), limits, strict=True)
    }


def opposed(sizes, configs: int, small: str, large: str, rng) -> Scores:
    """Configuration 0 is best by one item: it misses 10% of `large`; each rival misses 10% of `small`, other items each."""
    scores = {task: np.ones((configs, n), dtype=bool) for task, n in sizes.items()}
    scores[large][0, : sizes[large] // 10 - 1] = False
    for rival in range(1, configs):
        scores[small][rival, rng.choice(sizes[small], sizes[small] // 10, replace=False)] = False
    return scores


@pytest.mark.parametrize("correlation", [0.0, 0.8, 0.98])
def test_the_best_of_equals_is_not_stopped_more_often_than_said(correlation):
    """The guarantee where it is hardest to keep by chance: any of them may lead at any slice."""
    rng = np.random.default_rng(5)
    runs = 60
    stopped = sum(
        stops_of_the_best(exchangeable(EMBEDDED, 20, correlation, rng), proportional(EMBEDDED)) for _ in range(runs)
    )
    assert stopped <= 0.05 * runs


@pytest.mark.parametrize(
    "counts", [proportional(TASK_ITEMS), even_slices(TASK_ITEMS, SLICES)], ids=["proportional", "even"]
)
def test_wins_that_no_item_has_shown_yet_are_reckoned_with(counts):
    """The trial wins by items of the smallest task, few of which are seen early; its rivals win in the largest at once."""
    rng = np.random.default_rng(6)
    scores = opposed(TASK_ITEMS, 20, "openbookqa", "hellaswag", rng)
    runs = 20
    assert sum(stops_of_the_best(shuffled(scores, rng), counts) for _ in range(runs)) <= 0.05 * runs


def test_less_confidence_stops_more():
    rng = np.random.default_rng(7)
    p = np.linspace(0.5, 0.8, 12)[:, None]
    scores = {task: rng.random((12, n)) < p for task, n in EMBEDDED.items()}
    counts = proportional(EMBEDDED)
    stopped = []
    for confidence in (0.5, 0.95, 0.999999):
        race = Race(12, EMBEDDED, len(SLICES), confidence)
        looks = [(c, race.add(str(c), i, added(scores, c, counts, i))) for i in range(4) for c in range(12)]
        stopped.append({c for c, verdict in looks if verdict is not None})
    assert stopped[2] < stopped[1] <= stopped[0] < set(range(12))


def test_the_same_calls_give_the_same_verdicts():
    rng = np.random.default_rng(8)
    scores = {task: rng.random((8, n)) < np.linspace(0.3, 0.8, 8)[:, None] for task, n in EMBEDDED.items()}
    counts = proportional(EMBEDDED)

    def run():
        race = Race(8, EMBEDDED, len(SLICES))
        return [race.add(str(c), i, added(scores, c, counts, i)) for i in range(4) for c in range(8)]

    assert run() == run()
    assert any(run())


def test_a_trial_that_is_tried_again_starts_over():
    race = Race(2, {"t": 400}, 3)
    race.add("strong", 0, {"t": "1" * 100})
    race.add("retried", 0, {"t": "1" * 100})
    race.add("retried", 1, {"t": "1" * 100})
    assert race.add("retried", 0, {"t": "1" * 100}) is None
    assert race.add("retried", 1, {"t": "1" * 100}) is None
    assert race.add("strong", 1, {"t": "1" * 100}) is None  # 200 items each, not 300


@pytest.mark.parametrize(
    ("key", "index", "outcomes", "words"),
    [
        ("b", 0, {"t": "1" * 9, "u": "1" * 11}, "other items in slice 0"),
        ("b", 0, {"t": "1" * 20}, "other items in slice 0"),
        ("b", 0, {"t": "1" * 10, "v": "1" * 10}, "'v'"),
        ("b", 1, {"t": "1" * 10, "u": "1" * 10}, "reports slice 1; 0 of 3"),
        ("a", 2, {"t": "1" * 10, "u": "1" * 10}, "reports slice 2; 1 of 3"),
        ("b", 0, {"t": "2" * 10, "u": "1" * 10}, "neither 0 nor 1"),
        ("a", 1, {"t": "1" * 91, "u": "1" * 10}, "items were seen of tasks"),
    ],
)
def test_what_does_not_fit_the_other_trials_is_refused(key, index, outcomes, words):
    race = Race(2, {"t": 100, "u": 100}, 3)
    race.add("a", 0, {"t": "1" * 10, "u": "0" * 10})
    with pytest.raises(ValueError, match=words):
        race.add(key, index, outcomes)


def test_a_race_that_cannot_be_is_refused():
    for num, sizes, slices, confidence in (
        (0, {"t": 1}, 2, 0.9),
        (2, {}, 2, 0.9),
        (2, {"t": 1}, 0, 0.9),
        (2, {"t": 1}, 2, 1.0),
    ):
        with pytest.raises(ValueError, match="no race"):
            Race(num, sizes, slices, confidence)
    race = Race(1, {"t": 10}, 2)
    race.add("a", 0, {"t": "1"})
    with pytest.raises(ValueError, match="one more than the 1"):
        race.add("b", 0, {"t": "1"})


def test_even_slices_hold_their_fraction_as_evenly_as_sizes_allow():
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
