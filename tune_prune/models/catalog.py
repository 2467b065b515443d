"""Names that `--model` takes: an alias, a Hugging Face hub id, a local folder or a GGUF file; each becomes a ModelSource.

Needs no torch, and the network only to choose between the hub and an installed package that has the same model. Whether the model
can be had is found out when it is loaded (loading.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tune_prune import embedded
from tune_prune.core.config import check_label
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.models.gguf import files as gguf_files
from tune_prune.models.gguf import packages

ADAPTER = "adapter_config.json"  # by which peft and transformers know an adapter
MERGE = "merge the adapter into the model that it names (peft: merge_and_unload, then save_pretrained)"

# alias -> hub id
HUB_ALIASES = {
    "llama": "meta-llama/Meta-Llama-3-8B",
    "llama-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "qwen2": "Qwen/Qwen2-7B",
    "qwen2-instruct": "Qwen/Qwen2-7B-Instruct",
    "qwen2.5": "Qwen/Qwen2.5-7B",
    "qwen2.5-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "mistral-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
} | {package.alias: package.hub for package in packages.PACKAGES}  # or the file of an installed package


@dataclass(frozen=True)
class ModelSource:
    """A model's source."""

    label: str  # name in tables and file names: alias, last part of the hub id, or name of the folder or file
    location: str  # hub id or absolute folder; of a GGUF file the folder in the cache that loading.load_config fills
    kind: Literal["hub", "folder", "embedded", "gguf"]
    revision: str | None = None  # hub only: branch, tag or commit
    # By which records find it again: alias, hub id, package, absolute folder or file.
    name: str = field(default="", compare=False)
    file: Path | None = None  # the GGUF file, absolute

    @property
    def gguf(self) -> gguf_files.GgufOrigin | None:
        """Return the GGUF file that the model was read from, once its folder is filled; None of other models."""
        return None if self.file is None else gguf_files.origin(Path(self.location), self.file.name)

    @property
    def found_as(self) -> str:
        """Return where a model was found that can come from several places, or that a file holds in another form; empty of
        others."""
        if self.file is not None:
            again = gguf_files.head(Path(self.location))
            package = f", of package {self.name}" if packages.of(self.name) else ""
            return f"{self.gguf}{package}" + (f"; {again}" if again else "")
        return f"{self.location} of the hub" if packages.of(self.name) else ""


def aliases() -> tuple[str, ...]:
    """Return every name that `--model` knows by itself: hub aliases, a package with a model, and embedded models."""
    return (*HUB_ALIASES, *(package.name for package in packages.PACKAGES), *embedded.MODEL_NAMES)


def resolve(name: str, revision: str | None = None) -> ModelSource:
    """Return the source that `name` means. Raises UserError for an unknown alias or a folder that is no model."""
    if name in embedded.MODEL_NAMES:
        return ModelSource(name, str(embedded.model_dir(name)), "embedded", name=name)
    if (package := packages.of(name)) is not None:
        if name == package.name:
            return _packaged(package)
        if revision is None and package.installed:
            from tune_prune.models import hub  # imports the hub client

            if hub.obstacle(package.hub):
                return _packaged(package)
    if name in HUB_ALIASES:
        return ModelSource(name, HUB_ALIASES[name], "hub", revision, name)
    path = Path(name).expanduser()
    if path.is_dir():
        check_label(path.resolve().name, f"model folder {name}")
        if not (path / "config.json").is_file():
            step = "point --model at a folder in Hugging Face format"
            if (path / ADAPTER).is_file():
                step = f"it is an adapter ({ADAPTER}) and no model: {MERGE} and give that folder"
            elif ggufs := sorted(path.glob(f"*{gguf_files.SUFFIX}")):
                step = f"name the GGUF file in it: --model {ggufs[0]}"
            raise UserError(f"model folder {name} has no config.json; {step}")
        return ModelSource(path.resolve().name, str(path.resolve()), "folder", name=str(path.resolve()))
    if path.is_file() and path.suffix == gguf_files.SUFFIX:
        check_label(path.stem, f"GGUF file {name}")
        return _gguf(path.stem, str(path.absolute()), path.absolute())
    if path.exists():
        raise UserError(f"model {name} is a file; point --model at the folder that holds its config.json and weights")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise UserError(
            f"model folder {name} does not exist; give an existing folder, a hub id or one of: {', '.join(aliases())}"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ModelSource(name.rpartition("/")[2], name, "hub", revision, name)
    raise UserError(
        f"unknown model {name!r}; {did_you_mean(name, aliases())}; or give a hub id such as Qwen/Qwen2.5-7B or a folder"
    )


def _packaged(package: packages.Package) -> ModelSource:
    return _gguf(package.alias, package.name, package.file())


def _gguf(label: str, name: str, file: Path) -> ModelSource:
    return ModelSource(label, str(gguf_files.folder_of(file)), "gguf", name=name, file=file)
