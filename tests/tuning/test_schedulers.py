"""The schedulers: given results as Ray gives them, by hand and in real Ray Tune runs of stub trials."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.tune.utils.util import flatten_dict

from tests.trial_messages import stage_result
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.evaluation.item_scores import ItemScore, to_parquet
from tune_prune.tuning.messages import Slice
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.ray_cluster import cluster
from tune_prune.tuning.stopping.race import RaceScheduler, read_outcomes
from tune_prune.tuning.stopping.schedulers import AshaScheduler, PlainScheduler
from tune_prune.tuning.trainable import TrialSpec

SIZES = {"boolq": 400, "piqa": 200}
ADDED = ({"boolq": 100, "piqa": 50}, {"boolq": 100, "piqa": 50}, {"boolq": 200, "piqa": 100})
SLICES = (0.25, 0.5, 1.0)


def specs_of(*keys: str, model: str = "m", slices=SLICES, ratio: float = 0.2) -> dict[str, TrialSpec]:
    run = ModelRun(
        model, model, None, "embedded", None, EvaluationProtocol(("boolq", "piqa"), slices=slices), 0, "float32"
    )
    return {key: TrialSpec(run, PruningConfig("taylor", 16, 1 + i, ratio), key) for i, key in enumerate(keys)}


def trial(key: str) -> SimpleNamespace:
    return SimpleNamespace(trial_id=f"ray-{key}", config={"key": key})


def outcomes(index: int, right: float) -> dict[str, str]:
    return {task: ("1" * round(right * n)).ljust(n, "0") for task, n in ADDED[index].items()}


def result(key: str, index: int, right: float) -> dict[str, Any]:
    """A worker's result after a slice, as a scheduler sees it: Ray has flattened its dictionaries."""
    part = Slice(index, SLICES[index], outcomes(index, right), SIZES)
    return flatten_dict(stage_result(key, part=part, metrics={"acc_mean": right}))


def test_a_trial_far_behind_is_stopped_with_its_reason():
    scheduler = RaceScheduler(specs_of("good00-key", "bad000-key"))
    assert scheduler.on_trial_result(None, trial("bad000-key"), stage_result("bad000-key", "pruning")) == "CONTINUE"
    assert scheduler.on_trial_result(None, trial("bad000-key"), result("bad000-key", 0, 0.2)) == "CONTINUE"  # alone
    assert scheduler.on_trial_result(None, trial("good00-key"), result("good00-key", 0, 0.8)) == "CONTINUE"
    assert scheduler.reason("bad000-key") is None
    assert scheduler.on_trial_result(None, trial("bad000-key"), result("bad000-key", 1, 0.2)) == "STOP"
    # D = 0.6; V = 0.75 (60 / 200^2 + 30 / 100^2), M = 0.75 / 100: sqrt(V + M D) = 0.0886; Phi^-1(1 - 0.05 / 2) = 1.96
    assert scheduler.reason("bad000-key") == (
        "stopped by the race: behind taylor-s16-n1-good00 by 60.0 ± 8.9 points on 150 of 600 items "
        "(limit 2.0 standard errors, confidence 95% for all trials of the model)"
    )
    assert scheduler.reason("good00-key") is None
    assert scheduler.on_trial_result(None, trial("good00-key"), result("good00-key", 1, 0.8)) == "CONTINUE"


@pytest.mark.parametrize("others", [{"model": "other"}, {"ratio": 0.3}])
def test_models_and_ratios_do_not_race_each_other(others):
    scheduler = RaceScheduler(specs_of("a", "c") | specs_of("b", **others))
    assert scheduler.on_trial_result(None, trial("a"), result("a", 0, 0.9)) == "CONTINUE"
    assert scheduler.on_trial_result(None, trial("b"), result("b", 0, 0.1)) == "CONTINUE"
    assert scheduler.on_trial_result(None, trial("c"), result("c", 0, 0.1)) == "STOP"
    scheduler = AshaScheduler(specs_of("a", "c") | specs_of("b", **others))
    for key in ("a", "b", "c"):
        scheduler.on_trial_add(None, trial(key))
    answers = [
        scheduler.on_trial_result(None, trial(key), result(key, 0, accuracy))
        for key, accuracy in (("a", 0.9), ("b", 0.1), ("c", 0.1))
    ]
    assert answers == ["CONTINUE", "CONTINUE", "STOP"]


def test_limits_count_all_configurations_of_the_model_not_those_that_ran():
    few, many = specs_of("a", "b"), specs_of("a", "b", *map(str, range(5000)))
    answers = []
    for specs in (few, many):
        scheduler = RaceScheduler(specs)
        scheduler.on_trial_result(None, trial("a"), result("a", 0, 0.60))
        answers.append(scheduler.on_trial_result(None, trial("b"), result("b", 0, 0.46)))
    assert answers == ["STOP", "CONTINUE"]


