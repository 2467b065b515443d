"""Models and data sets of the hub as the libraries find them in their cache: commits in keys, a search without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.search_folders import data_folder, in_hub_cache
from tune_prune.commands import search
from tune_prune.core.config import EvaluationProtocol, ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore
from tune_prune.data import calibration, perplexity_text
from tune_prune.data.sources import data_fingerprint, hub_datasets, measured_on, task_source
from tune_prune.embedded import model_dir
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models import hub, loading
from tune_prune.models.catalog import resolve

COMMITS = ("0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef")


def cached_model(home: Path, repo: str, commit: str) -> Path:
    """tiny-llama in the hub's cache below `home`, as the newest commit of `repo`."""
    return in_hub_cache(model_dir("tiny-llama"), home / "hub", repo, commit)


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


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_fetched_before_workers_ask_for_them(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only weights that transformers reads are fetched, and what the cache has is not asked for again."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = cached_model(tmp_path, "acme/tiny", COMMITS[0])
    (folder / "model.safetensors").unlink()
    shards = ["model.safetensors-1-of-2.safetensors", "other.safetensors"]  # as the index names them
    stored = ["model.safetensors.index.json", *shards] if sharded else ["model.safetensors"]
    asked: list[list[str]] = []

    def download(repo: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        for name in [*stored, "consolidated.safetensors"]:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
                (folder / name).write_text(json.dumps(index) if name.endswith("json") else "", encoding="utf-8")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve("acme/tiny", COMMITS[0])
    loading.fetch_weights(source)
    assert asked == []  # tests are offline
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for _ in range(2):
        loading.fetch_weights(source)
    assert len(asked) == 1 + sharded and all((folder / name).exists() for name in stored)
    assert not (folder / "consolidated.safetensors").exists()
    (folder / stored[-1]).unlink()

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(UserError, match="could not be downloaded"):
        loading.fetch_weights(source)


def cached_dataset(home: Path, repo: str, commit: str) -> Path:
    """A data set in the hub's cache below `home`, as the datasets library leaves it; gives its README.md."""
    folder = home / "hub" / f"datasets--{repo.replace('/', '--')}"
    card = folder / "snapshots" / commit / "README.md"
    card.parent.mkdir(parents=True)
    card.touch()
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")
    return card


HUB_RUN = ModelRun("acme/tiny", "tiny", None, "wikitext2", None, EvaluationProtocol(), 0, "float32")


def test_keys_name_the_commits_of_hub_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repos = hub_datasets(HUB_RUN)
    assert len(repos) == 7 and {"Salesforce/wikitext", "allenai/ai2_arc"} < set(repos)  # ARC has two of the tasks
    seen, measured = {data_fingerprint(HUB_RUN)}, {repr(measured_on(HUB_RUN))}
    for repo in repos:
        for commit in COMMITS:
            cached_dataset(tmp_path, repo, commit)
            assert hub.dataset_commit(repo) == commit
            seen.add(data_fingerprint(HUB_RUN))
            measured.add(repr(measured_on(HUB_RUN)))
    assert len(seen) == len(measured) == 1 + 2 * 7
    assert hub_datasets(replace(HUB_RUN, model="tiny-llama", calibration="embedded")) == []
    assert hub_datasets(replace(HUB_RUN, data_dir=str(tmp_path), calibration="c4")) == ["allenai/c4"]


def test_hub_data_are_read_at_the_commit_that_keys_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for repo in ("Salesforce/wikitext", "allenai/ai2_arc"):
        cached_dataset(tmp_path, repo, COMMITS[0])
    asked = []

    def load_dataset(path: str, *_: object, **keywords: Any) -> dict[str, list[str]]:
        asked.append((path, keywords["revision"]))
        if path.startswith("allenai"):
            raise ConnectionError("offline")
        return {"text": ["one", "two"]}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert calibration.load_text("wikitext2") == perplexity_text.load_text(None, False) == "one\n\ntwo"
    tokenizer = AutoTokenizer.from_pretrained(model_dir("tiny-llama"))
    with pytest.raises(UserError, match="'arc_challenge' could not be loaded"):
        build_suite(tokenizer, EvaluationProtocol(("arc_challenge",)), task_source(HUB_RUN), 512)
    assert asked == [("Salesforce/wikitext", COMMITS[0])] * 2 + [("allenai/ai2_arc", COMMITS[0])]


@pytest.mark.slow
def test_a_search_of_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Callable[..., str]) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached_model(tmp_path, "acme/tiny", COMMITS[0])
    data = (
        "--data-dir",
        data_folder(tmp_path / "data"),
        "--tasks",
        "piqa",
        "--limit",
        "4",
        "--calibration",
        "embedded",
    )
    kept = ("--storage-path", tmp_path / "r", "--name", "hub", "--inline")
    printed(search.main, "--model", "acme/tiny", "--search-space", "smoke", *data, *kept)
    model = json.loads((tmp_path / "r" / "hub" / "experiment.json").read_text(encoding="utf-8"))["models"]["tiny"]
    assert model["run"]["revision"] == COMMITS[0]  # what trials load, whatever main says by then
    records = Ledger(FolderStore(tmp_path / "r" / "hub")).records()
    assert [record.status for record in records] == ["complete"] * 6
    assert {record.key for record in records} == set(model["trial_keys"])
