"""A store in a folder of a file system that all machines share, such as NFS."""

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
from tune_prune.core.files import DamagedFile, atomic_write_bytes, check_writable, to_json
from tune_prune.core.storage.contract import Store, taken

_LOCK = ".lock"
_LOCK_OWNER = ".lock.json"  # for the message only: it may be that of a search which was killed


class FolderStore(Store):
    """Named contents as the files of `folder`. Workers may write at the same time on any machine that shares it, and a kill at any
    moment loses at most what was being written."""

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """Where `name` is: for messages, and for what writes files of its own (Ray Tune, TensorBoard, checkpoints)."""
        return self.folder / name

    def within(self, name: str) -> FolderStore:
        return FolderStore(self.path(name))

    def put(self, name: str, content: bytes | str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content.encode() if isinstance(content, str) else content)

    def put_new(self, name: str, content: bytes | str) -> bool:
        path, data = self.path(name), content.encode() if isinstance(content, str) else content
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            atomic_write_bytes(path, data, new=True)
        except FileExistsError:
            return self.get(name) == data
        return True

    def put_all(self, contents: Mapping[str, bytes | str | None]) -> list[Path]:
        return [Path(path) for path in super().put_all(contents)]

    def remove(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def get(self, name: str) -> bytes | None:
        path = self.path(name)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            step = "make it a file that you may read, then run the same command again"  # its content may be whole
            raise DamagedFile(path, f"unreadable ({error.strerror or error})", step) from error

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def names(self, folder: str = "") -> list[str]:
        return self._entries(folder, Path.is_file)

    def folders(self, folder: str = "") -> list[str]:
        return self._entries(folder, Path.is_dir)

    def _entries(self, folder: str, is_kind: Any) -> list[str]:
        root = self.path(folder)
        found = [path for path in root.iterdir() if is_kind(path)] if root.is_dir() else []
        return sorted(path.relative_to(self.folder).as_posix() for path in found if not path.name.startswith("."))

    def check_writable(self) -> None:
        check_writable(self.folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path(_LOCK), blocking=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(taken(self.folder, self._lock_owner())) from error
        try:
            self.put(_LOCK_OWNER, to_json({"host": platform.node(), "pid": os.getpid()}))
            yield
        finally:
            lock.release()

    def _lock_owner(self) -> dict[str, Any]:
        try:
            owner = json.loads(self.get(_LOCK_OWNER) or b"{}")
        except ValueError:  # not written yet
            return {}
        return owner if isinstance(owner, dict) else {}
