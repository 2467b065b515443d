"""Folders that the tests of the search's command line start from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tune_prune import embedded
from tune_prune.data.perplexity_text import TEXT_FILE

TINY = ("--model", "tiny-llama", "--search-space", "smoke")
TINY_FOLDER = embedded.model_dir("tiny-llama")


def model_folder(folder: Path, **changes: Any) -> Path:
    """A copy of tiny-llama; `changes` are fields of its config.json (None: left out)."""
    shutil.copytree(TINY_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


def data_folder(folder: Path) -> Path:
    """The embedded tasks and the beginning of the text in the layout of --data-dir."""
    shutil.copytree(embedded.tasks_dir(), folder / "tasks")
    (folder / TEXT_FILE).parent.mkdir()
    (folder / TEXT_FILE).write_text(embedded.perplexity_text()[:5000])
    return folder


def in_hub_cache(folder: Path, cache: Path, repo: str, commit: str = "0" * 40) -> Path:
    """Copy a folder to the hub's cache, as the newest commit of `repo`, and return where it lies there."""
    place = cache / f"models--{repo.replace('/', '--')}"
    snapshot = Path(shutil.copytree(folder, place / "snapshots" / commit))
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(commit, encoding="utf-8")
    return snapshot
