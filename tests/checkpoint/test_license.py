"""The licence of a checkpoint is that of its base model, where that one's card states it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.search_folders import in_hub_cache
from tune_prune.checkpoint.save import LICENSE_FILES, base_license, copy_files
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
        ("---\nlicense: [mit, gpl]\n---\n", {}),
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
    copy_files(folder_source(model, OTHER), checkpoint, LICENSE_FILES)
    assert sorted(path.name for path in checkpoint.iterdir()) == ["LICENSE.md", "NOTICE"]


def test_a_hub_model_has_the_licence_of_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    source = ModelSource("base", "acme/base", "hub")
    assert base_license(source) == {}  # neither in the cache nor reachable
    (tmp_path / "card").mkdir()
    folder_source(tmp_path / "card", OTHER)
    commit = in_hub_cache(tmp_path / "card", tmp_path / "hub", "acme/base").name
    assert base_license(source)["license_link"] == "https://huggingface.co/acme/base/blob/main/LICENSE.md"
    assert base_license(replace(source, revision=commit))["license_link"].endswith(f"{commit}/LICENSE.md")
