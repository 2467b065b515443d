"""Models of the hub as transformers finds them in its cache: a search of one from start to end, without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.search_folders import data_folder
from tune_prune.embedded import model_dir
from tune_prune.models import hub, loading
from tune_prune.models.catalog import resolve

ROOT = Path(__file__).resolve().parents[2]
COMMITS = ("0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef")


def cached_model(home: Path, repo: str, commit: str) -> None:
    """tiny-llama in the hub's cache below `home`, as the newest commit of `repo`."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    shutil.copytree(model_dir("tiny-llama"), folder / "snapshots" / commit)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")


def test_a_hub_model_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    seen = set()
    for commit in COMMITS:
        cached_model(tmp_path, "acme/tiny", commit)
        assert hub.commit("acme/tiny") == hub.commit("acme/tiny", commit) == commit
        source = resolve("acme/tiny")
        seen.add(loading.model_fingerprint(source, loading.load_config(source)))
    assert len(seen) == 2
    first = resolve("acme/tiny", COMMITS[0])
    assert loading.model_fingerprint(first, loading.load_config(first)) in seen
    assert hub.commit("acme/other") is None


@pytest.mark.slow
def test_a_search_of_a_hub_model(tmp_path: Path) -> None:
    home = tmp_path / "home"
    cached_model(home, "acme/tiny", COMMITS[0])
    command = [sys.executable, "-m", "tune_prune.search", "--model", "acme/tiny", "--search-space", "smoke"]
    command += ["--data-dir", str(data_folder(tmp_path / "data")), "--tasks", "piqa", "--limit", "4"]
    command += ["--calibration", "embedded"]
    command += ["--storage-path", str(tmp_path / "r"), "--name", "hub"]
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    model = json.loads((tmp_path / "r" / "hub" / "experiment.json").read_text(encoding="utf-8"))["models"]["tiny"]
    assert model["run"]["revision"] == COMMITS[0]  # what the workers load, whatever main says by then
    results = [
        json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "r" / "hub" / "ledger").glob("*.json")
    ]
    assert [record["status"] for record in results] == ["complete"] * 6
    assert {record["key"] for record in results} == set(model["trial_keys"])
