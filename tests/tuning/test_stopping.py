"""The rules that stop trials, told by hand what a search tells them, and in real Ray Tune runs of stub trials."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler

from tests.searches import start
from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import Slice
from tune_prune.core.store import ITEMS, TRIALS, FolderStore
from tune_prune.data import checks
from tune_prune.evaluation.item_scores import ItemScore, to_parquet
from tune_prune.trial.context import TrialContext
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.observers.results import FailuresObserver
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.ray import QueueSearcher, RuleScheduler
from tune_prune.tuning.stopping import (
    GOLD_LOGPROB,
    AshaRule,
    KlFilterRule,
    RaceRule,
    StoppingRule,
    read_outcomes,
)
from tune_prune.tuning.work import TrialSpec

SIZES = {"boolq": 400, "piqa": 200}
ADDED = ({"boolq": 100, "piqa": 50}, {"boolq": 100, "piqa": 50}, {"boolq": 200, "piqa": 100})
SLICES = (0.25, 0.5, 1.0)


def specs_of(*keys: str, model: str = "m", slices=SLICES, ratio: float = 0.2) -> dict[str, TrialSpec]:
    protocol = EvaluationProtocol(("boolq", "piqa"), slices=slices)
    run = ModelRun(model, model, None, "embedded", None, protocol, 0, "float32")
    return {key: TrialSpec(run, PruningConfig("taylor", 16, 1 + i, ratio), key) for i, key in enumerate(keys)}


def outcomes(index: int, right: float) -> dict[str, str]:
    return {task: ("1" * round(right * n)).ljust(n, "0") for task, n in ADDED[index].items()}


def message(key: str, index: int, right: float) -> TrialMessage:
    """A worker's message after a slice, of items that are right or not."""
    part = Slice(index, SLICES[index], outcomes(index, right), SIZES)
    return stage_message(key, slice=part, metrics={"acc_mean": right}, items_scored=10, items_total=20)


def nats(key: str, index: int, golds: dict[str, tuple[float, ...]], sizes: dict[str, int]) -> TrialMessage:
    """A worker's message after a slice, of the log-probabilities of right choices."""
    part = Slice(index, SLICES[index], {"boolq": "1" * 100}, {"boolq": 400}, golds, sizes)
    return stage_message(key, slice=part, items_scored=100, items_total=400)


def test_a_trial_far_behind_is_stopped_with_its_reason() -> None:
    specs = specs_of("good00-key", "bad000-key")
    rule = RaceRule(specs)
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
    rule, sizes = RaceRule(specs, measure=GOLD_LOGPROB), {"boolq": 360}
    assert not rule.stops(nats("good00-key", 0, {"boolq": (-1.0,) * 90}, sizes))
    assert rule.stops(nats("bad000-key", 0, {"boolq": (-1.5, -2.5) * 45}, sizes))
    # D = 1; V = 0.75 (45 (0.5^2 + 1.5^2)) / 90^2, M = 0.75 / 90, L = 3 sqrt(1.25): sqrt(V + M L D) = 0.1957
    assert "by 1.000 ± 0.196 nats on 90 of 360 questions (limit 2.0 " in rule.reasons["bad000-key"]


@pytest.mark.parametrize("others", [{"model": "other"}, {"ratio": 0.3}])
@pytest.mark.parametrize("kind", [RaceRule, AshaRule])
def test_models_and_ratios_do_not_race_each_other(kind, others) -> None:
    rule = kind(specs_of("a", "c") | specs_of("b", **others))
    trials = (("a", 0.9), ("b", 0.1), ("c", 0.1))
    assert [rule.stops(message(key, 0, accuracy)) for key, accuracy in trials] == [False, False, True]


@pytest.mark.parametrize("kind", [RaceRule, AshaRule, lambda specs: KlFilterRule(specs, (), RaceRule(specs))])
def test_a_trial_that_has_failed_stops_no_other(kind) -> None:
    """A failed trial has no result; tried again, it races from the start."""

    def failed(key: str) -> TrialMessage:
        told = message(key, 0, 0.9)
        return replace(told, record=replace(told.record, status="failed"))

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


def test_complete_trials_of_an_earlier_start_compete() -> None:
    known = {"done": [outcomes(index, 0.9) for index in range(3)]}
    rule = RaceRule(specs_of("done", "new"), known)
    assert rule.stops(message("new", 0, 0.2))
    assert "taylor-s16-n1-done" in rule.reasons["new"]
    assert not RaceRule(specs_of("done", "new"), known).stops(message("new", 0, 0.9))
    golds = [{"boolq": (-1.0,) * n} for n in (100, 100, 200)]
    rule = RaceRule(specs_of("done", "new"), {"done": golds}, measure=GOLD_LOGPROB)
    assert rule.stops(nats("new", 0, {"boolq": (-3.0,) * 100}, {"boolq": 400}))


def score(task: str, part: int, right: bool, gold: int, *values: float) -> ItemScore:
    """An item of boolq, which is reported by acc, or of another task, which is by acc_norm."""
    acc, acc_norm = (right, None) if task == "boolq" else (not right, float(right))
    return ItemScore(task, 0, part, float(acc), acc_norm, values, gold)


