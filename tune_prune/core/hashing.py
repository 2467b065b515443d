"""Plain data as one text, one digest, one seed: equal content gives an equal result on every machine. And the seal of JSON
objects that are kept: a checksum of the object and of the name under which it is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"  # the field of a sealed object


def canonical_json(value: Any) -> str:
    """The one text of `value` (plain data): sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 16) -> str:
    """A hex digest of `value` (plain data), equal for equal content."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def sealed(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` (as JSON has them) with the checksum of them and of `name`, under which they are kept: it holds for no other content
    and in no other place."""
    content = {field: value for field, value in values.items() if field != CHECKSUM}
    return content | {CHECKSUM: hashlib.sha256(canonical_json([name, content]).encode()).hexdigest()}


def is_sealed(values: Mapping[str, Any]) -> bool:
    """Whether there is a checksum; files of older versions have none."""
    return CHECKSUM in values


def seed_for(seed: int, purpose: str) -> int:
    """A seed for one purpose, so that no random choice depends on the order in which others are made."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:4], "big")
