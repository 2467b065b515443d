"""Something that a finding tells its reader, as data: render/ has its words in every language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """A sentence to be made from `values`."""

    kind: str  # a key of messages.SENTENCES
    values: Mapping[str, Any] = field(default_factory=dict)