def test_items_of_a_complete_trial_are_read_in_scoring_order(tmp_path: Path) -> None:
    items = [score("boolq", 0, True, 1, -1.0, -2.0), score("boolq", 0, False, 0, -0.1, -9.0)]
    items += [score("boolq", 2, True, 0, -math.inf, -1.0), score("piqa", 2, False, 0, -8.0)]
    path = tmp_path / "0123abcd" / ITEMS
    path.parent.mkdir()
    path.write_bytes(to_parquet(items))
    assert read_outcomes(path, 3) == [{"boolq": "10"}, {}, {"boolq": "1", "piqa": "0"}]
    for content in (b"no parquet", to_parquet([score("boolq", 4, True, 0, -1.0)])):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"0123abcd\.json"):  # the record to remove
            read_outcomes(path, 3)


def test_a_search_hears_what_the_files_of_its_trials_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value of a message is that of items.parquet, they add up to the record's metrics, and no record holds them."""
    heard: dict[str, list[dict[str, tuple[float, ...]]]] = {}
    original = RaceRule.stops

    def stops(self: RaceRule, told: TrialMessage) -> bool:
        if told.slice is not None:
            heard.setdefault(told.record.key, []).append(dict(told.slice.gold_logprobs))
            assert told.slice.gold_items_per_task == {"boolq": 6, "piqa": 6}
        return original(self, told)

    monkeypatch.setattr(RaceRule, "stops", stops)
    protocol = EvaluationProtocol(tasks=("boolq", "piqa"), limit=6, slices=(0.5, 1.0), perplexity_window=64)
    run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, protocol, 0, "float32")
    context = TrialContext.open(run, tmp_path / "artifacts", device="cpu")
    configs = [spec.config for spec in specs_of("a", "b").values()]
    jobs, folder = [TrialSpec(run, config, context.key(config)) for config in configs], tmp_path / "search"
    assert start(jobs[:1], folder, inline=True, scheduler="race-gold").count("complete") == 1
    result = start(jobs, folder, inline=True, scheduler="race-gold")  # the first one comes in by its file
    assert result.count("complete") == 2 and len(heard) == 2
    for key, slices in heard.items():
        read = read_outcomes(folder / TRIALS / key / ITEMS, 2, GOLD_LOGPROB)
        assert read[: len(slices)] == slices
        for task in protocol.tasks:
            values = [value for part in read for value in part[task]]
            assert result.records[key].metrics[f"gold_logprob_{task}"] == sum(values) / len(values)
    for record in Ledger(FolderStore(folder)).records():
        assert not any({"slice", "outcomes", "gold_logprobs"} & set(stage.to_dict()) for stage in record.stages)


def test_tasks_without_right_choices_are_refused_before_a_search(tmp_path: Path) -> None:
    def run(*tasks: str) -> ModelRun:
        protocol = EvaluationProtocol(tasks=tasks)
        return ModelRun("tiny-llama", "tiny-llama", None, "embedded", str(tmp_path), protocol, 0, "float32")

    for name, kind in (("cloze", "loglikelihood"), ("last", "loglikelihood"), ("quiz", "multiple_choice")):
        folder = tmp_path / "tasks" / name
        folder.mkdir(parents=True)
        (folder / "task.yaml").write_text(f"output_type: {kind}\ndoc_to_text: x\ndoc_to_target: y\n")
        (folder / "test.jsonl").write_text('{"x": 1}\n')
    checks.check_right_choices(run("cloze", "quiz"), "--kl-filter")
    with pytest.raises(UserError, match=r"^--kl-filter needs .* cloze, last have none .*leave it out, or add"):
        checks.check_right_choices(run("cloze", "last"), "--kl-filter")


def test_asha_decides_as_rays_does() -> None:
    """Ray's scheduler is told the same: 30 trials of random accuracies, their slices in random order."""
    rng, slices = random.Random(1), (0.1, 0.3, 0.4, 0.6, 1.0)
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
        if stops:
            stopped.append(key)
            assert ours.reasons[key].startswith(f"stopped by the scheduler at acc_mean {accuracy:.4f} after ")
        reached[key] += 1
        if stops or reached[key] == len(slices) - 1:
            del reached[key]
    assert 10 < len(stopped) < 30


@pytest.mark.slow
def test_trials_shorter_than_the_start_of_an_actor_get_to_two_actors(two_cpus, tmp_path: Path) -> None:
    """Ray's own FIFO runs all of them on the first actor, and kills every other one while it starts."""
    both = tmp_path / "both"

    class WhenBothWork(tune.Stopper):  # how long the second one takes, the load of the machine decides
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
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
            search_alg=QueueSearcher(WorkQueue([], list(specs.values()))),
            scheduler=RuleScheduler(StoppingRule()),
            num_samples=len(specs),
            max_concurrent_trials=2,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
            stop=WhenBothWork(),
        ),
    ).fit()
    assert both.exists()
