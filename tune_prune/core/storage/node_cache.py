"""What a node has read from object storage or put there, kept in a folder of its own: artifacts are read by every process of every
trial, and replaced only by those that hold more samples."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import digest
from tune_prune.core.storage.folder import FolderStore
from tune_prune.core.storage.location import ObjectPath
from tune_prune.core.storage.objects import ObjectStore

log = logging.getLogger(__name__)

# How far somebody is (or removal losses that are complete): an earlier copy of a node would be an older state.
STATES = ("recovery_state-", "removal-")
MAX_BYTES = 4 * 2**30  # of one storage path; what was written first is removed first


def cache_folder() -> Path:
    """Of tune_prune in the user's cache folder; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tune_prune"


class NodeCachedStore(ObjectStore):
    """Objects with copies in `cache_folder()`, but for `STATES`: an old one may hold too few samples, and is never wrong. Where
    that folder cannot be written there are none."""

    def __init__(self, folder: ObjectPath) -> None:
        super().__init__(folder)
        self._near = FolderStore(cache_folder() / "artifacts" / digest(str(folder)))
        _trim(self._near.folder)

    def put(self, name: str, content: bytes | str) -> None:
        super().put(name, content)
        self._keep(name, content)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._near.remove(name)

    def get(self, name: str) -> bytes | None:
        try:
            near = None if name.startswith(STATES) else self._near.get(name)
        except DamagedFile:  # of somebody else, perhaps: what is stored is what counts
            near = None
        if near is not None:
            return near
        content = super().get(name)
        if content is not None:
            self._keep(name, content)
        return content

    def get_anew(self, name: str) -> bytes | None:
        """What is stored now, where the copy that `get` gave was not enough; None where there is no copy."""
        content = super().get(name) if self._near.has(name) else None
        if content is not None:
            self._keep(name, content)
        return content

    def _keep(self, name: str, content: bytes | str) -> None:
        if name.startswith(STATES):
            return
        try:
            self._near.put(name, content)
        except OSError as error:
            log.warning(
                "%s is not cached on this machine (%s), and is fetched again when it is needed", self.path(name), error
            )


def _trim(folder: Path) -> None:
    """Once per process: files of this size are few at a time. Other processes write and trim meanwhile, so any may be gone."""
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.name.startswith("."):  # what is being written
                    files.append((entry.stat(), Path(entry.path)))
    excess = sum(stat.st_size for stat, _ in files) - MAX_BYTES
    for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
        if excess <= 0:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        excess -= stat.st_size
