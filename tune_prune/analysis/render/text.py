"""Paragraphs and tables for a fixed-width screen, where a Chinese character is two columns wide."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from tune_prune.analysis.render.messages import cell_text, label
from tune_prune.analysis.tables.table import Table

COLUMNS = 100
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60"  # blocks of double width that prose here uses
_OPENING, _CLOSING = "（“《", "，。：；、）”》！？"
# What a line may not be broken within: a wide character or a run of others, with the punctuation that belongs to it.
_UNIT = re.compile(rf"\s+|[{_OPENING}]*(?:[^\s{_WIDE}{_OPENING}{_CLOSING}]+|[{_WIDE}])[{_CLOSING}]*|\S")
_GAP = "  "
_MARKS = {"best": "*", "tied": "~", "": " "}
_CELL = 48  # columns; two such cells fill a line


def width(text: str) -> int:
    """Columns that `text` takes on a screen (Unicode Standard Annex 11; ambiguous characters are narrow)."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def pad(text: str, columns: int, right: bool = False) -> str:
    """`text` filled with blanks to `columns`, in front where it is flush right."""
    blanks = " " * (columns - width(text))
    return blanks + text if right else text + blanks


def wrap(text: str, first: str = "", rest: str | None = None, columns: int = COLUMNS) -> str:
    """`text` as lines of at most `columns`, ending with a newline; `first` stands before the first line, `rest` before others.

    White space counts as one blank, or as none between two wide characters. A longer unit is broken where the line ends.
    """
    rest = " " * width(first) if rest is None else rest
    text = re.sub(rf"(?<=[{_WIDE}])\s+(?=[{_WIDE}])", "", " ".join(text.split()))
    lines, line, empty = [], first, True
    for unit in _UNIT.findall(text):
        if width(line + unit.rstrip()) > columns and not empty:
            lines.append(line.rstrip())
            line, empty = rest, True
        while width(line + unit) > columns and empty and not unit.isspace():
            fits = max(n for n in range(1, len(unit) + 1) if n == 1 or width(line + unit[:n]) <= columns)
            lines.append(line + unit[:fits])
            line, unit = rest, unit[fits:]
        if not (empty and unit.isspace()):
            line, empty = line + unit, empty and not unit
    return "\n".join([*lines, line.rstrip()]) + "\n"


def clip(text: str, columns: int) -> str:
    """`text`, or what fits of it into `columns` with an ellipsis."""
    if width(text) <= columns:
        return text
    return text[: max(n for n in range(len(text)) if width(text[:n]) < columns)] + "…"


def text_table(table: Table, language: str = "en", columns: int = COLUMNS) -> str:
    """The table as `aligned` does it, without title and notes: numbers flush right, `*` behind the best, `~` behind a tied one."""
    shown = table.shown
    rows = [[cell_text(column, row, language) for column in shown] for row in table.rows]
    for index, column in enumerate(shown):
        marks = [column.mark(row) for row in table.rows]
        if any(marks):
            for row, mark in zip(rows, marks, strict=True):
                row[index] += _MARKS[mark]
    align = "".join("r" if column.format else "l" for column in shown)
    return aligned([label(column.label, language) for column in shown], rows, align, columns=columns)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "", columns: int = COLUMNS) -> str:
    """Aligned columns below a header and a rule, each line ended by a newline.

    `align` has an l or r per column (r where it is shorter, but l for the first). A table too wide is continued below with
    its first column repeated; of a cell too wide for any table, the end is left out.
    """
    align = (align or "l").ljust(len(header), "r")
    header = [clip(name, _CELL) for name in header]
    body = [[clip(cell, _CELL) for cell in row] for row in rows]
    widths = [max(map(width, column)) for column in zip(header, *body, strict=True)]

    def line(row: Sequence[str], shown: Sequence[int]) -> str:
        return (_GAP + _GAP.join(pad(row[i], widths[i], align[i] == "r") for i in shown)).rstrip()

    blocks = []
    for shown in _fitting(widths, columns - len(_GAP)):
        rule = _GAP.join("-" * widths[i] for i in shown)
        blocks.append([line(header, shown), _GAP + rule, *(line(row, shown) for row in body)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _fitting(widths: Sequence[int], columns: int) -> list[list[int]]:
    """Indices of the columns of each part of a table, the first column in every part."""
    parts, taken = [[0]], widths[0]
    for index in range(1, len(widths)):
        if taken + len(_GAP) + widths[index] > columns and len(parts[-1]) > 1:
            parts.append([0])
            taken = widths[0]
        parts[-1].append(index)
        taken += len(_GAP) + widths[index]
    return parts
