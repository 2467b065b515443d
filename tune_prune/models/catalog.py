"""What `--model` may be: an alias, a Hugging Face hub id or a local folder; each becomes a ModelSource.

Needs neither network nor torch. Whether the model can be had is found out when it is loaded (loading.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tune_prune import embedded
from tune_prune.core.config import check_label
from tune_prune.core.errors import UserError, did_you_mean

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
}

MAX_NAME, MAX_PATH = 255, 4096  # bytes of a file's name and of a path, on most systems

_HUGGING_FACE = "give a checkpoint in Hugging Face format: a folder with config.json and safetensors weights"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from."""

    label: str  # name in tables and file names: alias, last part of the hub id, or folder name
    location: str  # hub id or absolute folder
    kind: Literal["hub", "folder", "embedded"]
    revision: str | None = None  # hub only: branch, tag or commit


def aliases() -> tuple[str, ...]:
    """Every name that `--model` knows by itself: hub aliases and embedded models."""
    return (*HUB_ALIASES, *embedded.MODEL_NAMES)


def resolve(name: str, revision: str | None = None) -> ModelSource:
    """The source that `name` means. Raises UserError for an unknown alias or a folder that is no model."""
    if name in embedded.MODEL_NAMES:
        return ModelSource(name, str(embedded.model_dir(name)), "embedded")
    if name in HUB_ALIASES:
        return ModelSource(name, HUB_ALIASES[name], "hub", revision)
    if len(name) > MAX_PATH or any(len(os.fsencode(part)) > MAX_NAME for part in name.split(os.sep)):
        raise UserError(
            f"the name of the model has {len(name):,} letters ({name[:30]!r}...), and a path has at most {MAX_PATH:,}, {MAX_NAME} "
            "between two slashes; give an alias, a hub id or a folder"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        check_label(path.resolve().name, f"model folder {name}")
        if not (path / "config.json").is_file():
            if any(path.glob("*.gguf")):
                raise UserError(f"model folder {name} holds a GGUF file, which is for llama.cpp; {_HUGGING_FACE}")
            raise UserError(f"model folder {name} has no config.json; point --model at a folder in Hugging Face format")
        return ModelSource(path.resolve().name, str(path.resolve()), "folder")
    if path.is_file() and path.suffix == ".gguf":
        raise UserError(f"model {name} is a GGUF file, which is for llama.cpp; {_HUGGING_FACE}")
    if path.exists():
        raise UserError(f"model {name} is a file; point --model at the folder that holds its config.json and weights")
    looks_local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    if looks_local:
        raise UserError(
            f"model folder {name} does not exist; give an existing folder, a hub id or one of: {', '.join(aliases())}"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return ModelSource(name.rpartition("/")[2], name, "hub", revision)
    raise UserError(
        f"unknown model {name!r}; {did_you_mean(name, aliases())}; or give a hub id such as Qwen/Qwen2.5-7B or a folder"
    )
