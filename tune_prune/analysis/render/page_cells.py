"""The parts of the tables of report.html: what a cell shows, and what it sorts by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tune_prune.analysis.render import messages


@dataclass(frozen=True)
class Cell:
    """A cell; one with nothing to sort by stands last, in either direction."""

    text: str
    sort: float | str | None = None
    style: str = ""  # CSS classes
    badge: str = ""  # a word set apart behind the text
    title: str = ""
    weight: float | None = None  # 0 to 1: strength of the cell's colour


@dataclass(frozen=True)
class Column:
    """The head of a column; `hint` says what its values are."""

    title: str
    numeric: bool = True
    style: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """A table with its title and what is to be said below it; `id` is unique on the page."""

    id: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()


def number(value: Any, text: str, **looks: Any) -> Cell:
    """A cell that shows `text` and sorts by `value`."""
    return Cell(text, None if messages.missing(value) else float(value), **looks)


def words(value: Any, **looks: Any) -> Cell:
    """A cell that sorts by its text, empty where there is none."""
    text = "" if messages.missing(value) else str(value)
    return Cell(text, text or None, **looks)


def blank(**looks: Any) -> Cell:
    """A cell with nothing to show."""
    return Cell(messages.MISSING, **looks)
