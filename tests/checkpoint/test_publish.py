"""Licences of base models and names of the hub, as an upload reads them. Uploads themselves: tests/commands/test_upload.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

import tune_prune
from tests.search_folders import in_hub_cache, model_folder
from tune_prune.checkpoint.card import CARD
from tune_prune.checkpoint.licenses import check_license
from tune_prune.checkpoint.save import LICENSE_FILES, copy_files
from tune_prune.commands.option_kinds import Repository
from tune_prune.core.errors import UserError
from tune_prune.models.catalog import resolve

LINK = {"license_link": "https://example.org"}
LICENCES: list[tuple[dict[str, str], str, bool, str]] = [
    ({"license": "apache-2.0"}, "a/x", True, ""),
    ({"license": "cc-by-nc-4.0"}, "a/x", True, ""),
    ({"license": "cc-by-nd-4.0"}, "a/x", False, "cc-by-nd-4.0, forbids to share"),
    ({}, "a/x", False, ""),
    ({}, "a/x", True, "is unknown"),
    ({"license": "unknown"}, "a/x", True, "is unknown"),
    ({"license": "other"}, "a/x", True, "is other"),
    ({"license": "other"} | LINK, "a/x", True, ""),
    ({"license": "llama2"}, "a/x", True, ""),
    ({"license": "llama3"}, "a/Llama-2-x", False, "name it e.g. a/Llama-3-Llama-2-x"),
    ({"license": "llama3"}, "a/llama_3_8b-pruned", True, ""),
    ({"license": "llama3.2"}, "a/my-llama", False, "begin with Llama, and a/my-llama does not"),
    ({"license": "llama3.2"}, "llama/Llama3", True, ""),
]


@pytest.mark.parametrize(("stated", "repo", "public", "words"), LICENCES)
def test_what_a_licence_asks_of_an_upload(stated: dict[str, str], repo: str, public: bool, words: str) -> None:
    if not words:
        return check_license(stated, repo, public)
    with pytest.raises(UserError) as error:
        check_license(stated, repo, public)
    assert words in str(error.value) and "\n" not in str(error.value)


NAMES = (
    "a/b",
    "_a/b_",
    f"a/{'b' * 97}",
    "A-1/x_y.z",
    "a/b--c",
    "a/b..c",
    "a/.b",
    "a/b-",
    "a/b.git",
    "a b/c",
    "a/b/c",
    "ä/b",
    f"a/{'b' * 95}",
    "a/",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_taken_as_the_hubs_client_takes_them(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError:
        assert not Repository().holds(name)
    else:
        assert Repository().holds(name)
    assert not Repository().holds("b")  # its owner has to be said


def test_a_model_made_of_llama_carries_what_its_licence_asks(tmp_path: Path) -> None:
    base = model_folder(tmp_path / "base")
    (base / CARD).write_text("---\nlicense: llama3.1\n---\n")
    (base / "LICENSE").write_text("the whole agreement")
    tune_prune.open(base).prune("magnitude").save(tmp_path / "out")
    assert "**Built with Llama.**" in (tmp_path / "out" / CARD).read_text()
    assert "Llama 3.1 is licensed under the Llama 3.1 Community License" in (tmp_path / "out" / "NOTICE").read_text()
    assert (tmp_path / "out" / "LICENSE").read_text() == "the whole agreement"


def test_licence_texts_of_a_hub_model_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    base = model_folder(tmp_path / "base")
    (base / "LICENSE.txt").write_text("the whole agreement")
    in_hub_cache(base, tmp_path / "hub", "acme/base")
    (tmp_path / "out").mkdir()
    for repo in ("acme/base", "acme/never-seen"):  # tests are offline
        copy_files(resolve(repo), tmp_path / "out", LICENSE_FILES)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["LICENSE.txt"]
