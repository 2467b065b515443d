"""The rules that stop trials, told by hand what a search tells them, and in real Ray Tune runs of stub trials."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.evaluation.item_scores import ItemScore, to_parquet
from tune_prune.tuning.messages import Slice, TrialMessage
from tune_prune.tuning.observers.results import FailuresObserver
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.ray_cluster.trainable import to_result
from tune_prune.tuning.ray_cluster.tuner import QueueSearcher, RuleScheduler
from tune_prune.tuning.stopping import AshaRule, KlFilterRule, RaceRule, StoppingRule, read_outcomes
from tune_prune.tuning.work import TrialSpec, groups_of_draws

SIZES = {"boolq": 400, "piqa": 200}
ADDED = ({"boolq": 100, "piqa": 50}, {"boolq": 100, "piqa": 50}, {"boolq": 200, "piqa": 100})
SLICES = (0.25, 0.5, 1.0)


def specs_of(*keys: str, model: str = "m", slices=SLICES, ratio: float = 0.2) -> dict[str, TrialSpec]:
    run = ModelRun(
        model, model, None, "embedded", None, EvaluationProtocol(("boolq", "piqa"), slices=slices), 0, "float32"
    )
    return {key: TrialSpec(run, PruningConfig("taylor", 16, 1 + i, ratio), key) for i, key in enumerate(keys)}


def outcomes(index: int, right: float) -> dict[str, str]:
    return {task: ("1" * round(right * n)).ljust(n, "0") for task, n in ADDED[index].items()}


def message(key: str, index: int, right: float) -> TrialMessage:
    """A worker's message after a slice."""
    part = Slice(index, SLICES[index], outcomes(index, right), SIZES)
    return stage_message(key, slice=part, metrics={"acc_mean": right}, items_scored=10, items_total=20)


def test_every_draw_is_a_group_of_its_own():
    """The run's own draw (None) is none of the others, seed 0 neither."""
    (spec,) = specs_of("one").values()
    specs = [replace(spec, config=replace(spec.config, seed=seed), key=str(seed)) for seed in (None, 0, 1)]
    assert groups_of_draws(specs) == {"None": "m", "0": "m 0", "1": "m 1"}


def test_a_trial_far_behind_is_stopped_with_its_reason():
    rule = RaceRule(specs_of("good00-key", "bad000-key"))
    assert not rule.stops(stage_message("bad000-key", "pruning"))
    assert not rule.stops(message("bad000-key", 0, 0.2))  # alone
    assert not rule.stops(message("good00-key", 0, 0.8))
    assert rule.reasons == {}
    assert rule.stops(message("bad000-key", 1, 0.2))
    # D = 0.6; V = 0.75 (60 / 200^2 + 30 / 100^2), M = 0.75 / 100: sqrt(V + M D) = 0.0886; Phi^-1(1 - 0.05 / 2) = 1.96
    assert rule.reasons == {
        "bad000-key": "stopped by the race: behind taylor-s16-n1-good00 by 60.0 ± 8.9 points on 150 of 600 questions "
        "(limit 2.0 standard errors, confidence 95% for all trials of the model)"
    }
    assert not rule.stops(message("good00-key", 1, 0.8))


@pytest.mark.parametrize("others", [{"model": "other"}, {"ratio": 0.3}])
@pytest.mark.parametrize("kind", [RaceRule, AshaRule])
def test_models_and_ratios_do_not_race_each_other(kind, others):
    rule = kind(specs_of("a", "c") | specs_of("b", **others))
    trials = (("a", 0.9), ("b", 0.1), ("c", 0.1))
    assert [rule.stops(message(key, 0, accuracy)) for key, accuracy in trials] == [False, False, True]


@pytest.mark.parametrize("kind", [RaceRule, AshaRule, lambda specs: KlFilterRule(specs, (), RaceRule(specs))])
def test_a_trial_that_has_failed_stops_no_other(kind):
    """As it has no result; tried again, it races from the start."""
    rule = kind(specs_of("leader", "second", "third"))
    rule.forget("third")  # before anything was heard of it
    assert not rule.stops(message("leader", 0, 0.9))
    assert rule.stops(message("third", 0, 0.1))
    observer = FailuresObserver(rule.forget)
    observer.on_error(None, failed("leader"), ValueError())
    observer.on_end(None, failed("third"))
    assert not rule.stops(message("second", 0, 0.1))
    assert not rule.stops(message("leader", 0, 0.9))
    if not isinstance(rule, AshaRule):  # which looks back at no trial that was there before
        assert rule.stops(message("second", 1, 0.1))


