"""The licence of a checkpoint is that of its base model, where that one's card states it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tune_prune.checkpoint.save import base_license, copy_license_files
from tune_prune.models.catalog import ModelSource, resolve

OTHER = "---\nlicense: other\nlicense_name: acme-1\nlicense_link: LICENSE.md\ntags: [x]\n---\n# Acme\n"


def folder_source(folder: Path, card: str | None) -> ModelSource:
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
    return ModelSource("acme", str(folder), "folder")


def test_embedded_models_are_under_the_licence_of_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"' in text
    assert base_license(resolve("tiny-llama")) == {"license": "apache-2.0"}


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (None, {}),
        ("# No metadata\n", {}),
        ("---\nlicense: [mit, gpl]\n---\n", {}),
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("---\nlicense:\n- mit\n---\n", {"license": "mit"}),
        ("---\n: [\n---\n", {}),
        (OTHER, {"license": "other", "license_name": "acme-1", "license_link": "LICENSE.md"}),
    ],
)
def test_a_folder_has_the_licence_of_its_card(tmp_path: Path, card: str | None, expected: dict[str, str]) -> None:
    assert base_license(folder_source(tmp_path, card)) == expected


def test_licence_texts_are_copied(tmp_path: Path) -> None:
    model, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    model.mkdir()
    checkpoint.mkdir()
    for name in ("LICENSE.md", "NOTICE", "config.json"):
        (model / name).write_text(name, encoding="utf-8")
    (model / "LICENSES").mkdir()
    copy_license_files(folder_source(model, OTHER), checkpoint)
    assert sorted(path.name for path in checkpoint.iterdir()) == ["LICENSE.md", "NOTICE"]


def test_a_hub_model_has_the_licence_of_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = ModelSource("base", "acme/base", "hub")
    assert base_license(source) == {}  # neither in the cache nor reachable
    snapshot = tmp_path / "models--acme--base" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit, encoding="utf-8")
    (snapshot / "README.md").write_text(OTHER, encoding="utf-8")
    assert base_license(source)["license_link"] == "https://huggingface.co/acme/base/blob/main/LICENSE.md"
    assert base_license(ModelSource("base", "acme/base", "hub", commit))["license_link"].endswith(
        f"{commit}/LICENSE.md"
    )


def test_a_pipe_is_no_card(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "README.md")
    signal.alarm(20)  # ends this process where somebody waits for what comes out of it
    assert base_license(folder_source(tmp_path, None)) == {}
    signal.alarm(0)
