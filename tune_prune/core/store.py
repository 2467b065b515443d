"""Where results are kept, as named contents: an experiment, or the cache beside it. Today a folder.

Every name of a file of an experiment stands here, once; docs/architecture.md says what is in each. A content is complete or
absent: so workers may write at the same time on any machine that shares the folder, and a kill at any moment loses at
most what was being written. Another kind of storage passes tests/core/test_store.py.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, atomic_write_bytes, parse_json, to_json

EXPERIMENT = "experiment.json"
BASELINES = "baseline.json"
LEDGER = "ledger"
PASSES = "passes"
COST = "cost.json"
STATUS = "status.json"  # what the search that runs, or ran last, has said of itself
TENSORBOARD = "tensorboard"
TUNE = "tune"
SAVED_MODELS = "best"

RESULTS = "all_methods_results.csv"
BEST_CONFIG = "global_best_config.json"
METHOD_COMPARISON = "method_comparison.json"
CROSS_MODEL_COMPARISON = "cross_model_comparison.json"

TRIALS = "trials"  # a folder per trial, named by its key, with these files
PLAN = "pruning_plan.json"
PLAN_COMPARISON = "pruning_comparison.json"
GRADIENTS = "gradient_diagnosis.json"
ITEMS = "items.parquet"

_LOCK = ".lock"
_LOCK_OWNER = ".lock.json"  # for the message only: it may be that of a search which was killed


class FolderStore:
    """Named contents in `folder`, which need not exist yet. A name has "/" between its parts."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """Where `name` is: for messages, and for what writes files of its own (Ray Tune, TensorBoard, checkpoints)."""
        return self.folder / name

    def within(self, name: str) -> FolderStore:
        """The contents whose names begin with `name` and a slash."""
        return FolderStore(self.path(name))

    def put(self, name: str, content: bytes | str) -> None:
        """Keep `content` (text as UTF-8) under `name`, in place of what is there. A reader sees the old one or the new one."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content.encode() if isinstance(content, str) else content)

    def put_all(self, contents: Mapping[str, bytes | str | None]) -> list[Path]:
        """Put each content under its name and return the paths. A content of None removes what an earlier start has left."""
        for name, content in contents.items():
            if content is None:
                self.path(name).unlink(missing_ok=True)
            else:
                self.put(name, content)
        return [self.path(name) for name, content in contents.items() if content is not None]

    def get(self, name: str) -> bytes | None:
        """What is kept under `name`; None if nothing is. Raises DamagedFile if it cannot be read."""
        path = self.path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            step = "make it a file that you may read, then run the same command again"  # its content may be whole
            raise DamagedFile(path, f"unreadable ({error.strerror or error})", step) from error

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON object under `name`; None if there is nothing. Raises DamagedFile for anything else."""
        content = self.get(name)
        return None if content is None else parse_json(self.path(name), content)

    def names(self, folder: str = "") -> list[str]:
        """The files of a folder, sorted, as names for `get`; none where there is no such folder. What a killed writer left
        behind (hidden files) does not count."""
        root = self.path(folder)
        files = [path for path in root.iterdir() if path.is_file()] if root.is_dir() else []
        return sorted(path.relative_to(self.folder).as_posix() for path in files if not path.name.startswith("."))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held by one search at a time, whatever machine it runs on; its process's death releases it. Raises UserError if
        another one holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path(_LOCK), blocking=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another search runs on experiment {self.folder}{self._lock_owner()}; wait for its end, stop it, or start "
                "another experiment with --name"
            ) from error
        try:
            self.put(_LOCK_OWNER, to_json({"host": platform.node(), "pid": os.getpid()}))
            yield
        finally:
            lock.release()

    def _lock_owner(self) -> str:
        try:
            owner = json.loads(self.get(_LOCK_OWNER) or b"{}")
            return f" (process {owner['pid']} on {owner['host']})"
        except (ValueError, KeyError):  # not written yet
            return ""
