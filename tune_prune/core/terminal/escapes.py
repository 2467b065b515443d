"""Texts of others (labels, names of files, reasons) in what is read by a person: nothing in them acts."""

from __future__ import annotations

import re
import sys
from typing import TextIO


def printable(text: str) -> str:
    """`text` for a terminal: what would move its cursor, change its colours or the direction of writing is spelt out (\\x1b). Lines
    and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", to: TextIO | None = None) -> None:
    """Print `text` at once, to standard output unless another stream is given, with nothing in it that acts."""
    print(printable(text), file=to or sys.stdout, flush=True)


def markdown(text: str) -> str:
    """`text` on one line, as it is, in GitHub's Markdown and in pandoc's: no link, no tag, no emphasis, no cell of a table. An
    underscore within a word and a < before a number mean nothing there."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", printable(re.sub(r"\s+", " ", text)))
    text = re.sub(r"<(?=[\w/!?])", "&lt;", text)
    return re.sub(r"([\\`*|\[\]~$]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def markdown_code(text: str) -> str:
    """`text` on one line as code, also in a cell of a table. A backtick would end it, so that it becomes an apostrophe."""
    return "`" + printable(re.sub(r"\s+", " ", text)).replace("`", "'").replace("|", r"\|") + "`"