def failed(key: str) -> TrialMessage:
    told = message(key, 0, 0.9)
    return replace(told, record=replace(told.record, status="failed"))


def test_limits_count_all_configurations_of_the_model_not_those_that_ran():
    few, many = specs_of("a", "b"), specs_of("a", "b", *map(str, range(5000)))
    answers = []
    for specs in (few, many):
        rule = RaceRule(specs)
        rule.stops(message("a", 0, 0.60))
        answers.append(rule.stops(message("b", 0, 0.46)))
    assert answers == [True, False]


def test_complete_trials_of_an_earlier_start_compete():
    known = {"done": [outcomes(index, 0.9) for index in range(3)]}
    rule = RaceRule(specs_of("done", "new"), known)
    assert rule.stops(message("new", 0, 0.2))
    assert "taylor-s16-n1-done" in rule.reasons["new"]
    assert not RaceRule(specs_of("done", "new"), known).stops(message("new", 0, 0.9))


def test_a_slice_that_adds_nothing_is_a_slice():
    """Fewer items than slices."""
    rule = RaceRule(specs_of("a"))
    sizes = {"boolq": 2, "piqa": 2}
    for index, added in enumerate([{"boolq": "1", "piqa": "1"}, {}]):
        assert not rule.stops(stage_message("a", slice=Slice(index, SLICES[index], added, sizes)))


def score(task: str, doc_id: int, part: int, right: bool) -> ItemScore:
    """boolq is reported by acc, piqa by acc_norm."""
    acc, acc_norm = (right, None) if task == "boolq" else (not right, float(right))
    return ItemScore(task, doc_id, part, float(acc), acc_norm, (-1.0, -2.0), 0)


def test_items_of_a_complete_trial_are_read_in_scoring_order(tmp_path):
    items = [score("boolq", 7, 0, True), score("boolq", 2, 0, False), score("piqa", 5, 0, True)]
    items += [score("boolq", 1, 2, True), score("piqa", 0, 2, False), score("piqa", 9, 2, True)]
    (tmp_path / "items.parquet").write_bytes(to_parquet(items))
    assert read_outcomes(tmp_path / "items.parquet", 3) == [
        {"boolq": "10", "piqa": "1"},
        {},
        {"boolq": "1", "piqa": "01"},
    ]


def test_items_that_cannot_be_read_say_which_record_to_remove(tmp_path):
    folder = tmp_path / "0123abcd"
    folder.mkdir()
    path = folder / "items.parquet"
    with pytest.raises(UserError, match=r"0123abcd\.json"):
        read_outcomes(path, 3)
    path.write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"0123abcd\.json"):
        read_outcomes(path, 3)
    path.write_bytes(to_parquet([score("boolq", 0, 4, True)]))
    with pytest.raises(UserError, match=r"0123abcd\.json"):
        read_outcomes(path, 3)


@pytest.mark.parametrize(
    ("slices", "levels"),
    [
        ((1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0), {0.25, 0.5}),
        ((0.25, 0.5, 1.0), {0.25, 0.5}),
        ((0.5, 1.0), {0.5}),
        ((0.1, 1.0), set()),
    ],
)
def test_asha_halves_at_a_quarter_of_the_items_and_its_doublings(slices, levels):
    """The second trial is worse at the slice in question, and only there: it is stopped if the slice is a level."""
    for part in slices[:-1]:
        rule = AshaRule(specs_of("a", "b", slices=slices))
        answers = {}
        for key in ("a", "b"):
            for seen in slices[:-1]:
                worse = key == "b" and seen == part
                given = stage_message(key, slice=Slice(0, seen, {}, {}), metrics={"acc_mean": 0.4 if worse else 0.5})
                answers[key, seen] = rule.stops(given)
        assert {key for key, stops in answers.items() if stops} == ({("b", part)} if part in levels else set())
        if part in levels:
            assert rule.reasons["b"].startswith("stopped by the scheduler at acc_mean 0.4000 after ")


def test_asha_stops_no_trial_for_how_its_sum_was_rounded():
    """Both have 389 of 420 items."""
    rule = AshaRule(specs_of("a", "b"))
    for key, accuracy in (("a", 0.9261904761904763), ("b", 0.9261904761904762)):
        assert not rule.stops(stage_message(key, slice=Slice(0, 0.25, {}, {}), metrics={"acc_mean": accuracy}))


