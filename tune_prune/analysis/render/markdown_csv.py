"""A table as GitHub Markdown, and as CSV in full precision."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import as_cell
from tune_prune.analysis.render.messages import cell_text, format_message, note_sentences, one_line
from tune_prune.analysis.statistics.findings import Message
from tune_prune.analysis.tables.table import Column, Row, Table
from tune_prune.core.terminal import markdown


def markdown_table(table: Table) -> str:
    """A heading, the table, its notes."""
    columns = table.printed
    rows = [[markdown(column.label) for column in columns], ["---:" if column.format else "---" for column in columns]]
    rows += [[_cell(column, row) for column in columns] for row in table.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    note = markdown(" ".join(note_sentences(table, columns=columns)))
    return "\n".join([f"## {markdown(table.title)}", "", *lines, "", note, ""])


def _cell(column: Column, row: Row) -> str:
    text = markdown(one_line(cell_text(column, row)))
    return f"**{text}**" if column.is_best(row) else text


def csv_text(table: Table) -> str:
    """All values of the rows, also those that no column shows. A text that a spreadsheet would take for a formula begins
    with an apostrophe."""
    rows = [{as_cell(key): _plain(value) for key, value in row.items() if key[0] != "_"} for row in table.rows]
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")


def _plain(value: Any) -> Any:
    return as_cell(format_message(value) if isinstance(value, Message) else value)
