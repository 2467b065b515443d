"""A table as data: rows of numbers in full precision, and columns that say how they are shown.

Each subject has one table (configurations, hyperparameters, trial_tables), which every renderer of render/ takes: screen
text, HTML, LaTeX, Markdown, CSV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from tune_prune.analysis.input.study import Message

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column, and how values of the rows are shown in it; every `str` but the label names a key of the rows."""

    key: str
    label: str  # in English; the catalogue of messages translates it
    format: str = ""  # one of messages.NUMBERS; "" is a text
    stderr: str = ""  # the standard error, shown behind ±
    upper: str = ""  # the upper end of an interval whose lower end is `key`
    best: str = ""  # True where the value is marked: it is the best, or was compared with it and is statistically tied
    threshold: str = ""  # an accuracy below it is marked as not distinguishable from guessing
    single: str = (
        ""  # True where an accuracy is marked: it is of one draw of calibration samples, others are means of several
    )
    items: str = ""  # how many items an accuracy is of: one of 0 or 1 has an interval instead of a standard error
    badge: str = ""  # True where a page sets a "best" behind the text
    weight: str = ""  # from 0 to 1: how strongly a page colours it
    hint: str = ""  # what the values are, for a page
    detail: bool = False  # left out in LaTeX and Markdown, where a line is short
    wrap: bool = False  # a text of many words
    style: str = ""  # how a page sets it: a class of report.css

    def is_best(self, row: Row) -> bool:
        """Return whether the row's value is to be marked as the best or as tied with it."""
        return bool(row.get(self.best))

    def at_chance(self, row: Row) -> bool:
        """Return whether the row's accuracy is to be marked as not distinguishable from guessing."""
        value, threshold = row.get(self.key), row.get(self.threshold)
        return value is not None and threshold is not None and bool(value < threshold)  # NaN is not below anything

    def of_one_draw(self, row: Row) -> bool:
        """Return whether the row's accuracy is to be marked as that of one draw of calibration samples, beside means of several."""
        return bool(row.get(self.single)) and not missing(row.get(self.key))


@dataclass(frozen=True)
class Table:
    """One subject's table. What no row knows is None, NaN or an empty text, and shown as missing.

    A row's own `_format`, where it has one, goes before the formats of its columns. Keys that begin with an underscore
    are no part of the CSV file.
    """

    key: str  # unique; the name of its files without suffix
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[Message] = ()  # what the columns hold; one with a value `model` is about that model's rows only
    best: str = ""  # kind of the message that says what the mark of the best means
    long: bool = False  # may break across pages

    @property
    def shown(self) -> list[Column]:
        """The columns of which any row knows a value."""
        return [column for column in self.columns if any(not missing(row.get(column.key)) for row in self.rows)]

    @property
    def printed(self) -> list[Column]:
        """Return the shown columns that LaTeX and Markdown have room for."""
        return [column for column in self.shown if not column.detail]

    def pick(self, *keys: str) -> Table:
        """Return the table with these columns only."""
        columns = {column.key: column for column in self.columns}
        return replace(self, columns=[columns[key] for key in keys])

    def with_rows(self, rows: Sequence[Row]) -> Table:
        """Return the table with these rows only."""
        return replace(self, rows=rows)

    def of(self, model: str) -> Table:
        """Return the rows and notes of one model, without the column that names it."""
        columns = [column for column in self.columns if column.key != "model"]
        rows = [row for row in self.rows if row["model"] == model]
        notes = [note for note in self.notes if note.values.get("model", model) == model]
        return replace(self, columns=columns, rows=rows, notes=notes)


def missing(value: Any) -> bool:
    """Return whether there is nothing to show."""
    return value is None or (not value if isinstance(value, str) else bool(pd.isna(value)))
