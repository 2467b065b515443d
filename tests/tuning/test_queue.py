"""What Ray Tune is handed, and when: jobs first, a trial once its statistics are there, nothing after a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.tune.search import Searcher

from tests.trial_messages import stage_result
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.pruning.statistics import Need
from tune_prune.tuning.messages import JobMessage, to_result
from tune_prune.tuning.preparation import prepare_jobs
from tune_prune.tuning.queue import StopAtFailure, WorkQueue
from tune_prune.tuning.searcher import OptunaSearcher
from tune_prune.tuning.worker import TrialSpec

DONE = to_result(JobMessage())


def run_of(label: str) -> ModelRun:
    return ModelRun(label, label, None, "embedded", None, EvaluationProtocol(), 0, "float32")


def specs_of(label: str) -> list[TrialSpec]:
    configs = [PruningConfig(m, s, n) for m in ("taylor", "layerwise", "blockwise") for s in (16, 32) for n in (8, 40)]
    return [TrialSpec(run_of(label), config, f"{label}-{config.name}") for config in configs]


@pytest.fixture
def specs() -> list[TrialSpec]:
    return specs_of("one")


def test_one_job_per_model_and_seq_len_and_one_per_baseline(specs):
    jobs = prepare_jobs(specs, [specs[0].run])
    assert [str(job) for job in jobs] == [
        "baseline of one",
        "statistics at seq_len 32 of one",
        "statistics at seq_len 16 of one",
    ]
    assert jobs[0].needs == ()
    gradients = [Need("taylor", "", 8), Need("taylor", "", 40)]
    assert jobs[1].needs == (*gradients, *(Need("block_removal", kind, 8) for kind in ("attention", "layer", "mlp")))
    assert prepare_jobs([], [specs[0].run]) == jobs[:1]
    both = prepare_jobs([*specs, *specs_of("two")], [run_of("two")])
    assert [(job.run.label, job.seq_len) for job in both] == [
        ("one", 32),
        ("one", 16),
        ("two", None),
        ("two", 32),
        ("two", 16),
    ]


def test_a_trial_is_handed_out_when_its_statistics_are_there(specs):
    queue = WorkQueue(prepare_jobs(specs, [specs[0].run]), specs)
    assert [queue.suggest(str(i)) for i in range(3)] == [{"job": 0}, {"job": 1}, {"job": 2}]
    assert queue.suggest("x") is None  # nothing is ready, and nothing holds a device to wait
    queue.on_trial_complete("0", DONE)
    assert queue.suggest("x") is None  # the baseline helps no trial
    queue.on_trial_complete("2", DONE)
    short = [spec.key for spec in specs if spec.config.seq_len == 16]
    assert [queue.suggest(key)["key"] for key in short] == short
    assert queue.suggest("x") is None
    queue.on_trial_complete("1", DONE)
    long = [spec.key for spec in specs if spec.config.seq_len == 32]
    assert [queue.suggest(key)["key"] for key in long] == long
    assert queue.suggest("x") == Searcher.FINISHED


def test_a_method_that_reads_no_data_waits_for_no_pass(specs):
    free = [TrialSpec(spec.run, replace(spec.config, method="random"), f"free-{spec.key}") for spec in specs[:2]]
    jobs = prepare_jobs([*specs, *free], [])
    assert jobs == prepare_jobs(specs, [])
    queue = WorkQueue(jobs, [*specs, *free])
    assert [queue.suggest(str(i)) for i in range(5)] == [{"job": 0}, {"job": 1}, *({"key": s.key} for s in free), None]
    assert prepare_jobs(free, []) == []


@pytest.mark.parametrize("outcome", [{"result": to_result(JobMessage(refused="no such text"))}, {"error": True}])
def test_nothing_is_handed_out_after_a_failure(specs, outcome: dict[str, Any]):
    queue = WorkQueue(prepare_jobs(specs, []), specs)
    stopper = StopAtFailure(queue)
    queue.suggest("0"), queue.suggest("1")
    assert not stopper.stop_all()
    queue.on_trial_complete("0", **outcome)
    assert queue.suggest("2") == Searcher.FINISHED and stopper.stop_all()
    assert not stopper("1", {})


def test_an_adaptive_search_asks_for_the_baseline_first_and_hears_of_trials_only(specs):
    inner = OptunaSearcher(specs, num_trials=3, seed=0)
    queue = WorkQueue(prepare_jobs([], [specs[0].run]), [], inner)
    assert queue.suggest("job") == {"job": 0}
    keys = [queue.suggest("a")["key"], queue.suggest("b")["key"]]
    queue.on_trial_result("job", DONE)
    queue.on_trial_complete("job", DONE)
    for trial_id in "ab":
        reached = {"metrics": {"acc_mean": 0.5}, "items_scored": 10}
        queue.on_trial_result(trial_id, stage_result(trial_id, **reached))
        queue.on_trial_complete(trial_id, stage_result(trial_id, status="complete", **reached))
    keys.append(queue.suggest("c")["key"])
    assert len(set(keys)) == 3 and inner.remaining == 0
    assert queue.suggest("d") == Searcher.FINISHED