def test_complete_trials_of_an_earlier_start_compete():
    known = {"done": [outcomes(index, 0.9) for index in range(3)]}
    scheduler = RaceScheduler(specs_of("done", "new"), known)
    assert scheduler.on_trial_result(None, trial("new"), result("new", 0, 0.2)) == "STOP"
    assert "taylor-s16-n1-done" in str(scheduler.reason("new"))
    scheduler = RaceScheduler(specs_of("done", "new"), known)
    assert scheduler.on_trial_result(None, trial("new"), result("new", 0, 0.9)) == "CONTINUE"


def test_a_slice_that_adds_nothing_is_a_slice():
    """Fewer items than slices."""
    scheduler = RaceScheduler(specs_of("a"))
    sizes = {"boolq": 2, "piqa": 2}
    for index, added in enumerate([{"boolq": "1", "piqa": "1"}, {}]):
        given = flatten_dict(stage_result("a", part=Slice(index, SLICES[index], added, sizes)))
        assert scheduler.on_trial_result(None, trial("a"), given) == "CONTINUE"


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
        scheduler = AshaScheduler(specs_of("a", "b", slices=slices))
        answers = {}
        for key in ("a", "b"):
            scheduler.on_trial_add(None, trial(key))
            for seen in slices[:-1]:
                worse = key == "b" and seen == part
                given = stage_result(key, part=Slice(0, seen, {}, {}), metrics={"acc_mean": 0.4 if worse else 0.5})
                answers[key, seen] = scheduler.on_trial_result(None, trial(key), flatten_dict(given))
        assert {k for k, answer in answers.items() if answer == "STOP"} == ({("b", part)} if part in levels else set())


@pytest.mark.slow
def test_ray_stops_what_the_race_stops(tmp_path, monkeypatch):
    """One at a time: the good trial has completed when the bad one reports its first slice, the equal one goes on."""
    accuracy = {"good": 0.8, "bad": 0.2, "equal": 0.8}
    # All that a trial reports, made here: a worker need not import this module.
    reports: dict[str, list[dict]] = {}
    for key, right in accuracy.items():
        parts = [Slice(i, SLICES[i], outcomes(i, right), SIZES) for i in range(3)]
        reports[key] = [stage_result(key, "pruning"), *(stage_result(key, part=part) for part in parts)]
        reports[key][-1]["done"] = True

    class Stub(tune.Trainable):
        def setup(self, config):
            self.coming = iter(reports[config["key"]])

        def step(self):
            return next(self.coming)

        def reset_config(self, new_config):
            self.setup(new_config)
            return True

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        scheduler = RaceScheduler(specs_of(*accuracy))
        with cluster.connected(None, num_cpus=2):
            results = tune.Tuner(
                tune.with_resources(Stub, {"cpu": 1.5}),
                param_space={"key": tune.grid_search(list(accuracy))},
                tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
                run_config=tune.RunConfig(
                    storage_path=str(tmp_path),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    verbose=0,
                ),
            ).fit()
    assert not results.errors
    steps = {result.config["key"]: result.metrics["training_iteration"] for result in results}
    assert steps == {"good": 4, "bad": 2, "equal": 4}
    assert {key for key in accuracy if scheduler.reason(key)} == {"bad"}


@pytest.mark.slow
def test_trials_shorter_than_the_start_of_an_actor_get_to_two_actors(tmp_path, monkeypatch):
    """Ray's own FIFO runs all of them on the first actor, and kills every other one while it starts."""

    class Short(tune.Trainable):
        def setup(self, config):
            try:
                (tmp_path / "first").touch(exist_ok=False)
            except FileExistsError:
                time.sleep(1.5)  # imports, a model: the second actor comes when the first has long begun

        def step(self):
            time.sleep(0.3)
            return {"done": True, "actor": os.getpid()}

        def reset_config(self, new_config):
            return True

    specs = specs_of(*(f"key{index}" for index in range(50)))
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        with cluster.connected(None, num_cpus=2):
            results = tune.Tuner(
                tune.with_resources(Short, {"cpu": 1}),
                tune_config=tune.TuneConfig(
                    search_alg=WorkQueue([], list(specs.values())),
                    scheduler=PlainScheduler(),
                    num_samples=len(specs),
                    max_concurrent_trials=2,
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    storage_path=str(tmp_path),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                    verbose=0,
                ),
            ).fit()
    trials = Counter(result.metrics["actor"] for result in results)
    assert len(trials) == 2
    assert min(trials.values()) > 5
