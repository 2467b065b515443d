"""The worker's side of a trial, step by step in this process: one message a stage, one record at the end."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.trials import BLOCKWISE, RUN, open_context
from tune_prune.core.config import Samples
from tune_prune.core.errors import Infeasible, MachineError, UserError
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import TRIALS
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.statistics import Need
from tune_prune.trial.context import TrialContext
from tune_prune.trial.failures import Hung, LostWorker
from tune_prune.trial.trial import Trial, run_trial
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.stages import StageRunner
from tune_prune.tuning.work import PrepareJob, TrialSpec
from tune_prune.tuning.worker import ContextCache, WorkerSettings

CONFIG = replace(BLOCKWISE, method="taylor")


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> TrialContext:
    return open_context(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def settings(context, tmp_path, monkeypatch) -> WorkerSettings:
    """Settings of workers that share the loaded model of `context` and have computed nothing yet."""

    def open_here(run, artifact_dir, device, residency, fallback):
        assert residency == RESIDENT
        other = TrialContext(run, context.loaded, context.artifacts.__class__(artifact_dir), fallback)
        other.suite = context.suite
        return other

    monkeypatch.setattr(TrialContext, "open", open_here)
    return WorkerSettings(tmp_path / "experiment", tmp_path / "artifacts", TrialResources())


def worker(settings: WorkerSettings, work: str | PrepareJob) -> StageRunner:
    """A runner that has begun the job, or the trial of that key."""
    spec = TrialSpec(RUN, CONFIG, work) if isinstance(work, str) else TrialSpec(RUN, CONFIG, "unused")
    made = StageRunner({spec.key: spec}, settings)
    made.begin(work if isinstance(work, PrepareJob) else spec)
    return made


def messages(made: StageRunner) -> list[TrialMessage]:
    found: list[TrialMessage] = []
    while not found or not found[-1].ended:
        message = made.step()
        assert isinstance(message, TrialMessage)
        found.append(message)
    return found


def test_a_message_for_every_stage_and_a_record_at_the_end(context, settings):
    key = context.key(CONFIG)
    found = messages(worker(settings, key))
    slices = RUN.protocol.slices
    stages = ["importance", "pruning", "kl", "perplexity", *["zero_shot"] * len(slices)]
    assert [message.stage.stage for message in found] == stages
    assert [message.index for message in found] == list(range(len(stages)))
    for count, message in enumerate(found, 1):
        assert [report.stage for report in message.record.stages] == stages[:count]
        assert not any(report.slice for report in message.record.stages)  # said once, with their slice
    parts = [message.slice for message in found if message.slice is not None]
    assert [(part.index, part.fraction) for part in parts] == list(enumerate(slices))
    sizes = dict.fromkeys(parts[0].items_per_task, 0)
    for part in parts:
        sizes = {task: size + len(part.outcomes.get(task, "")) for task, size in sizes.items()}
    assert sizes == parts[0].items_per_task
    assert found[-1].record.accuracy == found[-1].record.metrics["acc_mean"] and found[0].record.accuracy is None
    assert settings.ledger.read(key) == found[-1].record
    assert settings.store.within(f"{TRIALS}/{key}").get("pruning_plan.json") is not None


@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        (Infeasible("too much"), "infeasible", "too much"),
        (UserError("no such text"), "user_error", "no such text"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", "OutOfMemoryError: CUDA"),
        (ZeroDivisionError("by zero"), "error", "ZeroDivisionError: by zero"),
    ],
)
def test_the_class_of_a_failure_is_in_the_record(context, settings, monkeypatch, error, failure, reason):
    def raises(self: Trial) -> Iterator[StageReport]:
        raise error
        yield

    monkeypatch.setattr(Trial, "stages", raises)
    key = context.key(CONFIG)
    with contextlib.nullcontext() if isinstance(error, UserError) else pytest.raises(type(error)):
        worker(settings, key).step()
    record = settings.ledger.read(key)
    assert (record.status, record.failure) == ("failed", failure) and record.reason.startswith(reason)
    with pytest.raises(ValueError, match="failure"):
        TrialRecord.read(record.to_dict() | {"failure": "bad luck"})


def test_a_worker_that_died_or_hung_is_recorded_by_the_driver(context, settings):
    """A worker's own record of this search counts, unless it hung; one of an earlier start does not, even where a metric of
    it is NaN, which does not equal itself once it has travelled to a worker."""
    spec = TrialSpec(RUN, CONFIG, context.key(CONFIG))
    unmeasured = StageReport("perplexity", 1.0, {"ppl": math.nan})
    running = settings.begun(spec.key, RUN.label, CONFIG).after(unmeasured)
    settings.ledger.write(replace(running, status="failed", reason="before", search_id="another", failure="error"))
    record = pickle.loads(pickle.dumps(settings)).failed(spec, running, LostWorker("gone"))
    assert record.failure == "lost_worker" and record.search_id == settings.search_id
    assert record.reason == "the worker of the trial died after the stage perplexity, perhaps out of memory: gone"
    assert [stage.stage for stage in record.stages] == ["perplexity"]
    left = settings.end(running, "failed", "its own words", "infeasible")
    assert settings.failed(spec, None, LostWorker("gone")) == left
    assert settings.failed(spec, None, Hung("late")).failure == "hung" == settings.ledger.read(spec.key).failure


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, r"No space left on device\); free some space"),
        (errno.EIO, r"/.* cannot be used \(Input/output error\); look at the disk or the mount"),
    ],
)
def test_a_full_disk_is_no_failure_of_the_trial(context, settings, monkeypatch, number, said):
    """Every other trial would meet it; nor is a storage that does not answer."""

    def full(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number))

    made = worker(settings, context.key(CONFIG))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(MachineError, match=said):
        made.step()
    monkeypatch.undo()
    assert settings.ledger.records() == []


def test_jobs_answer_with_their_result_or_why_they_cannot_be_done(context, settings):
    done = worker(settings, PrepareJob(RUN)).step()
    assert done.baseline.status == "complete" and "accuracy ." in str(done)
    assert done.baseline.search_id == settings.search_id
    nowhere = replace(RUN, calibration="/no/such/text")
    refused = worker(settings, PrepareJob(nowhere, Samples(16), (Need("taylor", "", 4),))).step()
    assert refused.baseline is None and "/no/such/text" in refused.refused


def test_a_model_is_let_go_before_the_next_one_is_loaded(tmp_path, monkeypatch):
    cache = ContextCache(WorkerSettings(tmp_path, tmp_path / "artifacts", TrialResources()))
    context = cache.open(RUN)
    run_trial(BLOCKWISE, context)
    weight = weakref.ref(next(context.loaded.model.parameters()))
    gc.collect()
    opened, there = TrialContext.open, []
    monkeypatch.setattr(TrialContext, "open", lambda *args: there.append(weight()) or opened(*args))
    gc.disable()  # it comes when it comes: two models may not fit
    try:
        del context
        cache.open(replace(RUN, model="tiny-qwen2", label="tiny-qwen2"))
    finally:
        gc.enable()
    assert there == [None]
