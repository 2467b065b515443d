"""Tables as LaTeX: booktabs; longtable where one may break across pages.

What is written compiles with pdflatex (of 2018 or later, with T1 fonts) whatever text a table holds: everything that LaTeX
would read as a command is escaped, and a letter that its fonts do not have is written as its code point.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence

from tune_prune.analysis.render.messages import cell_text, note_sentences, one_line
from tune_prune.analysis.tables.table import Column, Row, Table

_JOINER = "\u2060"
_COMMANDS = {
    _JOINER: "{}",
    "\\": r"\textbackslash{}",
    **{character: "\\" + character for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # a row that begins with it would be an option of the \\ before
    "*": "{*}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "“": "``",
    "”": "''",
    "‘": "`",
    "’": "'",
    "†": r"\textsuperscript{\dag}",
    "µ": r"$\mu$",
}
_LETTERS = re.compile("[À-ÖØ-öø-ĥĨ-ķĹ-ľŁ-ňŊ-ťŨ-ž]")  # of T1 fonts, beside ASCII


def escape(text: str) -> str:
    """`text` so that LaTeX prints it as it is. White space and control characters become a space."""
    text = re.sub(r"\s+", " ", "".join(" " if unicodedata.category(c) == "Cc" else c for c in text))
    text = re.sub(r"(?<![\w.-])-(?=\.?\d)", "−", text)
    text = re.sub("(?<=-)(?=-)", _JOINER, text)  # two hyphens would be printed as a dash
    return "".join(map(_escaped, unicodedata.normalize("NFC", text)))


def _escaped(character: str) -> str:
    printable = character.isascii() or _LETTERS.match(character)
    return _COMMANDS.get(character, character if printable else f"{{[}}U+{ord(character):04X}]")


# Size commands and the mean width of a character in points, largest first; the text of an A4 page with 2 cm margins is 483
# points wide.
_SIZES = ((r"\small", 4.7), (r"\footnotesize", 4.25), (r"\scriptsize", 3.75), (r"\tiny", 3.0))
_TEXT_WIDTH = 475.0
_COLUMN_SEPARATION = 4.0
_WRAPPED = 0.2  # of the line
_HEAD = 12  # characters of a line of a column's head, which has several where its label has several words


def latex_table(table: Table) -> str:
    """The table as an environment to \\input: `table`, or `longtable` where it may break across pages."""
    columns = table.printed
    aligns = "".join("r" if c.format else rf"p{{{_WRAPPED}\linewidth}}" if c.wrap else "l" for c in columns)
    header = " & ".join(_head(column) for column in columns) + r" \\"
    caption = rf"\caption{{{escape(table.title)}}}\label{{tab:{table.key.replace('_', '-')}}}"
    style = rf"{_size(table)}\setlength{{\tabcolsep}}{{{_COLUMN_SEPARATION:g}pt}}"
    note = escape(" ".join(note_sentences(table, columns=columns)))
    if not table.long:
        lines = [
            *(r"\begin{table}[htbp]", r"\centering", caption, style),
            *(rf"\begin{{tabular}}{{@{{}}{aligns}@{{}}}}", r"\toprule", header, r"\midrule"),
            *_rows(table),
            *(r"\bottomrule", r"\end{tabular}", r"\par\smallskip"),
            rf"\begin{{minipage}}{{\linewidth}}\footnotesize {note}\end{{minipage}}",
            r"\end{table}",
        ]
    else:
        lines = [
            *(rf"\begingroup{style}", rf"\begin{{longtable}}{{@{{}}{aligns}@{{}}}}"),
            *(rf"{caption} \\", r"\toprule", header, r"\midrule", r"\endfirsthead"),
            rf"\multicolumn{{{len(columns)}}}{{@{{}}l}}{{Table~\thetable{{}} (continued)}} \\",
            *(r"\toprule", header, r"\midrule", r"\endhead", r"\midrule"),
            rf"\multicolumn{{{len(columns)}}}{{r@{{}}}}{{continued on the next page}} \\",
            *(r"\endfoot", r"\bottomrule", r"\endlastfoot"),
            *_rows(table),
            *(r"\end{longtable}", rf"\noindent\footnotesize {note}\par", r"\endgroup"),
        ]
    return "\n".join([*lines, ""])


def _lines(column: Column) -> list[str]:
    return textwrap.wrap(column.label, _HEAD, break_long_words=False) or [""]


def _head(column: Column) -> str:
    first, *others = map(escape, _lines(column))
    side = "r" if column.format else "l"
    return rf"\shortstack[{side}]{{" + r" \\ ".join([first, *others]) + "}" if others else first


def _size(table: Table) -> str:
    """The largest size at which the table is as wide as the page at most; the smallest if none is."""
    columns = table.printed
    own = [column for column in columns if not column.wrap]
    characters = sum(max(map(len, (*_lines(c), *(cell_text(c, row) for row in table.rows)))) for c in own)
    wrapped = _TEXT_WIDTH * _WRAPPED * (len(columns) - len(own))
    for command, width in _SIZES:
        if characters * width + wrapped + 2 * _COLUMN_SEPARATION * (len(columns) - 1) <= _TEXT_WIDTH:
            return command
    return _SIZES[-1][0]


def _rows(table: Table) -> list[str]:
    """A line per row. The rows of a model stand together, under its name (said in each row where pages may break)."""
    models = [row.get("model") for row in table.rows]
    grouped = len(set(models)) < len(models)
    lines = []
    for index, row in enumerate(table.rows):
        cells = [_cell(column, row) for column in table.printed]
        if grouped and index:
            if models[index] != models[index - 1]:
                lines.append(r"\midrule")
            elif not table.long and table.printed[0].key == "model":
                cells[0] = ""
        lines.append(" & ".join(cells) + r" \\")
    return lines


def _cell(column: Column, row: Row) -> str:
    value = escape(one_line(cell_text(column, row)))
    return rf"\textbf{{{value}}}" if column.is_best(row) else value


def document(tables: Sequence[Table]) -> str:
    """A document with all of them, that compiles by itself from any folder."""
    short = [latex_table(table) for table in tables if not table.long]
    long = [latex_table(table) for table in tables if table.long]
    return "\n".join(
        [
            *(r"\documentclass[10pt,a4paper]{article}", r"\usepackage[T1]{fontenc}", r"\usepackage[utf8]{inputenc}"),
            *(r"\usepackage{booktabs}", r"\usepackage{longtable}", r"\usepackage[margin=2cm]{geometry}"),
            *(r"\begin{document}", "", *short),
            *([r"\clearpage", r"\appendix", "", *long] if long else []),
            *(r"\end{document}", ""),
        ]
    )
