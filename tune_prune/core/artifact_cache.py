"""Content-addressed cache of everything expensive, beside the experiments that share it: a file per result, named by a digest of
all that it depends on, to which the versions of the libraries are added.

A file is an .npz archive, which holds its kind and key, followed by its SHA-256: one that does not match its checksum, is of
another key or holds other arrays than its reader needs is reported as damaged and computed again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import canonical_json, digest, library_versions
from tune_prune.core.store import Location, open_store

log = logging.getLogger(__name__)

FOLDER = "artifacts"  # beside the experiments, below --storage-path
KEEP_EVERY_S = 120.0  # seconds after which a computation that lasts stores how far it has come
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_ABOUT = ("kind", "key")  # entries of an archive that are no arrays of the result

T = TypeVar("T")


class ArtifactStore:
    """The cache in one folder, which need not exist yet."""

    def __init__(self, folder: str | Location) -> None:
        self._store = open_store(folder)
        self.folder = self._store.folder

    def path(self, kind: str, key: dict[str, Any]) -> Location:
        return self._store.path(_name(kind, key))

    def get(self, kind: str, key: dict[str, Any], read: Callable[[dict[str, np.ndarray]], T]) -> T | None:
        """Return what `read` makes of the arrays stored under `key` (plain data); None where there are none or the file is damaged,
        which is logged as a warning. `read` raises KeyError, IndexError, TypeError or ValueError for arrays that cannot be those;
        a UserError that it raises is none of the file's."""
        path = self.path(kind, key)
        try:
            content = self._store.get(_name(kind, key))
            return None if content is None else read(_arrays(content, kind, key))
        except DamagedFile as error:
            cause = error.what
        except UserError:
            raise
        except KeyError as error:
            cause = f"damaged (it has no {error})"
        except (EOFError, IndexError, TypeError, ValueError, zipfile.BadZipFile) as error:
            cause = f"damaged ({error})"
        log.warning("cached result %s is %s; it is computed again", path, cause)
        return None

    def put(self, kind: str, key: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays under `key`, atomically."""
        archive = io.BytesIO()
        named: dict[str, Any] = {"kind": np.array(kind), "key": np.array(canonical_json(_whole(key))), **arrays}
        np.savez(archive, **named)
        checksum = hashlib.sha256(archive.getbuffer()).digest()
        self._store.put(_name(kind, key), archive.getvalue() + checksum)

    def remove(self, kind: str, key: dict[str, Any]) -> None:
        """Remove what is stored under `key`."""
        self._store.remove(_name(kind, key))


def _arrays(content: bytes, kind: str, key: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays in a file. Raises ValueError where it is not the one of that kind and key."""
    archive, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if hashlib.sha256(archive).digest() != checksum:
        raise ValueError("its checksum does not match")
    with np.load(io.BytesIO(archive), allow_pickle=False) as stored:
        about = {name: str(stored[name]) for name in _ABOUT if name in stored.files}
        if about != {"kind": kind, "key": canonical_json(_whole(key))}:
            raise ValueError("it is another artifact under this name")
        return {name: stored[name] for name in stored.files if name not in _ABOUT}


def _name(kind: str, key: dict[str, Any]) -> str:
    return f"{kind}-{digest(_whole(key))}.npz"


def _whole(key: dict[str, Any]) -> dict[str, Any]:
    return key | {"libraries": library_versions()}
