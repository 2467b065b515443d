"""A table as GitHub Markdown, and as CSV in full precision."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from tune_prune.analysis.render.messages import cell_text, format_message, note_sentences, one_line
from tune_prune.analysis.statistics.findings import Message
from tune_prune.analysis.tables.table import Column, Row, Table


def markdown_table(table: Table) -> str:
    """A heading, the table, its notes."""
    columns = table.printed
    rows = [[_escaped(column.label) for column in columns], ["---:" if column.format else "---" for column in columns]]
    rows += [[_cell(column, row) for column in columns] for row in table.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    note = _escaped(" ".join(note_sentences(table, columns=columns)))
    return "\n".join([f"## {_escaped(table.title)}", "", *lines, "", note, ""])


def _cell(column: Column, row: Row) -> str:
    text = _escaped(one_line(cell_text(column, row)))
    return f"**{text}**" if column.is_best(row) else text


def _escaped(text: str) -> str:
    """`text` as it is; underscores within a word and a < before a number mean nothing to GitHub."""
    return re.sub(r"([\\`*|\[\]~]|(?<!\w)_|_(?!\w)|<(?=[\w/!?]))", r"\\\1", re.sub(r"\s+", " ", text))


def csv_text(table: Table) -> str:
    """All values of the rows, also those that no column shows. A text that a spreadsheet would take for a formula begins
    with an apostrophe."""
    rows = [{_plain(key): _plain(value) for key, value in row.items() if key[0] != "_"} for row in table.rows]
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        value = format_message(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
