"""Content-addressed cache of everything expensive: one file per result, named by a digest of all that it depends on.

It stands beside the experiments, so that a second search on the same model finds what the first has computed. Two
processes that compute the same artifact write the same bytes; the rename makes either one whole. A file is an .npz
archive followed by its SHA-256: one that does not match its checksum is reported as damaged and computed again.
"""

from __future__ import annotations

import hashlib
import io
import logging
from typing import Any

import numpy as np

from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import canonical_json, digest
from tune_prune.core.storage.node_cache import NodeCachedStore
from tune_prune.core.store import Location, ObjectPath, location, open_store

log = logging.getLogger(__name__)

FOLDER = "artifacts"  # beside the experiments, below --storage-path
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class ArtifactStore:
    """The cache in one folder, which need not exist yet."""

    def __init__(self, folder: str | Location) -> None:
        where = location(folder)
        self._store = open_store(where)
        if isinstance(where, ObjectPath) and where.scheme != "memory":
            self._store = NodeCachedStore(where)
        self.folder = self._store.folder

    def path(self, kind: str, key: dict[str, Any]) -> Location:
        return self._store.path(_name(kind, key))

    def get(self, kind: str, key: dict[str, Any]) -> dict[str, np.ndarray] | None:
        """The arrays stored under `key` (plain data), or None where there are none or the file is damaged."""
        path = self.path(kind, key)
        try:
            content = self._store.get(_name(kind, key))
        except DamagedFile as error:
            log.warning("artifact %s is %s; it is computed again", path, error.what)
            return None
        if content is None:
            return None
        archive, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if hashlib.sha256(archive).digest() != checksum:
            log.warning("artifact %s is damaged (its checksum does not match); it is computed again", path)
            return None
        with np.load(io.BytesIO(archive), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files if name != "key"}

    def put(self, kind: str, key: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Store arrays under `key`, atomically; the key is kept inside for inspection."""
        archive = io.BytesIO()
        named: dict[str, Any] = {"key": np.array(canonical_json(key)), **arrays}
        np.savez(archive, **named)
        checksum = hashlib.sha256(archive.getbuffer()).digest()
        self._store.put(_name(kind, key), archive.getvalue() + checksum)


def _name(kind: str, key: dict[str, Any]) -> str:
    return f"{kind}-{digest(key)}.npz"
