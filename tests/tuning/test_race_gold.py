"""The race by log-probabilities of right choices: its formulas by plain loops, its guarantee by simulation, and where it finds
the numbers of running and of finished trials."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from tests.trial_messages import stage_message
from tests.tuning.test_racing import EMBEDDED, proportional
from tests.tuning.test_stopping import SLICES, specs_of
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import ITEMS, TRIALS, FolderStore
from tune_prune.data import checks
from tune_prune.evaluation.item_scores import ItemScore, to_parquet
from tune_prune.trial.context import TrialContext
from tune_prune.tuning.driver import TuneOptions, run_search
from tune_prune.tuning.messages import Slice, TrialMessage
from tune_prune.tuning.stopping import GOLD_LOGPROB, Race, RaceRule, read_outcomes
from tune_prune.tuning.work import TrialSpec

TASKS_OF = {"even": EMBEDDED, "tiny": {"a": 12, "b": 30, "c": 400}, "one": {"t": 120}}


def race_of(configs: int, sizes, confidence=0.95, slices=5) -> Race:
    return Race(configs, sizes, slices, confidence, GOLD_LOGPROB)


def part_of(scores, config: int, counts, index: int):
    before = counts[index - 1] if index else dict.fromkeys(scores, 0)
    return {task: tuple(values[config, before[task] : counts[index][task]]) for task, values in scores.items()}


def stops_of_the_best(scores) -> bool:
    """Whether any look stops configuration 0, the best on all items, when it meets every other at every slice."""
    sizes = {task: values.shape[1] for task, values in scores.items()}
    num, counts = len(next(iter(scores.values()))), proportional(sizes)
    race, stopped = race_of(num, sizes), False
    for index in range(len(counts) - 1):
        for config in [*range(1, num), 0]:
            verdict = race.add(str(config), index, part_of(scores, config, counts, index))
            stopped |= config == 0 and verdict is not None
    return stopped


def of_equal_means(sizes, draw, rng) -> dict[str, np.ndarray]:
    """Configurations that differ in nothing but which items they do well on; 0 is the best by a millionth of a nat."""
    scores = {task: draw((20, n), rng) for task, n in sizes.items()}
    means = np.mean([values.mean(axis=1) for values in scores.values()], axis=0) - 1e-6 * (np.arange(20) == 0)
    return {task: values - means[:, None] for task, values in scores.items()}


def against_steady(losses: np.ndarray) -> np.ndarray:
    """Rivals lose much on few items, the best the same on every one: small samples show the rivals ahead."""
    losses[0] = losses.mean()
    return -losses


DRAWS = {
    "normal": lambda shape, rng: rng.standard_normal(shape),
    "heavy tails": lambda shape, rng: rng.standard_t(3, shape),
    "skewed": lambda shape, rng: against_steady(rng.exponential(1.0, shape)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("sizes", TASKS_OF.values(), ids=TASKS_OF)
def test_the_best_of_equals_is_not_stopped_more_often_than_said(sizes, draw):
    rng, runs = np.random.default_rng(5), 40
    assert sum(stops_of_the_best(of_equal_means(sizes, draw, rng)) for _ in range(runs)) <= 0.05 * runs


@pytest.mark.parametrize("sizes", TASKS_OF.values(), ids=TASKS_OF)
def test_nor_where_losses_are_lognormal(sizes):
    """600 runs give up to 4%, of which so few runs may show more."""
    rng, runs = np.random.default_rng(5), 40
    scores = (
        of_equal_means(sizes, lambda shape, rng: against_steady(rng.lognormal(0.0, 1.0, shape)), rng)
        for _ in range(runs)
    )
    assert sum(map(stops_of_the_best, scores)) <= 0.1 * runs


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_clearly_worse_configurations_are_stopped_early(draw):
    """A difference of one spread, by a quarter of the items, and some at the first look."""
    rng = np.random.default_rng(1)
    scores = of_equal_means(EMBEDDED, draw, rng)
    for values in scores.values():
        values[10:] -= 1.0
    race, counts = race_of(20, EMBEDDED), proportional(EMBEDDED)
    stopped = {
        (config, index)
        for index in range(3)
        for config in range(20)
        if race.add(str(config), index, part_of(scores, config, counts, index)) is not None
    }
    assert {config for config, _ in stopped} == set(range(10, 20))
    assert any(index == 0 for _, index in stopped)


def test_a_verdict_is_what_the_formulas_say():
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
        race = race_of(10, sizes, 0.9, 3)
        assert race.add("rival", 0, rival) is None
        verdict = race.add("trial", 0, trial)
        assert (verdict is not None) == (difference > limit * error) == (win == 0)
        if verdict is not None:
            assert (verdict.rival, verdict.items) == ("rival", 120)
            assert (verdict.difference, verdict.standard_error) == pytest.approx((difference, error))
            assert verdict.limit == pytest.approx(limit)


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_a_trial_with_a_value_that_is_not_finite_neither_stops_nor_is_stopped(value):
    good, bad = [-1.0 - 0.01 * i for i in range(100)], [-5.0 - 0.01 * i for i in range(100)]
    race = race_of(3, {"t": 400}, slices=3)
    race.add("broken", 0, {"t": good})
    assert race.add("bad", 0, {"t": bad}) is not None
    race.add("broken", 0, {"t": [*good[:-1], value]})
    assert race.add("bad", 0, {"t": bad}) is None  # nor by what it showed before
    assert race.add("good", 0, {"t": good}) is None
    assert race.add("broken", 1, {"t": bad}) is None
    assert race.add("bad", 0, {"t": bad}) is not None
    assert race.add("broken", 0, {"t": bad}) is not None  # tried again, and finite


def test_ties_and_few_items_stop_nobody():
    values = tuple(-float(i) for i in range(12))
    race = race_of(2, {"t": 192})
    race.add("a", 0, {"t": values})
    assert race.add("b", 0, {"t": values}) is None
    assert race.add("b", 0, {"t": tuple(value - 9.0 for value in values)}) is None  # a dozen of 192: could be chance
    with pytest.raises(ValueError, match="other items in slice 0"):
        race.add("b", 0, {"t": values[:-1]})


def test_where_a_task_shows_its_first_item_late_nothing_is_said_before():
    """Some of its items have several right choices, and none of the others has come."""
    race = race_of(2, {"t": 400, "mixed": 100}, slices=3)
    good, bad = {"t": [-1.0] * 100}, {"t": [-9.0] * 100}
    race.add("good", 0, good)
    assert race.add("bad", 0, bad) is None
    race.add("good", 1, good | {"mixed": [-1.0] * 50})
    assert race.add("bad", 1, bad | {"mixed": [-9.0] * 50}) is not None


def message(key: str, index: int, golds: dict[str, tuple[float, ...]], sizes: dict[str, int]) -> TrialMessage:
    part = Slice(index, SLICES[index], {"boolq": "1" * 100}, {"boolq": 400}, golds, sizes)
    return stage_message(key, slice=part, items_scored=100, items_total=400)


def test_a_trial_far_behind_is_stopped_with_its_reason_in_nats():
    rule = RaceRule(specs_of("good00-key", "bad000-key"), measure=GOLD_LOGPROB)
    sizes = {"boolq": 360}
    assert not rule.stops(stage_message("bad000-key", "pruning"))
    assert not rule.stops(message("good00-key", 0, {"boolq": (-1.0,) * 90}, sizes))
    assert rule.stops(message("bad000-key", 0, {"boolq": (-1.5, -2.5) * 45}, sizes))
    # D = 1; V = 0.75 (45 (0.5^2 + 1.5^2)) / 90^2, M = 0.75 / 90, L = 3 sqrt(1.25): sqrt(V + M L D) = 0.1957
    assert rule.reasons == {
        "bad000-key": "stopped by the race: behind taylor-s16-n1-good00 by 1.000 ± 0.196 nats on 90 of 360 questions "
        "(limit 2.0 standard errors, confidence 95% for all trials of the model)"
    }


def test_where_no_item_has_a_single_right_choice_nothing_is_stopped():
    rule = RaceRule(specs_of("a", "b"), {"a": [{}, {}, {}]}, measure=GOLD_LOGPROB)
    assert not any(rule.stops(message(key, 0, {}, {})) for key in "ab")


def test_complete_trials_of_an_earlier_start_compete():
    sizes = {"boolq": 400, "piqa": 40}
    done = [{"boolq": (-1.0,) * 100}, {"boolq": (-1.0,) * 100}, {"boolq": (-1.0,) * 200, "piqa": (-1.0,) * 40}]
    rule = RaceRule(specs_of("done", "new"), {"done": done}, measure=GOLD_LOGPROB)
    assert not rule.stops(message("new", 0, {"boolq": (-3.0,) * 100}, sizes))  # nothing of piqa is known
    rule = RaceRule(
        specs_of("done", "new"), {"done": [{"boolq": golds["boolq"]} for golds in done]}, measure=GOLD_LOGPROB
    )
    assert rule.stops(message("new", 0, {"boolq": (-3.0,) * 100}, {"boolq": 400}))


def item(task: str, part: int, gold: int, *values: float) -> ItemScore:
    return ItemScore(task, 0, part, 1.0, None, values, gold)


def test_items_of_a_complete_trial_are_read_in_scoring_order(tmp_path):
    items = [item("a", 0, 1, -1.0, -2.0), item("b", 0, -1, -7.0), item("a", 0, 0, -0.1, -9.0)]
    items += [item("a", 2, 0, -math.inf, -1.0), item("b", 2, 0, -8.0), item("unclear", 0, -1, -1.0)]
    (tmp_path / "items.parquet").write_bytes(to_parquet(items))
    found = read_outcomes(tmp_path / "items.parquet", 3, GOLD_LOGPROB)
    assert found == [{"a": (-2.0, -0.1)}, {}, {"a": (-math.inf,), "b": (-8.0,)}]
    path = tmp_path / "0123abcd" / "items.parquet"
    path.parent.mkdir()
    path.write_bytes(to_parquet([item("a", 0, 2, -1.0, -2.0)]))
    with pytest.raises(UserError, match=r"0123abcd\.json"):
        read_outcomes(path, 3, GOLD_LOGPROB)


def test_a_search_hears_what_the_files_of_its_trials_hold(tmp_path, monkeypatch):
    """Every value of a message is that of items.parquet, they add up to the record's metrics, and no record holds them."""
    heard: dict[str, list[dict[str, tuple[float, ...]]]] = {}
    totals: list[dict[str, int]] = []
    original = RaceRule.stops

    def stops(self: RaceRule, message: TrialMessage) -> bool:
        if message.slice is not None:
            heard.setdefault(message.record.key, []).append(dict(message.slice.gold_logprobs))
            totals.append(dict(message.slice.gold_items_per_task))
        return original(self, message)

    monkeypatch.setattr(RaceRule, "stops", stops)
    protocol = EvaluationProtocol(tasks=("boolq", "piqa"), limit=6, slices=(0.5, 1.0), perplexity_window=64)
    run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, protocol, 0, "float32")
    context = TrialContext.open(run, tmp_path / "artifacts", device="cpu")
    configs = [spec.config for spec in specs_of("a", "b").values()]
    jobs = [TrialSpec(run, config, context.key(config)) for config in configs]
    options = TuneOptions(tmp_path, inline=True, scheduler="race-gold")
    assert run_search(jobs[:1], options).count("complete") == 1
    result = run_search(jobs, options)  # the first one comes in by its file
    assert result.count("complete") == 2 and len(heard) == 2
    assert all(sizes == {"boolq": 6, "piqa": 6} for sizes in totals)
    for key, slices in heard.items():
        read = read_outcomes(tmp_path / TRIALS / key / ITEMS, 2, GOLD_LOGPROB)
        assert read[: len(slices)] == slices
        for task in protocol.tasks:
            values = [value for part in read for value in part[task]]
            assert result.records[key].metrics[f"gold_logprob_{task}"] == sum(values) / len(values)
    for record in Ledger(FolderStore(tmp_path)).records():
        assert not any({"outcomes", "gold_logprobs"} & set(stage) for stage in record.stages)