@pytest.mark.parametrize("slices", [(1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0), (0.1, 0.3, 0.4, 0.6, 1.0)])
def test_asha_decides_as_rays_does(slices):
    """Ray's scheduler is told the same: 30 trials of random accuracies, their slices in random order."""
    rng = random.Random(1)
    specs = specs_of(*(f"k{index}" for index in range(30)), slices=slices)
    grace = next(part for part in slices if part >= 0.25)
    theirs = AsyncHyperBandScheduler("part", "acc", "max", max_t=1, grace_period=grace, reduction_factor=2)
    trials = {key: SimpleNamespace(trial_id=key) for key in specs}
    for one in trials.values():
        theirs.on_trial_add(None, one)
    ours, reached, stopped = AshaRule(specs), dict.fromkeys(specs, 0), []
    while reached:
        key = rng.choice(list(reached))
        part, accuracy = slices[reached[key]], rng.random()
        given = stage_message(key, slice=Slice(reached[key], part, {}, {}), metrics={"acc_mean": accuracy})
        stops = ours.stops(given)
        assert stops == (theirs.on_trial_result(None, trials[key], {"part": part, "acc": accuracy}) == "STOP")
        reached[key] += 1
        stopped += [key] * stops
        if stops or reached[key] == len(slices) - 1:
            del reached[key]
    assert 10 < len(stopped) < 30


def quiet_run(folder, **options):
    checkpoints = tune.CheckpointConfig(checkpoint_at_end=False)
    return tune.RunConfig(storage_path=str(folder), checkpoint_config=checkpoints, verbose=0, **options)


@pytest.mark.slow
def test_ray_stops_what_the_race_stops(two_cpus, tmp_path):
    """One at a time: the good trial has completed when the bad one reports its first slice, the equal one goes on."""
    accuracy = {"good": 0.8, "bad": 0.2, "equal": 0.8}
    # All that a trial reports, made here: a worker need not import this module.
    reports: dict[str, list[dict]] = {}
    for key, right in accuracy.items():
        parts = [Slice(i, SLICES[i], outcomes(i, right), SIZES) for i in range(3)]
        sent = [stage_message(key, "pruning"), *(stage_message(key, slice=part) for part in parts)]
        reports[key] = [to_result(one) for one in sent]
        reports[key][-1]["done"] = True

    class Stub(tune.Trainable):
        def setup(self, config):
            self.coming = iter(reports[config["key"]])

        def step(self):
            return next(self.coming)

        def reset_config(self, new_config):
            self.setup(new_config)
            return True

    rule = RaceRule(specs_of(*accuracy))
    results = tune.Tuner(
        tune.with_resources(Stub, {"cpu": 1.5}),
        param_space={"key": tune.grid_search(list(accuracy))},
        tune_config=tune.TuneConfig(scheduler=RuleScheduler(rule), reuse_actors=True),
        run_config=quiet_run(tmp_path),
    ).fit()
    assert not results.errors
    steps = {result.config["key"]: result.metrics["training_iteration"] for result in results}
    assert steps == {"good": 4, "bad": 2, "equal": 4}
    assert set(rule.reasons) == {"bad"}


@pytest.mark.slow
def test_trials_shorter_than_the_start_of_an_actor_get_to_two_actors(two_cpus, tmp_path):
    """Ray's own FIFO runs all of them on the first actor, and kills every other one while it starts."""
    both = tmp_path / "both"

    class WhenBothWork(tune.Stopper):  # how long the second one takes, the load of the machine decides
        def __call__(self, trial_id, result):
            return False

        def stop_all(self):
            return both.exists()

    class Short(tune.Trainable):
        def setup(self, config):
            self.trials = 0
            self.first = False
            try:
                (tmp_path / "first").touch(exist_ok=False)
                self.first = True
            except FileExistsError:
                time.sleep(1.5)  # imports, a model: the second actor comes when the first has long begun

        def step(self):
            time.sleep(0.3)
            self.trials += 1
            if not self.first and self.trials > 2:
                both.touch()
            return {"done": True}

        def reset_config(self, new_config):
            return True

    specs = specs_of(*(f"key{index}" for index in range(100)))
    tune.Tuner(
        tune.with_resources(Short, {"cpu": 1}),
        tune_config=tune.TuneConfig(
            search_alg=QueueSearcher(WorkQueue([], list(specs.values())), []),
            scheduler=RuleScheduler(StoppingRule()),
            num_samples=len(specs),
            max_concurrent_trials=2,
            reuse_actors=True,
        ),
        run_config=quiet_run(tmp_path, stop=WhenBothWork()),
    ).fit()
    assert both.exists()
