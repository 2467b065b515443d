"""`search --status`, `search --log-json`, `search --track` and `analysis --export-study`: what is seen of a search from outside."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.findings import simulated_study
from tests.trial_messages import stage_message
from tests.trials import RUN
from tune_prune import search
from tune_prune.analysis import command as analysis
from tune_prune.cli import status
from tune_prune.core.config import PruningConfig, Samples
from tune_prune.core.files import to_json
from tune_prune.core.ledger import Ledger, write_about
from tune_prune.core.store import EXPERIMENT, STATUS, FolderStore
from tune_prune.tuning.observers import tracking
from tune_prune.tuning.observers.status import StatusObserver
from tune_prune.tuning.observers.tracking import TrackingObserver
from tune_prune.tuning.preparation import PrepareJob
from tune_prune.tuning.ray_cluster.resources import TrialResources
from tune_prune.tuning.worker import TrialSpec, WorkerSettings

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
    search_says(experiment, eta_at=datetime.now(UTC).isoformat())
    before = sorted(path for path in experiment.rglob("*"))
    found = status.read(FolderStore(experiment), NOW)
    assert found["state"] == "running" and found["silent_seconds"] == 2
    assert found["trials"] == {"planned": 36, "done": 36, "complete": 32, "stopped_early": 2, "failed": 2}
    (failure,) = found["failures"]
    assert failure["count"] == 2 and failure["latest"]["reason"] == "out of memory"
    records = [r for r in Ledger(FolderStore(experiment)).records() if r.model == "alpha" and r.status == "complete"]
    best = max(records, key=lambda record: record.metrics["acc_mean"])
    assert found["models"]["alpha"]["best"]["key"] == best.key
    shown = status.text(found)
    assert "taylor-s256-n512 on node7, after perplexity" in shown
    assert f"accuracy {best.metrics['acc_mean']:.4f} ± ".replace(" 0.", " .") in shown
    assert "36 of 36 done: 32 complete, 2 stopped early, 2 failed" in shown
    assert "time left    1m" in shown
    assert sorted(path for path in experiment.rglob("*")) == before  # it locks and writes nothing


@pytest.mark.parametrize(
    ("told", "state", "words"),
    [
        ({"age_s": 500.0}, "silent", "silent for 8m20s: process 1 on node1 was killed, or does not reach this storage"),
        ({"age_s": 500.0, "host": platform.node(), "pid": 2**22 + 1}, "silent", ", and that process is gone"),
        ({"state": "ended"}, "ended", "ended, process 1 on node1, 2.0s ago"),
        ({"state": "stopped"}, "stopped", "stopped by an interrupt or an error; the same command goes on"),
    ],
)
def test_a_search_that_does_not_run_is_not_said_to_run(
    experiment: Path, told: dict[str, Any], state: str, words: str
) -> None:
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
    assert "no word of one" in status.text(found) and record.name in status.text(found)


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({"state": None}, "state"),
        ({"state": "paused"}, "state"),
        ({"host": None}, "host"),
        ({"pid": "1"}, "pid"),
        ({"pid": 2**70}, "pid"),
        ({"updated_at": None}, "updated_at"),
        ({"updated_at": "soon"}, "updated_at"),
        ({"updated_at": "2026-05-01T12:00:00"}, "updated_at"),
        ({"slots": "4"}, "slots"),
        ({"running": None}, "running"),
        ({"running": [1]}, "running"),
        ({"running": [{"key": "k"}]}, "running"),
        ({"eta_seconds": ["inf", "inf"]}, "eta_seconds"),
        ({"eta_at": None}, "eta_at"),
    ],
)
def test_a_status_of_other_types_is_a_line_and_the_rest_counts(
    experiment: Path, told: dict[str, Any], field: str
) -> None:
    search_says(experiment, **told)
    assert field in line_of_the_damaged(experiment)


@pytest.mark.parametrize("content", ["{}", "{", "[]", "\udcff"])
def test_a_damaged_status_is_a_line_and_the_rest_counts(experiment: Path, content: str) -> None:
    (experiment / STATUS).write_bytes(content.encode(errors="surrogateescape"))
    assert line_of_the_damaged(experiment).endswith("writes it anew")


def line_of_the_damaged(folder: Path) -> str:
    """What is said of a status.json that cannot be read; all else is shown as it is."""
    found = status.read(FolderStore(folder), NOW)
    assert (found["state"], found["search"], found["silent_seconds"]) == ("unknown", None, None)
    assert found["trials"]["done"] == 36 and found["models"]["alpha"]["best"]
    (line,) = found["damaged"]
    assert line.startswith(f"{folder / STATUS} is ") and line.endswith("writes it anew")
    assert "no word of one" in status.text(found)
    return str(line)


@pytest.mark.parametrize(
    "changes",
    [
        {"models": None},
        {"models": [1]},
        {"models": {"alpha": None}},
        {"models": {"alpha": {"trial_keys": None}}},
        {"models": {"alpha": {"run": None}}},
        {"search": "optuna", "num_trials": "9"},
        {"checksum": "0" * 64},
        None,
    ],
)
def test_what_describes_the_experiment_is_whole_or_refused(
    experiment: Path, changes: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = experiment / EXPERIMENT
    if changes is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert search.main(["--status", str(experiment)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1
    assert EXPERIMENT in output.err and "restore it from a copy, or start another experiment with --name" in output.err


def test_names_and_paths(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search.main(["--status", "simulated", "--storage-path", str(experiment.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"]["done"] == 36
    assert search.main(["--status", str(experiment)]) == 0
    assert capsys.readouterr().out.startswith("experiment   simulated (")
    assert search.main(["--status", "simulate", "--storage-path", str(experiment.parent)]) == 2
    assert "did you mean 'simulated'?" in capsys.readouterr().err


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
    assert found["running"][0]["after_stage"] == "perplexity" and found["running"][0]["host"] == message.progress.host
    observer.on_error(SPEC, stage_message("k0", status="failed"), RuntimeError())
    assert told(tmp_path, lambda found: found["done"] == 2)["failed"] == 1
    observer.on_tick(0)  # nothing went wrong
    observer.__exit__(KeyboardInterrupt, None, None)
    found = told(tmp_path, lambda found: found["state"] == "stopped")
    assert found["eta_seconds"] is None and found["running"] == []
    observer.on_finish()
    assert told(tmp_path, lambda found: found["state"] == "ended")["done"] == 2


def test_a_status_that_cannot_be_written_is_told_at_the_next_tick(
    observer: StatusObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStore, "put", full)
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        for _ in range(500):
            time.sleep(0.01)
            observer.on_tick(1)
    monkeypatch.undo()


# A whole search


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """The folder of a search with --log-json, its events, and what it has written to standard error."""
    folder = tmp_path_factory.mktemp("followed")
    argv = ["--model", "tiny-llama", "--search-space", "control", "--limit", "5", "--inline", "--log-json"]
    with pytest.MonkeyPatch.context() as patch:
        out, err = _Stream(), _Stream()
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        assert search.main([*argv, "--storage-path", str(folder), "--name", "followed"]) == 0
    return folder / "followed", [json.loads(line) for line in out.text.splitlines()], err.text


class _Stream:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_every_line_of_the_log_is_an_event(followed: tuple[Path, list[dict[str, Any]], str]) -> None:
    folder, events, text = followed
    names = [event["event"] for event in events]
    assert names[:2] == ["start", "plan"] and names[-2:] == ["trial_end", "end"]
    assert names.count("job_start") == names.count("job_end") == 1  # the baseline
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert events[1]["trials"] == {"tiny-llama": 1} and events[1]["recorded"] == 0
    (record,) = Ledger(FolderStore(folder)).records()
    stages = [event for event in events if event["event"] == "stage"]
    assert [stage["stage"] for stage in stages] == [stage["stage"] for stage in record.stages]
    ended = events[-2]
    assert (ended["key"], ended["status"], ended["failure"]) == (record.key, "complete", "")
    assert ended["metrics"] == record.metrics and events[-1]["trials"] == {"complete": 1}
    assert "[1/1] running 0" in text and "\r" not in text


def test_a_search_that_cannot_start_is_a_failure_in_the_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--model", "tiny-llama", "--inline", "--log-json", "--storage-path", str(tmp_path), "--name", "a/b"]
    assert search.main(argv) == 2
    output = capsys.readouterr()
    start, failure = map(json.loads, output.out.splitlines())
    assert start["event"] == "start" and failure["event"] == "failure"
    assert failure["reason"] and failure["reason"] in output.err


def test_its_status_afterwards(followed: tuple[Path, list[dict[str, Any]], str]) -> None:
    found = status.read(FolderStore(followed[0]))
    assert found["state"] == "ended" and found["trials"]["done"] == found["trials"]["planned"] == 1
    assert found["search"]["running"] == [] and found["search"]["done"] == 1


def test_records_of_another_search_are_named_and_left_out(
    followed: tuple[Path, list[dict[str, Any]], str], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(followed[0], folder)
    about = json.loads((folder / EXPERIMENT).read_text())
    about["models"]["tiny-llama"]["run"]["seed"] += 1
    write_about(FolderStore(folder), {name: value for name, value in about.items() if name != "checksum"})
    found = status.read(FolderStore(folder))
    assert found["trials"]["done"] == 0 and found["models"] == {}
    assert len(found["damaged"]) == 2 and all("of another search: its key would be" in it for it in found["damaged"])


# Optuna


def test_the_ledger_as_optuna_studies(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = tmp_path / "study.db"
    argv = [str(experiment), "--export-study", str(database)]
    assert analysis.main(argv) == 0
    assert f"sqlite:///{database}" in capsys.readouterr().out
    storage = f"sqlite:///{database}"
    assert optuna.get_all_study_names(storage) == ["alpha", "beta"]
    study = optuna.load_study(study_name="alpha", storage=storage)
    assert study.metric_names == ["acc_mean"]
    records = {r.key: r for r in Ledger(FolderStore(experiment)).records() if r.model == "alpha"}
    states = [trial.state.name for trial in study.trials]
    assert (states.count("COMPLETE"), states.count("PRUNED"), states.count("FAIL")) == (16, 1, 1)
    for trial in study.trials:
        record = records[trial.user_attrs["key"]]
        assert {name: trial.params[name] for name in ("method", "seq_len", "num_samples")} == {
            name: record.config[name] for name in ("method", "seq_len", "num_samples")
        }
        if record.status == "complete":
            assert trial.value == record.metrics["acc_mean"] and trial.user_attrs["ppl"] == record.metrics["ppl"]
            assert trial.user_attrs["acc_boolq"] == record.metrics["acc_boolq"]
            assert trial.duration is not None and trial.duration.total_seconds() == pytest.approx(record.elapsed_time_s)
    best = max(records.values(), key=lambda record: record.metrics.get("acc_mean", 0))
    assert study.best_trial.user_attrs["key"] == best.key
    (failed,) = (trial for trial in study.trials if trial.state.name == "FAIL")
    assert failed.user_attrs["reason"] == "out of memory"
    assert study.user_attrs["dense"]["ppl"] == 15.0
    assert analysis.main(argv) == 2
    assert "is there already; give --overwrite" in capsys.readouterr().err
    assert analysis.main([*argv, "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["simulated", "study.db"]


@pytest.mark.parametrize(("objective", "metric"), [("perplexity", "ppl"), ("kl", "kl")])
def test_the_study_of_a_search_with_another_objective(
    experiment: Path, tmp_path: Path, objective: str, metric: str
) -> None:
    ledger = Ledger(FolderStore(experiment))
    for record in ledger.records():
        if record.status == "complete":
            kl = {"kl_text": 2.0, "kl_tasks": record.metrics["acc_mean"]}
            ledger.seal(replace(record, metrics=record.metrics | kl))
    about = json.loads((experiment / EXPERIMENT).read_text())
    (experiment / EXPERIMENT).write_text(json.dumps(about | {"settings": {"objective": objective}}))
    assert analysis.main([str(experiment), "--export-study", str(tmp_path / "study.db")]) == 0
    study = optuna.load_study(study_name="alpha", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert (study.direction.name, study.metric_names) == ("MINIMIZE", [metric])
    records = [r for r in ledger.records() if r.model == "alpha" and r.status == "complete"]
    values = {r.key: r.metrics["ppl"] if metric == "ppl" else (2 + r.metrics["acc_mean"]) / 2 for r in records}
    found = {trial.user_attrs["key"]: trial.value for trial in study.trials if trial.value is not None}
    assert found == pytest.approx(values)


def test_a_stopped_trial_is_pruned_where_it_was(experiment: Path, tmp_path: Path) -> None:
    ledger = Ledger(FolderStore(experiment))
    stopped = next(record for record in ledger.records() if record.status == "stopped_early")
    ledger.seal(replace(stopped, metrics={"acc_mean": 0.4}))
    assert analysis.main([str(experiment), "--export-study", str(tmp_path / "study.db")]) == 0
    study = optuna.load_study(study_name=stopped.model, storage=f"sqlite:///{tmp_path / 'study.db'}")
    (pruned,) = (trial for trial in study.trials if trial.state.name == "PRUNED")
    assert pruned.intermediate_values == {7 * 150: 0.4}


# Trackers


def a_trial_is_tracked(observer: TrackingObserver) -> None:
    observer.on_begin()
    observer.on_start(SPEC)
    observer.on_message(SPEC, stage_message("k0", "perplexity", metrics={"ppl": 5.0}))
    last = stage_message(
        "k0", status="complete", metrics={"acc_mean": 0.6, "ppl": 5.0}, items_scored=40, items_total=40
    )
    observer.on_message(SPEC, last)
    observer.on_end(SPEC, last)
    observer.on_start(SPEC)
    failed = stage_message("k0", status="failed")
    record = replace(failed.record, reason="worker died", failure="lost_worker")
    observer.on_error(SPEC, replace(failed, record=record), RuntimeError("worker died"))
    observer.on_finish()


def test_a_missing_package_is_a_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    argv = ["--model", "tiny-llama", "--inline", "--dry-run", "--track", "wandb"]
    assert search.main(argv) == 2
    assert "--track wandb needs the package wandb, which is not installed; pip install 'tune_prune[wandb]'" in (
        capsys.readouterr().err
    )


def test_a_tracker_that_fails_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def log(self, trial: Any) -> None:
            raise ConnectionError("no route to host")

        def close(self) -> None: ...

    monkeypatch.setattr(
        tracking.importlib, "import_module", lambda name: type("M", (), {"open_tracker": lambda e: Broken()})
    )
    a_trial_is_tracked(TrackingObserver("mlflow", "x"))
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "warning: --track mlflow: ConnectionError: no route to host; the search goes on",
        "warning: --track mlflow: 2 runs could not be written",
    ]


def test_mlflow_has_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient  # after MLFLOW_TRACKING_URI and what its module sets

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    a_trial_is_tracked(TrackingObserver("mlflow", "experiment"))
    assert "warning" not in capsys.readouterr().err
    client = MlflowClient()
    named = client.get_experiment_by_name("experiment")
    runs = {run.info.status: run for run in client.search_runs([named.experiment_id])}
    assert set(runs) == {"FINISHED", "FAILED"}
    complete = runs["FINISHED"]
    assert complete.data.metrics["acc_mean"] == 0.6 and complete.data.params["method"] == "taylor"
    assert complete.data.tags["tune_prune.key"] == "k0" and complete.info.run_name == "taylor-s16-n10-k0"
    assert runs["FAILED"].data.tags["tune_prune.reason"] == "worker died"


def test_wandb_writes_offline_unless_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    a_trial_is_tracked(TrackingObserver("wandb", "experiment"))
    assert "warning" not in capsys.readouterr().err
    runs = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    assert any(b"taylor-s16-n10-k0" in run.read_bytes() for run in runs)
