"""Plain data as one text, one digest, one seed: equal content gives an equal result on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """The one text of `value` (plain data): sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 16) -> str:
    """A hex digest of `value` (plain data), equal for equal content."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def seed_for(seed: int, purpose: str) -> int:
    """A seed for one purpose, so that no random choice depends on the order in which others are made."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")
