"""Content-addressed cache of what trials share: one .npz per result, named by a digest of everything it depends on.

Two processes that compute the same artifact write the same bytes; the rename makes either one whole. A file that cannot
be read back (numpy checks every array's CRC) is said to be damaged and computed again.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tune_prune.config import canonical_json, digest
from tune_prune.ledger import atomic_write_text, parse_json, to_json
from tune_prune.records import StageReport

log = logging.getLogger(__name__)


class ArtifactStore:
    """The cache in one folder, and a note of every pass that was made to fill it (for cost.json)."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, kind: str, key: dict[str, Any]) -> Path:
        return self.folder / f"{kind}-{digest(key)}.npz"

    def get(self, kind: str, key: dict[str, Any]) -> dict[str, np.ndarray] | None:
        """The arrays stored under `key` (plain data), or None."""
        path = self.path(kind, key)
        try:
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files if name != "key"}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            log.warning("artifact %s is damaged (%s); it is computed again", path, error)
            return None

    def put(self, kind: str, key: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Store arrays under `key`, atomically; the key itself is kept inside for people who look."""
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                named: dict[str, Any] = {"key": np.array(canonical_json(key)), **arrays}
                np.savez(file, **named)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path(kind, key))
        except BaseException:
            os.unlink(name)
            raise

    def note_pass(self, what: dict[str, Any], report: StageReport) -> None:
        """Keep that a pass over the model was made, for `what` and at which cost, until `passes` is asked."""
        values = what | {"stage": report.stage, "duration_s": report.duration_s, "tokens": report.tokens}
        name = f"pass-{report.stage}-{digest(what)}-{uuid.uuid4().hex[:8]}.json"
        atomic_write_text(self.folder / name, to_json(values))

    def passes(self) -> list[dict[str, Any]]:
        """Every pass that was made for this folder, whichever start of a search made it."""
        return [parse_json(path) for path in sorted(self.folder.glob("pass-*.json"))]
