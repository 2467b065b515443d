"""Texts of others (labels, names of files, reasons) in what a person reads, so that nothing in them acts; and bars for what lasts.

A loop opens a `step` and tells it what has been done. That is drawn where a command line has asked for it (`shown`) and standard
error is a terminal; elsewhere (workers, tests, programs that import this package) a step costs a function call.
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
    """Return `text` for a terminal: what would move its cursor, change its colours or the direction of writing is spelt out
    (\\x1b). Lines and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", to: TextIO | None = None) -> None:
    """Print `text` at once, to standard output unless another stream is given, with nothing in it that acts."""
    print(printable(text), file=to or sys.stdout, flush=True)


def markdown(text: str) -> str:
    """Return `text` on one line, as it is, in GitHub's Markdown and in pandoc's: no link, tag, emphasis or cell of a table. An
    underscore within a word and a < before a number mean nothing there."""
    text = re.sub(r"&(?=#?\w+;)", "&amp;", printable(re.sub(r"\s+", " ", text)))
    text = re.sub(r"<(?=[\w/!?])", "&lt;", text)
    return re.sub(r"([\\`*|\[\]~$]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def markdown_code(text: str) -> str:
    """Return `text` on one line as code, also in a cell of a table. A backtick, which would end it, becomes an apostrophe."""
    return "`" + printable(re.sub(r"\s+", " ", text)).replace("`", "'").replace("|", r"\|") + "`"


_BAR = "{desc:<12} {percentage:3.0f}% |{bar}| {n_fmt} of {total_fmt} {unit}, {elapsed} so far, ETA {remaining}"

Advance = Callable[[int], object]  # takes how much has been done since the last call

_after_s: ContextVar[float | None] = ContextVar("_after_s", default=None)  # None: nothing is drawn

T = TypeVar("T")


@contextmanager
def shown(after_s: float | None = 0.0) -> Iterator[None]:
    """Draw steps that begin inside on standard error, unless that is no terminal, once they have lasted `after_s` seconds; None:
    draw none, as they are parts of one that is."""
    before = _after_s.set(after_s if sys.stderr.isatty() else None)
    try:
        yield
    finally:
        _after_s.reset(before)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text` on the line of the bars while what is inside is done, which may draw bars of its own there."""
    if _after_s.get() is None:
        yield
        return
    text = text[: get_terminal_size().columns - 1]
    blank = f"\r{' ' * len(text)}\r"
    with suppress(OSError):  # the terminal is gone
        print(f"{blank}{text}", end="\r", file=sys.stderr, flush=True)  # what is said meanwhile is written over it
    try:
        yield
    finally:
        with suppress(OSError):
            print(blank, end="\r", file=sys.stderr, flush=True)


def unseen(amount: int) -> None:
    """An `Advance` of a step that nobody watches."""


@contextmanager
def step(name: str, total: Callable[[], int], unit: str, done: Callable[[], int] = lambda: 0) -> Iterator[Advance]:
    """Give an `Advance` for a step of `total` units, of which `done` are done already: functions, which are not called where
    nothing is drawn. At its end the bar goes."""
    after_s = _after_s.get()
    if after_s is None:
        yield unseen
        return
    from tqdm import tqdm

    # Not tqdm's own width, which is 0, so that no bar is drawn, where a terminal does not tell its size. The bar fills the line, so
    # that nothing is left of another that stood there.
    width = get_terminal_size().columns - 1
    look = {"unit": unit, "unit_scale": True, "bar_format": _BAR, "leave": False, "ncols": width, "delay": after_s}
    with tqdm(desc=name, total=total(), initial=done(), smoothing=0.1, **look) as bar:
        yield bar.update


def over(items: Collection[T], name: str, unit: str) -> Iterator[T]:
    """Yield the items, as a step that has done each when the next one is asked for."""
    with step(name, lambda: len(items), unit) as advance:
        for item in items:
            yield item
            advance(1)
