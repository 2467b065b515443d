"""`search --status`: how far a search is, from its files alone, and the file that it writes for that."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.findings import simulated_study
from tests.trial_messages import stage_message
from tests.trials import RUN
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import find
from tune_prune.commands import status
from tune_prune.core.config import ZERO_SHOT_TASKS, PruningConfig, Samples
from tune_prune.core.files import to_json
from tune_prune.core.ledger import Ledger, write_about
from tune_prune.core.store import EXPERIMENT, STATUS, FolderStore
from tune_prune.tuning.observers.status import StatusObserver, ended
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.work import PrepareJob, TrialSpec
from tune_prune.tuning.worker import WorkerSettings

SPEC = TrialSpec(RUN, PruningConfig("taylor", 16, 10), "k0")
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """18 trials of each of two models, of which one failed and one was stopped."""
    return simulated_study(tmp_path, failed=["taylor-s16-n128"], stopped=["taylor-s64-n128"])


def search_says(folder: Path, age_s: float = 2.0, **values: Any) -> None:
    at = (NOW - timedelta(seconds=age_s)).isoformat()
    running = {
        "key": "k", "model": "alpha", "config": "taylor-s256-n512", "after_stage": "perplexity", "host": "node7", "since": at,
    }  # fmt: skip
    told = {
        "schema_version": 1, "state": "running", "host": "node1", "pid": 1, "search_id": "s", "started_at": at, "updated_at": at,
        "total": 36, "done": 30, "failed": 2, "slots": 4, "running": [running], "eta_seconds": [60.0, 90.0], "eta_at": at,
    }  # fmt: skip
    FolderStore(folder).put(STATUS, to_json(told | values))


def test_a_running_search_is_shown_with_all_that_is_known(experiment: Path) -> None:
    search_says(experiment, eta_at=(datetime.now(UTC) + timedelta(minutes=1)).isoformat())  # the clock moves meanwhile
    before = sorted(path for path in experiment.rglob("*"))
    found = status.read(FolderStore(experiment), NOW)
    assert found["state"] == "running" and found["silent_seconds"] == 2
    assert found["trials"] == {"planned": 36, "done": 36, "complete": 32, "stopped_early": 2, "failed": 2, "earlier": 0}
    (failure,) = found["failures"]
    assert failure["count"] == 2 and failure["latest"]["reason"] == "out of memory"
    records = [r for r in Ledger(FolderStore(experiment)).records() if r.model == "alpha" and r.status == "complete"]
    best = max(records, key=lambda record: record.metrics["acc_mean"])
    assert found["models"]["alpha"]["best"]["key"] == best.key
    shown = status.text(found)
    assert "taylor-s256-n512 on node7, perplexity done" in shown
    assert f"accuracy {best.metrics['acc_mean']:.4f} ± ".replace(" 0.", " .") in shown
    assert "36 of 36 done: 32 complete, 2 stopped early, 2 failed" in shown
    assert "time left    1m" in shown
    assert sorted(path for path in experiment.rglob("*")) == before  # it locks and writes nothing


@pytest.mark.parametrize(
    ("told", "state", "words"),
    [
        ({"age_s": 500.0}, "silent", "silent for 8m20s: process 1 on node1 was killed, or does not reach this storage"),
        ({"host": platform.node(), "pid": 2**22 + 1}, "silent", "killed: process 4194305 on "),
        ({"state": "ended"}, "ended", "ended 2.0s ago, process 1 on node1"),
        (
            {"state": "stopped"},
            "stopped",
            "stopped 2.0s ago by an interrupt or an error, process 1 on node1; the same command goes on",
        ),
    ],
)
def test_a_search_that_does_not_run_is_not_said_to_run(experiment, told, state, words):
    search_says(experiment, **told)
    found = status.read(FolderStore(experiment), NOW)
    shown = status.text(found)
    assert found["state"] == state and words in shown
    assert "running " not in shown and "time left" not in shown


def test_a_damaged_record_is_named_and_the_rest_counts(experiment: Path) -> None:
    record = next((experiment / "ledger").glob("*.json"))
    record.write_text("{")
    found = status.read(FolderStore(experiment), NOW)
    assert found["trials"]["done"] == 35 and record.name in found["damaged"][0]
    assert "not known: none has run" in status.text(found) and record.name in status.text(found)


def change(folder: Path, name: str, accuracy: float = 0.5, status: Any = "complete", **metrics: float) -> None:
    """Give that trial of alpha another record: one accuracy of all tasks but for `metrics`."""
    ledger = Ledger(FolderStore(folder))
    record = next(r for r in ledger.records() if r.model == "alpha" and r.config.name == name)
    found = record.metrics | {f"acc_{task}": accuracy for task in ZERO_SHOT_TASKS} | metrics
    found["acc_mean"] = float(np.mean([found[f"acc_{task}"] for task in ZERO_SHOT_TASKS]))
    ledger.path(record.key).unlink()  # a finished record is never replaced
    ledger.write(replace(record, status=status, metrics=found))


def test_the_best_is_the_mean_of_draws_not_the_luckiest_one(tmp_path: Path) -> None:
    names = ("taylor-s16-n128", "layerwise-s64-n128")
    folder = simulated_study(tmp_path, draws=dict.fromkeys(names, 3), with_items=False)
    accuracies, perplexities = ((0.8, 0.9, 0.8), (0.6, 0.6, 0.99)), ((1.0, 10.0, 10.0), (2.0, 8.0, 2.0))
    for name, *draws in zip(names, accuracies, perplexities, strict=True):
        for draw, (accuracy, perplexity) in zip(("", "-r1", "-r2"), zip(*draws, strict=True), strict=True):
            change(folder, f"{name}{draw}", accuracy, ppl=perplexity)
    found = status.read(FolderStore(folder), NOW)["models"]["alpha"]
    best = find(read_study([folder], [])).models["alpha"].best
    assert found["best"]["config"] == best["name"] == names[0] and found["best"]["draws"] == 3
    assert found["best"]["acc_mean"] == pytest.approx(best["acc_mean"]) == pytest.approx(2.5 / 3)
    assert found["best"]["ppl"] == pytest.approx(best["ppl"]) == pytest.approx(100 ** (1 / 3))
    assert found["best"]["key"] == best["key"]
    assert f"{names[0]}, accuracy .8333 ± " in (text := status.text(status.read(FolderStore(folder), NOW)))
    assert " (mean of 3 runs) (original" in text

    change(folder, f"{names[0]}-r1", status="stopped_early")  # those that went on are the lucky ones
    assert status.read(FolderStore(folder), NOW)["models"]["alpha"]["best"]["config"] == names[1]


def test_what_is_done_is_counted_among_what_is_planned(experiment: Path) -> None:
    """Another search space under one --name leaves its trials there, and so does an adaptive search that is to try fewer."""
    about = json.loads((experiment / EXPERIMENT).read_text())
    keys = about["models"]["alpha"]["trial_keys"]
    one = dict([next(iter(keys.items()))])
    about["models"] = {"alpha": {**about["models"]["alpha"], "trial_keys": one}, "beta": about["models"]["beta"]}
    write_about(FolderStore(experiment), about)
    found = status.read(FolderStore(experiment), NOW)
    assert (found["trials"]["planned"], found["trials"]["done"], found["trials"]["earlier"]) == (19, 19, 17)
    assert sum(found["trials"][state] for state in ("complete", "stopped_early", "failed")) == 19
    assert " 1 failed; and 17 of earlier starts" in status.text(found)
    about["models"]["alpha"]["trial_keys"] = keys
    write_about(FolderStore(experiment), about | {"search": "optuna", "num_trials": 1})
    assert "36 of 36 done" in status.text(status.read(FolderStore(experiment), NOW))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"state": "paused"}, "state"),
        ({"updated_at": "2026-05-01T12:00:00"}, "updated_at"),  # in no time zone
        ({"running": [{"key": "k"}]}, "running"),
        (b"{", "not valid JSON"),
    ],
)
def test_a_damaged_status_is_a_line_and_the_rest_counts(experiment: Path, values: Any, field: str) -> None:
    if isinstance(values, bytes):
        (experiment / STATUS).write_bytes(values)
    else:
        search_says(experiment, **values)
    found = status.read(FolderStore(experiment), NOW)
    assert (found["state"], found["search"], found["silent_seconds"]) == ("unknown", None, None)
    assert found["trials"]["done"] == 36 and found["models"]["alpha"]["best"]
    (line,) = found["damaged"]
    assert line.startswith(f"{experiment / STATUS} is ") and line.endswith("writes it anew") and field in line
    assert "not known: none has run" in status.text(found)


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[StatusObserver]:
    settings = WorkerSettings(tmp_path, tmp_path, TrialResources())
    with StatusObserver(settings, 3, 1, 2, lambda: (1.0, 2.0), beat_s=0.01) as observer:
        yield observer


def told(folder: Path, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The file, once that holds of it."""
    for _ in range(500):
        found = FolderStore(folder).read(STATUS) or {}
        if holds(found):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def test_the_file_follows_the_search(observer: StatusObserver, tmp_path: Path) -> None:
    job = PrepareJob(RUN, Samples(16))
    observer.on_start(job)
    observer.on_start(SPEC)
    message = stage_message("k0", "perplexity")
    observer.on_message(SPEC, message)
    observer.on_end(job, None)
    found = told(tmp_path, lambda found: len(found["running"]) == 1)
    assert (found["state"], found["pid"], found["done"], found["total"]) == ("running", os.getpid(), 1, 3)
    assert found["running"][0]["after_stage"] == "perplexity" and found["running"][0]["host"] == message.record.host
    observer.on_error(SPEC, stage_message("k0", status="failed"), RuntimeError())
    assert told(tmp_path, lambda found: found["done"] == 2)["failed"] == 1
    observer.__exit__(KeyboardInterrupt, None, None)
    found = told(tmp_path, lambda found: found["state"] == "stopped")
    assert found["eta_seconds"] is None and found["running"] == []
    observer.on_finish()  # the search may go on with others, and says itself when it has ended
    assert told(tmp_path, lambda found: found["state"] == "running")["done"] == 2
    ended(FolderStore(tmp_path))
    assert told(tmp_path, lambda found: found["state"] == "ended")["done"] == 2


def test_a_search_that_had_nothing_left_to_run_has_ended(experiment: Path) -> None:
    """The start before it may have been killed after its last trial, or was stopped."""
    for state, after in (("running", "ended"), ("stopped", "ended"), ("ended", "ended")):
        search_says(experiment, state=state, pid=2**22 - 1, host=platform.node())
        ended(FolderStore(experiment))
        assert json.loads((experiment / STATUS).read_text())["state"] == after
    for content in (b"\0" * 300, b""):  # after a power loss; it is only a view
        (experiment / STATUS).write_bytes(content)
        ended(FolderStore(experiment))
        assert not (experiment / STATUS).exists()
    ended(FolderStore(experiment))
    assert not (experiment / STATUS).exists()
