"""Weight files and room for hidden states that are lost while a trial runs: a failed record with one sentence, nothing left
behind, and the same trial afterwards as if nothing had been."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trials import BLOCKWISE, RUN
from tune_prune import embedded
from tune_prune.commands import prune
from tune_prune.core.config import EMBEDDED_DATA
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import TRIALS
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import map_model
from tune_prune.models.runner.residency import Residency
from tune_prune.trial.context import ArtifactStore, TrialContext
from tune_prune.trial.trial import Trial
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.stages import StageRunner
from tune_prune.tuning.work import TrialSpec
from tune_prune.tuning.worker import WorkerSettings

CONFIG = replace(BLOCKWISE, method="taylor")


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[StageRunner, WorkerSettings]]:
    """A function that begins the trial on a folder's model whose weights stay in their files, with hidden states in another."""
    shutil.copytree(embedded.model_dir("tiny-llama"), tmp_path / "model")
    (tmp_path / "waiting").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "waiting"))
    run = replace(RUN, model=str(tmp_path / "model"), data_dir=EMBEDDED_DATA)

    def open_mapped(
        run: object, artifact_dir: Path, device: str, residency: Residency, _: object = None
    ) -> TrialContext:
        loaded = map_model(resolve(str(tmp_path / "model")), torch.float32, "cpu", Residency(states="file"))
        return TrialContext(run, loaded, ArtifactStore(artifact_dir))

    monkeypatch.setattr(TrialContext, "open", open_mapped)

    def begin() -> tuple[StageRunner, WorkerSettings]:
        settings = WorkerSettings(tmp_path / "experiment", tmp_path / "artifacts", TrialResources())
        key = TrialContext.open(run, settings.artifact_dir, "cpu", Residency()).key(CONFIG)
        runner = StageRunner({key: (spec := TrialSpec(run, CONFIG, key))}, settings)
        runner.begin(spec)
        return runner, settings

    return begin


def ended(runner: StageRunner) -> TrialRecord:
    while not (message := runner.step()).ended:
        pass
    return message.record


def test_a_weight_file_that_is_cut_is_a_failed_record(begun, tmp_path):
    runner, settings = begun()
    stages = [runner.step().stage.stage for _ in range(2)]
    path = tmp_path / "model" / "model.safetensors"
    content, about = path.read_bytes(), path.stat()
    os.truncate(path, 20_000)  # what is mapped of it is gone
    failed = ended(runner)
    assert (failed.status, [stage.stage for stage in failed.stages]) == ("failed", stages)
    assert f"{path} any more (it has changed since the start)" in failed.reason and "\n" not in failed.reason
    assert settings.ledger.read(failed.key) == failed
    assert not settings.store.path(TRIALS).exists() and list((tmp_path / "waiting").iterdir()) == []
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    done = ended(begun()[0])
    assert (done.key, done.status) == (failed.key, "complete")
    assert done.stages[0].tokens == 0  # what had been computed is found again


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115


def test_no_room_for_hidden_states_is_a_failed_record(begun, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        runner, settings = begun()
        full(patch)
        failed = ended(runner)
    assert (failed.status, failed.stages) == ("failed", [])
    assert failed.reason.startswith(f"the file for states between layers in {tmp_path / 'waiting'}")
    assert "No space left on device" in failed.reason
    assert not settings.store.path(TRIALS).exists() and list((tmp_path / "waiting").iterdir()) == []
    assert ended(begun()[0]).status == "complete"


def test_no_room_while_a_model_is_pruned_is_a_sentence(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no search has left statistics that would be found
    (tmp_path / "waiting").mkdir()
    flags = ["--method", "taylor", "--seq-len", "16", "--num-samples", "8", "--device", "cpu"]
    original = Trial.recipe
    with pytest.MonkeyPatch.context() as patch:

        def recipe(self, *what):
            full(patch)
            return original(self, *what)

        patch.setattr(tempfile, "tempdir", str(tmp_path / "waiting"))
        patch.setattr("tune_prune.commands.opened.choose_within", lambda ways, *_: ways[-1])  # with states in a file
        patch.setattr(Trial, "recipe", recipe)
        text = refused(prune.main, "--model", "tiny-llama", *flags, "--output", tmp_path / "out", begun=True)
    assert text.startswith("error: the file for states between layers in ") and "No space left on device" in text
    gc.collect()  # what an opened model has for itself goes with it
    assert [path.name for path in tmp_path.iterdir()] == ["waiting"] and [*(tmp_path / "waiting").iterdir()] == []
