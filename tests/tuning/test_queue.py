"""What a search hands out, and when: jobs first, a trial once its statistics are there, nothing after a failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ray.tune.search import Searcher

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, Samples
from tune_prune.models.runner.out_of_memory import OutOfMemory
from tune_prune.pruning.statistics import Need
from tune_prune.trial.failures import Hung, LostWorker
from tune_prune.tuning.messages import JobMessage
from tune_prune.tuning.queue import WorkQueue, prepare_jobs
from tune_prune.tuning.ray import QueueSearcher, to_result
from tune_prune.tuning.sampler import OptunaSearcher
from tune_prune.tuning.work import TrialSpec, Work

DONE = JobMessage()


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
        "sample text at seq_len 32 through one",
        "sample text at seq_len 16 through one",
    ]
    assert jobs[0].needs == ()
    gradients = [Need("taylor", "", 8), Need("taylor", "", 40)]
    assert jobs[1].needs == (*gradients, *(Need("block_removal", kind, 8) for kind in ("attention", "layer", "mlp")))
    assert prepare_jobs([], [specs[0].run]) == jobs[:1]
    both = prepare_jobs([*specs, *specs_of("two")], [run_of("two")])
    assert [(job.run.label, job.samples) for job in both] == [
        ("one", Samples(32)),
        ("one", Samples(16)),
        ("two", None),
        ("two", Samples(32)),
        ("two", Samples(16)),
    ]


def take(queue: WorkQueue, count: int) -> list[Work | None]:
    return [queue.next() for _ in range(count)]


def test_a_trial_is_handed_out_when_its_statistics_are_there(specs):
    jobs = prepare_jobs(specs, [specs[0].run])
    queue = WorkQueue(jobs, specs)
    assert take(queue, 3) == jobs
    assert queue.next() is None and not queue.empty  # nothing is ready, and nothing holds a device to wait
    queue.end(jobs[0], DONE)
    assert queue.next() is None  # the baseline helps no trial
    queue.end(jobs[2], DONE)
    short = [spec for spec in specs if spec.config.seq_len == 16]
    assert take(queue, len(short) + 1) == [*short, None]
    queue.end(jobs[1], DONE)
    assert not queue.empty
    long = [spec for spec in specs if spec.config.seq_len == 32]
    assert take(queue, len(long) + 1) == [*long, None]
    assert queue.empty


def test_a_method_that_reads_no_data_waits_for_no_pass(specs):
    free = [TrialSpec(spec.run, replace(spec.config, method="random"), f"free-{spec.key}") for spec in specs[:2]]
    jobs = prepare_jobs([*specs, *free], [])
    assert jobs == prepare_jobs(specs, [])
    assert take(WorkQueue(jobs, [*specs, *free]), 5) == [*jobs, *free, None]
    assert prepare_jobs(free, []) == []


FAILURES = [{"last": JobMessage(refused="no such text")}, {"last": None, "error": RuntimeError("no such kernel")}]


@pytest.mark.parametrize("outcome", FAILURES)
def test_nothing_is_handed_out_after_a_failure(specs, outcome: dict[str, Any]):
    jobs = prepare_jobs(specs, [])
    queue = WorkQueue(jobs, specs)
    take(queue, 2)
    assert not queue.failed
    queue.end(jobs[0], **outcome)
    assert queue.next() is None and queue.failed and queue.empty


@pytest.mark.parametrize("error", [LostWorker("gone"), OutOfMemory("too much"), Hung("late"), MemoryError()])
def test_the_trials_of_a_job_that_died_try_until_one_dies_of_it_too(specs, error):
    """Gradients are there, and the sweep of removals is what a worker does not survive; other samples are not concerned."""
    jobs = prepare_jobs(specs, [])
    queue = WorkQueue(jobs, specs)
    take(queue, 2)
    queue.end(jobs[0], DONE)
    assert queue.end(jobs[1], None, error) == [] and not queue.failed
    short = [spec for spec in specs if spec.config.seq_len == 16]
    long = [spec for spec in specs if spec.config.seq_len == 32]
    assert take(queue, 7) == specs[:7]  # of taylor all, of layerwise those of 8 and 40 samples at 16, and one at 32
    tried = next(spec for spec in short if spec.config.method == "layerwise")
    alive = next(spec for spec in long if spec.config.method == "layerwise")
    assert queue.end(alive, None, error) == []  # of a trial whose job was done
    measured = stage_message(short[0].key, "importance")
    assert queue.end(short[0], measured, error) == []  # it had its statistics
    reached = stage_message(tried.key, "importance")
    blockwise = [spec for spec in short if spec.config.method == "blockwise"]
    assert queue.end(tried, reached, error) == blockwise
    assert take(queue, 4) == [*[spec for spec in specs[7:] if spec not in blockwise], None]
    assert queue.empty and not queue.failed


def test_an_adaptive_search_asks_for_the_baseline_first_and_hears_of_trials_only(specs):
    inner = OptunaSearcher(specs, num_trials=3, seed=0)
    (job,) = prepare_jobs([], [specs[0].run])
    queue = WorkQueue([job], [], inner)
    assert queue.next() == job
    trials = take(queue, 2)
    queue.end(job, DONE)
    for spec in trials:
        reached = {"metrics": {"acc_mean": 0.5}, "items_scored": 10}
        queue.end(spec, stage_message(spec.key, status="complete", **reached))
    trials.append(queue.next())
    assert len({spec.key for spec in trials}) == 3 and inner.remaining == 0
    assert queue.next() is None and queue.empty


def test_ray_is_told_to_wait_and_when_nothing_is_left(specs):
    jobs = prepare_jobs(specs[:1], [])
    searcher = QueueSearcher(WorkQueue(jobs, specs[:1]))
    assert searcher.suggest("a") == {"job": 0, "after_a_death": False}
    assert searcher.suggest("b") is None
    searcher.on_trial_complete("a", to_result(DONE))
    assert searcher.suggest("b") == {"key": specs[0].key, "after_a_death": False}
    assert searcher.suggest("c") is None  # That trial might be tried again.
    searcher.on_trial_complete("b", to_result(DONE))
    assert searcher.suggest("c") == Searcher.FINISHED


@pytest.mark.parametrize(
    ("error", "leanly"), [(LostWorker("gone"), True), (OutOfMemory("full"), True), (ValueError("a kernel"), False)]
)
def test_what_fails_is_tried_once_more_before_anything_else(specs, error, leanly):
    searcher = QueueSearcher(WorkQueue([], specs[:2]))
    searcher.suggest("a")
    for _ in range(2):  # Ray tells a death twice where it comes between two trials.
        searcher.on_trial_complete("a", error=True)
    assert searcher.try_again(specs[0], error)
    assert searcher.suggest("b") == {"key": specs[0].key, "after_a_death": leanly}
    searcher.on_trial_complete("b", error=True)
    assert not searcher.try_again(specs[0], error)
    assert searcher.suggest("c")["key"] == specs[1].key


def test_a_trial_that_hung_is_not_tried_again_and_a_job_is(specs):
    jobs = prepare_jobs(specs[:1], [])
    searcher = QueueSearcher(WorkQueue(jobs, specs[:1]))
    assert searcher.try_again(jobs[0], Hung("late")) and not searcher.try_again(specs[0], Hung("late"))
