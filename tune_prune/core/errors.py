"""Errors that a user can act on. Command lines print the sentence and exit with code 2, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """Something the user must change. The message names the thing, its value, the bound and the next step."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause for an error about an unknown name: the closest known name, then all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


def validation_problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, as a clause: field, value and what it must be."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":  # raised by a check of ours: it says all of that itself
        return str(first["ctx"]["error"])
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".") or "it"
    if first["type"] == "missing":
        return f"{place} is missing"
    if first["type"].startswith(("dataclass", "model", "dict")):
        due = "an object {...}"
    else:
        due = first["msg"].removeprefix("Input should be ")
    return f"{place} is {shown(first['input'])}; it must be {due}"


def shown(value: Any) -> str:
    """A value as part of a sentence."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
