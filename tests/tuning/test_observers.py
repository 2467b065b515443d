"""Observers of a search: views that fail, and TensorBoard's."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.tuning.observers.observer import Observer, Observers
from tune_prune.tuning.observers.tensorboard import TensorBoardObserver
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.work import TrialSpec
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
