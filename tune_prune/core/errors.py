"""Errors that a user can act on. Command lines print the sentence and exit with code 2, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user must change. The message names the thing, its value, the bound and the next step."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause for an error about an unknown name: the closest known name, then all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"
