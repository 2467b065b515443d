"""Observers of a search: views that fail, and work that was lost, with a clock that the test turns."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, Samples
from tune_prune.core.ledger import write_pass
from tune_prune.core.records import StageReport
from tune_prune.tuning.messages import JobMessage, TrialMessage
from tune_prune.tuning.observers.lost_work import LostWork
from tune_prune.tuning.observers.observer import Observer, Observers
from tune_prune.tuning.observers.tensorboard import TensorBoardObserver
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.work import PrepareJob, TrialSpec
from tune_prune.tuning.worker import WorkerSettings

RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(), 0, "float32")
SPEC = TrialSpec(RUN, PruningConfig("taylor", 16, 8), "k")


class Ticks(Observer):
    """Raises what it is given at every tick."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen = 0

    def on_tick(self, running: int) -> None:
        self.seen += 1
        if self.error is not None:
            raise self.error


def test_a_view_that_fails_is_said_once_and_ends_nothing():
    said: list[str] = []
    fails, works = Ticks(OSError(errno.EIO, "broken")), Ticks()
    observers = Observers([Ticks()], [fails, works], said.append)
    for _ in range(3):
        observers.on_tick(1)
    assert fails.seen == works.seen == 3
    assert len(said) == 1 and "OSError" in said[0] and "broken" in said[0] and "goes on" in said[0]
    with pytest.raises(ZeroDivisionError):  # without a keeper a search cannot go on
        Observers([Ticks(ZeroDivisionError())], [], said.append).on_tick(1)


def test_tensorboard_on_a_full_disk_is_a_warning_without_a_traceback(tmp_path, monkeypatch, capfd):
    said: list[str] = []

    def full(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    observers = Observers([], [TensorBoardObserver(tmp_path, {"k": "tiny-llama"})], said.append)
    for _ in range(3):
        message = stage_message("k", "perplexity", metrics={"ppl": 2.0})
        observers.on_message(SPEC, message)
    observers.on_end(SPEC, stage_message("k", status="complete"))
    observers.on_finish()
    assert len(said) == 1 and said[0].startswith("TensorBoard: not written (OSError: [Errno 28] No space left")
    assert capfd.readouterr().err == ""


def test_two_attempts_in_the_same_second_are_two_files(tmp_path):
    settings = WorkerSettings(tmp_path, tmp_path, TrialResources())
    for _ in range(2):
        settings.ledger.note(settings.begun("k", "tiny-llama", SPEC.config))
    assert len(settings.ledger.attempts([])) == 2


def test_tensorboard_has_no_thread_for_each_trial_that_runs(tmp_path):
    keys = [f"k{number}" for number in range(20)]
    observer = TensorBoardObserver(tmp_path, dict.fromkeys(keys, "tiny-llama"))
    before = threading.active_count()
    for key in keys:
        observer.on_message(replace(SPEC, key=key), stage_message(key, "perplexity", metrics={"ppl": 2.0}))
    assert threading.active_count() == before
    observer.on_finish()
    (written,) = (tmp_path / "tiny-llama").glob("*-k7/events*")
    events = list(EventFileLoader(str(written)).Load())
    assert [value.tag for event in events for value in event.summary.value] == [
        "duration_s/perplexity",
        "perplexity/ppl",
    ]


def test_what_an_attempt_had_done_before_it_died_is_kept(tmp_path: Path):
    settings = WorkerSettings(tmp_path, tmp_path, TrialResources())
    now = 100.0
    lost = LostWork(settings, clock=lambda: now)
    lost.on_start(SPEC)
    now += 5
    message = stage_message("k", "perplexity", duration_s=4.0, tokens=7)
    settings.ledger.note(message.record)  # by the worker
    lost.on_message(SPEC, message)
    now += 3
    lost.on_start(SPEC)  # its worker has died
    (attempt,) = settings.ledger.attempts([])
    assert [stage.stage for stage in attempt.stages] == ["perplexity"] and attempt.elapsed_time_s == 4.0 + 3.0
    again = replace(message.record, started_at="2026-01-01T00:00:00+00:00")
    settings.ledger.note(again)
    assert len(settings.ledger.attempts([])) == 2
    lost.on_end(SPEC, TrialMessage(settings.end(again, "complete")))  # which says the same
    lost.note_all()
    assert settings.ledger.attempts([]) == [attempt]
    assert settings.ledger.attempts([message.record]) == []

    job = PrepareJob(RUN, Samples(16))
    lost.on_start(job)
    now += 10
    write_pass(settings.store, {"model": RUN.label, "seq_len": 16}, StageReport("removal", 6.0, tokens=9))
    lost.note_all()  # the search is interrupted: what a pass has noted itself is not lost
    (unfinished,) = [attempt for attempt in settings.ledger.attempts([]) if not attempt.stages]
    assert unfinished.elapsed_time_s == pytest.approx(4.0) and unfinished.model == RUN.label
    lost.on_start(job)
    lost.on_end(job, JobMessage())
    lost.note_all()
    assert len(settings.ledger.attempts([])) == 2
