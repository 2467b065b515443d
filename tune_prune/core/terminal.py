"""Texts of others (labels, names of files, reasons) in what is read by a person: nothing in them acts.

Bars for what lasts: how much of a step is done, and how long the rest takes.

A loop opens a `step` and tells it what has been done. That is drawn where a command line has asked for it (`shown`) and standard
error is a terminal, and nowhere else: a search's workers, tests and programs that import this package draw nothing, and there a
step costs a function call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from shutil import get_terminal_size
from typing import TextIO, TypeVar


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


_BAR = "{desc:<12} {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} {unit}, {elapsed} so far, ETA {remaining}"

Advance = Callable[[int], object]  # takes how much has been done since the last call

_after_s: ContextVar[float | None] = ContextVar("_after_s", default=None)  # None: nothing is drawn

T = TypeVar("T")


@contextmanager
def shown(after_s: float = 0.0) -> Iterator[None]:
    """Steps that begin inside are drawn on standard error once they have lasted `after_s` seconds, unless that is no terminal."""
    before = _after_s.set(after_s if sys.stderr.isatty() else None)
    try:
        yield
    finally:
        _after_s.reset(before)


@contextmanager
def hidden() -> Iterator[None]:
    """Steps that begin inside are not drawn: they are parts of one that is."""
    before = _after_s.set(None)
    try:
        yield
    finally:
        _after_s.reset(before)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """`text` on the line of the bars while what is inside is done, however short, which may draw bars of its own there."""
    if _after_s.get() is None:
        yield
        return
    text = text[: get_terminal_size().columns - 1]
    _rewrite(text, text)
    try:
        yield
    finally:
        _rewrite(text, "")


def _rewrite(before: str, text: str) -> None:
    with suppress(OSError):  # the terminal is gone
        sys.stderr.write(f"\r{' ' * len(before)}\r{text}\r")  # what is said meanwhile is written over it
        sys.stderr.flush()


def unseen(amount: int) -> None:
    """An `Advance` of a step that nobody watches."""


@contextmanager
def step(name: str, total: Callable[[], int], unit: str, done: Callable[[], int] = lambda: 0) -> Iterator[Advance]:
    """Gives an `Advance` for a step of `total` units, of which `done` are done already. At its end the bar goes.

    Both are functions: they may cost something to find, and are not asked for where nothing is drawn.
    """
    after_s = _after_s.get()
    if after_s is None:
        yield unseen
        return
    from tqdm import tqdm

    # Not tqdm's own width, which is 0, so that no bar is drawn, where a terminal does not tell its size. The bar fills the line, so
    # that nothing is left of another that stood there.
    options = {
        "unit": unit,
        "unit_scale": True,
        "bar_format": _BAR,
        "leave": False,
        "ncols": get_terminal_size().columns - 1,
        "delay": after_s,
    }
    with tqdm(desc=name, total=total(), initial=done(), smoothing=0.1, **options) as bar:
        yield bar.update


def over(items: Collection[T], name: str, unit: str) -> Iterator[T]:
    """The items one after the other, as a step that has done each when the next one is asked for."""
    with step(name, lambda: len(items), unit) as advance:
        for item in items:
            yield item
            advance(1)
