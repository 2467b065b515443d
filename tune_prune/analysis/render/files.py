"""Tables as LaTeX (booktabs, array), GitHub Markdown, and CSV in full precision.

A LaTeX table is never wider than a line: graphicx scales it, and the texts of a longtable, which may break across pages, are
broken into lines.

What is written compiles with pdflatex (of 2018 or later, with T1 fonts) whatever text a table holds: everything that LaTeX
would read as a command is escaped, and a letter that its fonts do not have is written as its code point.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import as_cell
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.render.messages import cell_text, format_message, note_sentences, one_line
from tune_prune.analysis.tables.table import Column, Row, Table
from tune_prune.core.terminal import markdown

PACKAGES = r"\usepackage{array,booktabs,graphicx,longtable}"
_FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # scaled where the line is narrower
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
    "‡": r"\textsuperscript{\ddag}",
    "µ": r"$\mu$",
    "τ": r"$\tau$",
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


# Size commands, largest first, with the digits that a line of 17 cm has room for.
_SIZES = ((r"\small", 102), (r"\footnotesize", 111), (r"\scriptsize", 119), (r"\tiny", 139))
_BETWEEN = 2  # digits between two columns
_NARROW, _WIDE = re.compile(r"[fijlt.,:;'|()\[\] -]"), re.compile("[mwMW%@±]")
_WRAPPED = 28  # characters of a line of a text of many words
_HEAD = 12  # characters of a line of a head, where its words are no longer
_PART = 14  # characters of what cannot be broken
_MOST_LINES = 55  # of a table that stands on one page
_BEHIND = r"(?<=\w[/_@:-])(?=\w)|(?<=\w[.])(?=[^\W\d])"  # where a name may be broken, beside its spaces


def latex_table(table: Table) -> str:
    """Return the table as an environment to \\input: `table`, or `longtable` where it may break across pages."""
    columns = table.printed
    wrapped = [column for column in columns if column.wrap]
    lines_of = [[1, *(len(cell_text(c, row)) // _WRAPPED + 1 for c in wrapped)] for row in table.rows]
    long = table.long or sum(map(max, lines_of)) > _MOST_LINES
    size, widths = _widths(table, columns, long)
    aligns = "".join(_align(column, widths.get(column.key)) for column in columns)
    header = " & ".join(map(_head, columns)) + r" \\"
    caption = rf"\caption{{{escape(table.title)}}}\label{{tab:{table.key.replace('_', '-')}}}"
    style = rf"{size}\setlength{{\tabcolsep}}{{4pt}}"
    note = escape(" ".join(note_sentences(table, columns=columns)))
    rows = _rows(table, columns, set(widths), long)
    if not long:
        lines = [
            *(r"\begin{table}[htbp]", r"\centering", caption, style, _FITTED),
            *(rf"\begin{{tabular}}{{@{{}}{aligns}@{{}}}}", r"\toprule", header, r"\midrule", *rows),
            *(r"\bottomrule", r"\end{tabular}}", r"\par\smallskip"),
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
            *(r"\endfoot", r"\bottomrule", r"\endlastfoot", *rows),
            *(r"\end{longtable}", rf"\noindent\footnotesize {note}\par", r"\endgroup"),
        ]
    return "\n".join([*lines, ""])


def _widths(table: Table, columns: Sequence[Column], long: bool) -> tuple[str, dict[str, float]]:
    """Return the size of the letters, and the characters of a line of those columns whose texts are broken into lines.

    Texts of many words always are. In a `long` table, which can't be scaled, all others are where the smallest letters are
    too large: they share, by their lengths, what numbers leave of the line.
    """
    natural: dict[str, float] = {}
    widths: dict[str, float] = {}
    for column in columns:
        texts = [one_line(cell_text(column, row)) for row in table.rows]
        natural[column.key] = max(map(_width, [*_head_lines(column), *texts]))
        if column.wrap and natural[column.key] > _WRAPPED:
            natural[column.key] = widths[column.key] = _WRAPPED
    needed = sum(natural.values()) + _BETWEEN * (len(columns) - 1)
    size, room = next((each for each in _SIZES if needed <= each[1] or not long), _SIZES[-1])
    if long and needed > room:
        of_texts = {column.key: natural[column.key] for column in columns if not column.format}
        left = room - needed + sum(of_texts.values())
        shares = {key: max(_HEAD, width * left / sum(of_texts.values())) for key, width in of_texts.items()}
        widths |= {key: share for key, share in shares.items() if share < of_texts[key]}
    return size, widths


def _width(text: str) -> float:
    """Return about how many digits of Computer Modern are as wide as a text."""
    return len(text) - 0.4 * len(_NARROW.findall(text)) + 0.6 * len(_WIDE.findall(text))


def _align(column: Column, width: float | None) -> str:
    if width is not None:
        return rf">{{\raggedright\arraybackslash}}p{{{width / 2:.1f}em}}"  # a letter is half as wide as an em
    return "r" if column.format else "l"


def _head_lines(column: Column) -> list[str]:
    return textwrap.wrap(column.label, _HEAD, break_long_words=False) or [""]


def _head(column: Column) -> str:
    lines = r" \\ ".join(map(escape, _head_lines(column)))
    return rf"\shortstack[{'r' if column.format else 'l'}]{{{lines}}}" if r"\\" in lines else lines


def _parts(text: str) -> list[str]:
    """Return the parts between which a text may be broken: at spaces, behind punctuation, within what is longer than _PART."""
    pieces = re.split(rf"(?<=\s)|{_BEHIND}", text)
    return [part for piece in pieces for part in textwrap.wrap(piece, _PART, drop_whitespace=False)]


def _rows(table: Table, columns: Sequence[Column], broken: set[str], long: bool) -> list[str]:
    """Return a line per row. The rows of a model stand together; its name is said once, or in each row where pages may break."""
    models = [row.get("model") for row in table.rows]
    grouped, lines = len(set(models)) < len(models), []
    for index, row in enumerate(table.rows):
        cells = [_latex_cell(column, row, column.key in broken) for column in columns]
        again = grouped and index and models[index] == models[index - 1]
        if grouped and index and not again:
            lines.append(r"\midrule")
        if again and not long and columns[0].key == "model":
            cells[0] = ""
        lines.append(" & ".join(cells) + r" \\")
    return lines


def _latex_cell(column: Column, row: Row, broken: bool) -> str:
    text = one_line(cell_text(column, row))
    value = r"\allowbreak{}".join(map(escape, _parts(text))) if broken else escape(text)
    return rf"\textbf{{{value}}}" if column.is_best(row) else value


def document(tables: Sequence[Table]) -> str:
    """Return a document with all of them, that compiles by itself from any folder."""
    texts = [latex_table(table) for table in tables]
    long = [text for text in texts if r"\begin{longtable}" in text]
    short = [text for text in texts if text not in long]
    return "\n".join(
        [
            *(r"\documentclass[10pt,a4paper]{article}", r"\usepackage[T1]{fontenc}", r"\usepackage[utf8]{inputenc}"),
            PACKAGES,
            r"\usepackage[margin=2cm]{geometry}",
            *(r"\begin{document}", "", *short),
            *([r"\clearpage", r"\appendix", "", *long] if long else []),
            *(r"\end{document}", ""),
        ]
    )


def markdown_table(table: Table) -> str:
    """Return a heading, the table and its notes as GitHub Markdown."""
    columns = table.printed
    rows = [[markdown(column.label) for column in columns], ["---:" if column.format else "---" for column in columns]]
    rows += [[_markdown_cell(column, row) for column in columns] for row in table.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    note = markdown(" ".join(note_sentences(table, columns=columns)))
    return "\n".join([f"## {markdown(table.title)}", "", *lines, "", note, ""])


def _markdown_cell(column: Column, row: Row) -> str:
    text = markdown(one_line(cell_text(column, row)))
    return f"**{text}**" if column.is_best(row) else text


def csv_text(table: Table) -> str:
    """Return all values of the rows as CSV, also those that no column shows. A text that a spreadsheet would take for a formula
    begins with an apostrophe."""

    def plain(value: Any) -> Any:
        return as_cell(format_message(value) if isinstance(value, Message) else value)

    rows = [{as_cell(key): plain(value) for key, value in row.items() if key[0] != "_"} for row in table.rows]
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