def test_tasks_without_right_choices_are_refused_before_a_search(tmp_path):
    def run(*tasks: str) -> ModelRun:
        protocol = EvaluationProtocol(tasks=tasks)
        return ModelRun("tiny-llama", "tiny-llama", None, "embedded", str(tmp_path), protocol, 0, "float32")

    for name, kind in (("cloze", "loglikelihood"), ("last", "loglikelihood"), ("quiz", "multiple_choice")):
        folder = tmp_path / "tasks" / name
        folder.mkdir(parents=True)
        (folder / "task.yaml").write_text(f"output_type: {kind}\ndoc_to_text: x\ndoc_to_target: y\n")
        (folder / "test.jsonl").write_text('{"x": 1}\n')
    for flag, said in (
        ("--scheduler race-gold", r"^--scheduler race-gold .* cloze, last have none .*use --scheduler race, or add"),
        (
            "--objective gold_logprob",
            r"^--objective gold_logprob looks .* cloze, last have none .*use --objective accuracy, or",
        ),
        (
            "--draws-by gold_logprob",
            r"^--draws-by gold_logprob compares .* cloze, last have .*use --draws-by accuracy, or",
        ),
        ("--kl-filter", r"^--kl-filter measures .* cloze, last have none .*leave it out, or add"),
    ):
        checks.check_right_choices(run("cloze", "quiz"), flag)
        with pytest.raises(UserError, match=said):
            checks.check_right_choices(run("cloze", "last"), flag)
