"""The trials of a search in other tools: in a study of Optuna's (`analysis --export-study`), in MLflow and in Weights & Biases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from tests.findings import simulated_study
from tests.trial_messages import stage_message
from tests.trials import RUN
from tune_prune.commands import analysis, search
from tune_prune.core.config import PruningConfig
from tune_prune.core.ledger import Ledger, put_sealed, write_about
from tune_prune.core.store import EXPERIMENT, FolderStore
from tune_prune.tuning.observers import tracking
from tune_prune.tuning.observers.tracking import TrackingObserver
from tune_prune.tuning.work import TrialSpec

SPEC = TrialSpec(RUN, PruningConfig("taylor", 16, 10), "k0")


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """18 trials of each of two models, of which one failed and one was stopped."""
    return simulated_study(tmp_path, failed=["taylor-s16-n128"], stopped=["taylor-s64-n128"])


# Optuna


@pytest.mark.slow
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
            name: getattr(record.config, name) for name in ("method", "seq_len", "num_samples")
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
def test_the_study_of_a_search_with_another_objective(experiment, tmp_path, objective, metric):
    ledger = Ledger(FolderStore(experiment))
    for record in ledger.records():
        if record.status == "complete":
            kl = {"kl_text": 2.0, "kl_tasks": record.metrics["acc_mean"]}
            put_sealed(
                FolderStore(experiment),
                f"ledger/{record.key}.json",
                replace(record, metrics=record.metrics | kl).to_dict(),
            )
    about = json.loads((experiment / EXPERIMENT).read_text())
    write_about(FolderStore(experiment), about | {"settings": {"objective": objective}})
    assert analysis.main([str(experiment), "--export-study", str(tmp_path / "study.db")]) == 0
    study = optuna.load_study(study_name="alpha", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert (study.direction.name, study.metric_names) == ("MINIMIZE", [metric])
    records = [r for r in ledger.records() if r.model == "alpha" and r.status == "complete"]
    values = {r.key: r.metrics["ppl"] if metric == "ppl" else (2 + r.metrics["acc_mean"]) / 2 for r in records}
    found = {trial.user_attrs["key"]: trial.value for trial in study.trials if trial.value is not None}
    assert found == pytest.approx(values)


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


def test_a_tracker_that_fails_is_a_warning_once(monkeypatch, capsys):
    def log(trial: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(tracking.TRACKERS, "mlflow", lambda experiment: log)
    a_trial_is_tracked(TrackingObserver("mlflow", "x"))
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == ["warning: --track mlflow: ConnectionError: no route to host; the search goes on"]


@pytest.mark.slow
def test_mlflow_has_every_trial(tmp_path, monkeypatch, capsys):
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


@pytest.mark.slow
def test_wandb_writes_offline_unless_it_is_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    a_trial_is_tracked(TrackingObserver("wandb", "experiment"))
    assert "warning" not in capsys.readouterr().err
    runs = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2
    assert any(b"taylor-s16-n10-k0" in run.read_bytes() for run in runs)
