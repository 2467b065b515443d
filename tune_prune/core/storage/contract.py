"""The contract of a store: named contents, each complete or absent. tests/store_contract.py holds every implementation to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from tune_prune.core.errors import UserError
from tune_prune.core.files import parse_json
from tune_prune.core.storage.location import Location


class StorageError(UserError):
    """What object storage refused, or did not answer."""


class Store(ABC):
    """Named contents at `folder`, which need not exist yet. A name has "/" between its parts; hidden ones (.x) do not count."""

    folder: Location
    readers = 1  # threads that read many contents sooner

    def path(self, name: str) -> Location:
        """Where `name` is, for messages."""
        return self.folder / name

    @abstractmethod
    def within(self, name: str) -> Self:
        """The contents whose names begin with `name` and a slash."""

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
        """Nothing is under `name` any more."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """What is kept under `name`; None if nothing is. Raises DamagedFile if it cannot be read."""

    def read(self, name: str) -> dict[str, Any] | None:
        """The JSON object under `name`; None if there is nothing. Raises DamagedFile for anything else."""
        content = self.get(name)
        return None if content is None else parse_json(self.path(name), content)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether something is kept under `name`."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """The contents of a folder, sorted, as names for `get`; none where there is no such folder. What a killed writer left
        behind (hidden names) does not count."""

    @abstractmethod
    def folders(self, folder: str = "") -> list[str]:
        """The folders of a folder, sorted, as names for `within`."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raises UserError or OSError where nothing can be put here; leaves nothing behind."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Held by one search at a time, whatever machine it runs on; its process's death releases it. Raises UserError if
        another one holds it."""


def held_by(owner: Mapping[str, Any]) -> str:
    """Who holds a lock, for its message; nothing where that is not known."""
    return f" (process {owner['pid']} on {owner['host']})" if {"pid", "host"} <= set(owner) else ""


def taken(folder: Location, owner: Mapping[str, Any]) -> str:
    """Why an experiment cannot be locked, in a sentence."""
    return (
        f"another search runs on experiment {folder}{held_by(owner)}; wait for its end, stop it, or start another experiment with "
        "--name"
    )
