"""The contract of a store: named contents, each complete or absent. tests/store_contract.py holds every implementation to it.

Where results are kept: a folder (`Path`), or the beginning of names in a bucket (`ObjectPath`), which `location` tells apart.

A store in a folder of a file system that all machines share, such as NFS.
"""

from __future__ import annotations

import json
import os
import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Self

from filelock import FileLock, Timeout

from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile, atomic_write_bytes, check_writable, parse_json, to_json


class StorageError(UserError):
    """What object storage refused, or did not answer."""


class Store(ABC):
    """Named contents at `folder`, which need not exist yet. A name has "/" between its parts; hidden ones (.x) do not count."""

    folder: Location
    readers = 1  # threads that read many contents sooner

    def path(self, name: str) -> Location:
        """Return where `name` is, for messages."""
        return self.folder / name

    @abstractmethod
    def within(self, name: str) -> Self:
        """Return the contents whose names begin with `name` and a slash."""

    @abstractmethod
    def put(self, name: str, content: bytes | str) -> None:
        """Keep `content` (text as UTF-8) under `name`, in place of what is there. A reader sees the old one or the new one."""

    @abstractmethod
    def put_new(self, name: str, content: bytes | str) -> bool:
        """Keep `content` under `name` if there is nothing yet; whether it is what is there now. Of several who do so at a time
        one wins."""

    def put_all(self, contents: Mapping[str, bytes | str | None]) -> Sequence[Location]:
        """Put each content under its name and return the paths. A content of None removes what an earlier start has left."""
        for name, content in contents.items():
            if content is None:
                self.remove(name)
            else:
                self.put(name, content)
        return [self.path(name) for name, content in contents.items() if content is not None]

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove what is under `name`, if anything is."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Return what is kept under `name`; None if nothing is. Raises DamagedFile if it cannot be read."""

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object under `name`; None if there is nothing. Raises DamagedFile for anything else."""
        content = self.get(name)
        return None if content is None else parse_json(self.path(name), content)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Say whether something is kept under `name`."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Return the contents of a folder, sorted, as names for `get`; none where there is no such folder. What a killed
        writer left behind (hidden names) does not count."""

    @abstractmethod
    def folders(self, folder: str = "") -> list[str]:
        """Return the folders of a folder, sorted, as names for `within`."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raises UserError or OSError where nothing can be put here; leaves nothing behind."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Hold the lock, which one search has at a time, whatever machine it runs on; its process's death releases it.
        Raises UserError if another one holds it."""


def held_by(owner: Mapping[str, Any]) -> str:
    """Say who holds a lock, for its message; nothing where that is not known."""
    return f" (process {owner['pid']} on {owner['host']})" if {"pid", "host"} <= set(owner) else ""


def taken(folder: Location, owner: Mapping[str, Any]) -> str:
    """Say why an experiment cannot be locked."""
    return (
        f"another search runs on experiment {folder}{held_by(owner)}; wait for its end, stop it, or start another experiment with "
        "--name"
    )


SCHEMES = ("s3", "gs")  # of objects; file:// is a folder
_ADDRESS = re.compile(rf"({'|'.join(('file', *SCHEMES))}):", re.IGNORECASE)


class ObjectPath(PurePosixPath):
    """The name of objects, e.g. s3://bucket/prefix: parent, name and "/" as of a folder. It touches no storage."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    __fspath__ = __str__

    def resolve(self) -> ObjectPath:
        return self  # it is absolute

    absolute = expanduser = resolve

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")


Location = Path | ObjectPath


def is_address(text: str) -> bool:
    """Say whether `text` is meant as an address, and not as the name of a folder or file: `location` knows it, or refuses
    it."""
    return "://" in text or _ADDRESS.match(text) is not None


def location(text: str | Location) -> Location:
    """Return what `text` names: s3://bucket/prefix, gs://bucket/prefix, file:///folder or a folder. Raises UserError for
    another scheme, for one without a bucket, and for an address with a slash too few."""
    if isinstance(text, (Path, ObjectPath)):
        return text
    scheme, separator, rest = str(text).partition("://")
    if not separator:
        if mistyped := _ADDRESS.match(text):  # a folder named `s3:` would take the results
            scheme, place = mistyped[1].lower(), text[mistyped.end() :].lstrip("/")
            right = f"{scheme}://{'/' * (scheme == 'file')}{place}"
            raise UserError(
                f"{text} is neither a folder nor an address; write {right}, or ./{text} for a folder of that name"
            )
        return Path(text)
    if scheme == "file":
        if not rest.startswith("/"):
            raise UserError(
                f"{text} is no folder's address; write file:///folder, with three slashes, or the folder alone"
            )
        return Path(rest)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", *SCHEMES))
        raise UserError(f"{text} is of a scheme that results cannot be kept on; name a folder or use one of {known}")
    if not rest.strip("/"):
        raise UserError(f"{text} names no bucket; write e.g. {scheme}://bucket/prefix")
    return ObjectPath(str(text).rstrip("/"))


_LOCK = ".lock"
_LOCK_OWNER = ".lock.json"  # for the message only: it may be that of a search which was killed


class FolderStore(Store):
    """Named contents as the files of `folder`. Workers may write at the same time on any machine that shares it, and a kill at any
    moment loses at most what was being written."""

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """Return where `name` is: for messages, and for what writes files of its own (Ray Tune, TensorBoard, checkpoints)."""
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
