"""Paragraphs and tables for a fixed-width screen, where a Chinese character is two columns wide.

Inside this module such a character has a NUL before it, so that the length of a text is its columns.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence

from tune_prune.analysis.render.messages import cell_text, label
from tune_prune.analysis.tables.table import Table
from tune_prune.core.terminal import printable

COLUMNS = 100
_GAP = "  "
_CELL = 48  # columns; two such cells fill a line


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at blanks and beside wide characters, but not between these and the punctuation that belongs to them."""

    wordsep_simple_re = re.compile(r"(\s+|(?:\0[（《]|“)*(?:\0.|[^\s\0“”]+)(?:\0[，。：；、）》！？]|”)*)")


def width(text: str) -> int:
    """Return the columns that `text` takes on a screen (Unicode Standard Annex 11; ambiguous characters are narrow)."""
    return len(_filled(text))


def _filled(text: str) -> str:
    composed = unicodedata.normalize("NFC", printable(text))
    return "".join(f"\0{letter}" if unicodedata.east_asian_width(letter) in "WF" else letter for letter in composed)


def fold(line: str, columns: int = COLUMNS) -> str:
    """`line` as lines of at most `columns`, below the beginning of its text: behind blanks, `- ` or `! `, or all up to a tab.

    A longer word is broken where the line ends.
    """
    _, first, text = re.split(r"^(.*\t| *(?:[-!] )?)", _filled(line), maxsplit=1)
    first = first.replace("\t", "")
    wrapper = _Wrapper(columns, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
    return wrapper.fill(text).replace("\0", "")


def text_table(table: Table, language: str = "en") -> str:
    """Return the table as `text_columns` does it, without title and notes: numbers flush right, `*` behind the best and its
    ties."""
    shown = table.shown
    rows = [[cell_text(column, row, language) for column in shown] for row in table.rows]
    for index, column in enumerate(shown):
        marks = [column.is_best(row) + column.at_chance(row) + column.of_one_draw(row) for row in table.rows]
        for cells, row, count in zip(rows, table.rows, marks, strict=True):  # digits stay below each other
            cells[index] += "*" * column.is_best(row) + " " * (max(marks) - count)
    align = "".join("r" if column.format else "l" for column in shown)
    return text_columns([label(column.label, language) for column in shown], rows, align)


def text_columns(header: Sequence[str], rows: Sequence[Sequence[str]], align: str, columns: int = COLUMNS) -> str:
    """Aligned columns below a header and a rule, each line ended by a newline.

    `align` has an l or r per column. A table too wide is continued below with its first column repeated, or as many as tell its
    rows apart within half a line; of a cell too wide for any table, the end is left out.
    """
    padded = []
    for side, *cells in zip(align, header, *rows, strict=True):
        texts = [_clipped(_filled(cell)) for cell in cells]
        widest = max(map(len, texts))
        texts.insert(1, "-" * widest)
        padded.append([text.ljust(widest) if side == "l" else text.rjust(widest) for text in texts])
    first = _names(padded, columns)
    parts = [padded[:first]]
    for column in padded[first:]:
        if len(parts[-1]) > first and sum(len(_GAP + shown[0]) for shown in [*parts[-1], column]) > columns:
            parts.append(padded[:first])
        parts[-1].append(column)
    blocks = ["\n".join((_GAP + _GAP.join(row)).rstrip() for row in zip(*part, strict=True)) for part in parts]
    return "\n\n".join(blocks).replace("\0", "") + "\n"


def _names(padded: Sequence[Sequence[str]], columns: int) -> int:
    """Return how many of the first columns (header, rule, cells) tell rows apart; 1 where that takes more than half of a line."""
    for count in range(1, len(padded)):
        names = list(zip(*(column[2:] for column in padded[:count]), strict=True))
        if sum(len(_GAP + column[0]) for column in padded[:count]) > columns // 2:
            return 1
        if len(set(names)) == len(names):
            return count
    return 1


def _clipped(text: str) -> str:
    return text if len(text) <= _CELL else text[: _CELL - 1].rstrip("\0") + "…"
