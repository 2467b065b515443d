"""Tables as LaTeX: booktabs, array, and graphicx, by which one is never wider than a line; longtable where one may break across
pages.

What is written compiles with pdflatex (of 2018 or later, with T1 fonts) whatever text a table holds: everything that LaTeX
would read as a command is escaped, and a letter that its fonts do not have is written as its code point.
"""

from __future__ import annotations

import itertools
import math
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tune_prune.analysis.render.messages import cell_text, note_sentences, one_line
from tune_prune.analysis.tables.table import Column, Row, Table

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


# Size commands and the width of a digit in points, largest first; the text of an A4 page with 2 cm margins is 483 points wide.
_SIZES = ((r"\small", 4.63), (r"\footnotesize", 4.25), (r"\scriptsize", 3.98), (r"\tiny", 3.4))
_SMALLEST_WHOLE = 3  # of these sizes: texts are broken into lines before the next smaller one is taken
_TEXT_WIDTH = 475.0
_COLUMN_SEPARATION = 4.0
_WRAPPED = 0.2  # of the line, at most
_HEAD, _NARROW_HEAD = 12, 8  # characters of a line of a head, where its words are no longer
_PART = 14  # characters of what cannot be broken
_MOST_LINES = 55  # of a table that stands on one page
_BEHIND = r"(?<=\w[/_@:-])(?=\w)|(?<=\w[.])(?=[^\W\d])"  # where a name may be broken, beside its spaces
# Of Computer Modern, in digits: of other characters 1.05
_WIDTHS = dict.fromkeys("fijlt.,:;'|()[]", 0.6) | dict.fromkeys(" -", 0.67) | dict.fromkeys("mwMW%@±−", 1.65)
_BOLD = 1.15  # times as wide


@dataclass(frozen=True)
class _Fit:
    """How a table is set so that it is no wider than a page."""

    size: str  # a command
    digit: float  # its width in points
    columns: Sequence[Column]
    spanned: bool = False  # without the column of models, whose names stand in lines of their own
    head: int = _HEAD  # characters of a line of a head
    widths: Mapping[str, float] = field(default_factory=dict)  # points, of columns whose texts are broken into lines


def latex_table(table: Table) -> str:
    """The table as an environment to \\input: `table`, or `longtable` where it may break across pages."""
    fit = _fit(table)
    long = table.long or sum(_row_lines(row, fit) for row in table.rows) > _MOST_LINES
    aligns = "".join(_align(column, fit) for column in fit.columns)
    header = " & ".join(_head(column, fit) for column in fit.columns) + r" \\"
    caption = rf"\caption{{{escape(table.title)}}}\label{{tab:{table.key.replace('_', '-')}}}"
    style = rf"{fit.size}\setlength{{\tabcolsep}}{{{_COLUMN_SEPARATION:g}pt}}"
    note = escape(" ".join(note_sentences(table, columns=table.printed)))
    if not long:
        lines = [
            *(r"\begin{table}[htbp]", r"\centering", caption, style),
            _FITTED,
            *(rf"\begin{{tabular}}{{@{{}}{aligns}@{{}}}}", r"\toprule", header, r"\midrule"),
            *_rows(table, fit, long),
            *(r"\bottomrule", r"\end{tabular}}", r"\par\smallskip"),
            rf"\begin{{minipage}}{{\linewidth}}\footnotesize {note}\end{{minipage}}",
            r"\end{table}",
        ]
    else:
        lines = [
            *(rf"\begingroup{style}", rf"\begin{{longtable}}{{@{{}}{aligns}@{{}}}}"),
            *(rf"{caption} \\", r"\toprule", header, r"\midrule", r"\endfirsthead"),
            rf"\multicolumn{{{len(fit.columns)}}}{{@{{}}l}}{{Table~\thetable{{}} (continued)}} \\",
            *(r"\toprule", header, r"\midrule", r"\endhead", r"\midrule"),
            rf"\multicolumn{{{len(fit.columns)}}}{{r@{{}}}}{{continued on the next page}} \\",
            *(r"\endfoot", r"\bottomrule", r"\endlastfoot"),
            *_rows(table, fit, long),
            *(r"\end{longtable}", rf"\noindent\footnotesize {note}\par", r"\endgroup"),
        ]
    return "\n".join([*lines, ""])


def _row_lines(row: Row, fit: _Fit) -> int:
    """How many lines a row takes, in about."""
    texts = {c.key: fit.digit * _width(one_line(cell_text(c, row))) for c in fit.columns if c.key in fit.widths}
    return max([1, *(math.ceil(1.1 * width / fit.widths[key]) for key, width in texts.items())])


def _align(column: Column, fit: _Fit) -> str:
    if column.key in fit.widths:
        return rf">{{\raggedright\arraybackslash}}p{{{fit.widths[column.key]:.0f}pt}}"
    return "r" if column.format else "l"


def _head(column: Column, fit: _Fit) -> str:
    first, *others = map(escape, _lines(column, fit.head))
    side = "r" if column.format else "l"
    return rf"\shortstack[{side}]{{" + r" \\ ".join([first, *others]) + "}" if others else first


def _lines(column: Column, most: int) -> list[str]:
    """The lines of a column's head, of at most so many characters where it can be broken."""
    lines = [""]
    for part in _parts(column.label):
        if lines[-1] and len(lines[-1] + part.rstrip()) > most:
            lines.append("")
        lines[-1] += part
    return [line.strip() for line in lines]


def _parts(text: str) -> list[str]:
    """Between which a text may be broken: at spaces, behind punctuation, and within what is longer than _PART."""
    pieces = re.split(rf"(?<=\s)|{_BEHIND}", text)
    return [part for piece in pieces for part in textwrap.wrap(piece, _PART, drop_whitespace=False)]


def _width(text: str, bold: bool = False) -> float:
    """Of a text on one line, in digits."""
    widths = (1.4 if c.isupper() and c not in _WIDTHS else 1 if c.isdigit() else _WIDTHS.get(c, 1.05) for c in text)
    return sum(widths) * (_BOLD if bold else 1)


def _fit(table: Table) -> _Fit:
    """The largest size at which the table is as wide as the page at most. Before one that is smaller than all but
    _SMALLEST_WHOLE is taken, models get lines of their own, and texts are broken into lines. One that is too wide in any size
    is left to be scaled."""
    first, *others = columns = table.printed
    without = others if first.key == "model" and _grouped(table) else columns
    ways = [(columns, False), (without, False), (without, True)]
    for sizes in (_SIZES[:_SMALLEST_WHOLE], _SIZES[_SMALLEST_WHOLE:]):
        for (shown, broken), (size, digit) in itertools.product(ways, sizes):
            if (fit := _set(table, shown, size, digit, broken)) is not None:
                return fit
    size, digit = _SIZES[-1]
    least = {c.key: digit * _least(table, c, _NARROW_HEAD) for c in without if not c.format}
    return _Fit(size, digit, without, without is others, _NARROW_HEAD, least)


def _grouped(table: Table) -> bool:
    """Whether several rows are of one model."""
    models = [row.get("model") for row in table.rows]
    return len(set(models)) < len(models)


def _set(table: Table, columns: Sequence[Column], size: str, digit: float, broken: bool) -> _Fit | None:
    """The table in these columns and in a size whose digits have that width, if it fits."""
    head = _NARROW_HEAD if broken else _HEAD
    room = _TEXT_WIDTH - 2 * _COLUMN_SEPARATION * (len(columns) - 1)
    natural: dict[str, float] = {}  # of the texts
    widths: dict[str, float] = {}
    least = {column.key: digit * _least(table, column, head) for column in columns if not column.format}
    for column in columns:
        width = digit * max(*map(_width, _lines(column, head)), *(_width(*text) for text in _texts(table, column)))
        if column.format:
            room -= width
        elif column.wrap and width > (most := max(_WRAPPED * _TEXT_WIDTH, least[column.key])):
            natural[column.key] = widths[column.key] = most
        else:
            natural[column.key] = width
    if broken:
        widths |= _shared(room, natural)
    if sum((natural | widths).values()) > room or any(width < least[key] for key, width in widths.items()):
        return None
    return _Fit(size, digit, columns, len(columns) < len(table.printed), head, widths)


def _least(table: Table, column: Column, head: int) -> float:
    """How wide a column of texts must be, in digits."""
    parts = [_width(part.strip(), bold) for text, bold in _texts(table, column) for part in _parts(text)]
    return max(*map(_width, _lines(column, head)), *parts)


def _texts(table: Table, column: Column) -> list[tuple[str, bool]]:
    """The text of each row, and whether it is bold."""
    return [(one_line(cell_text(column, row)), column.is_best(row)) for row in table.rows]


def _shared(width: float, natural: Mapping[str, float]) -> dict[str, float]:
    """`width` given to columns as each would have it by nature, from the narrowest on; what is left is shared by those for
    which it is too little, which alone are named."""
    shared, keys = {}, sorted(natural, key=lambda key: natural[key])
    for index, key in enumerate(keys):
        share = width / (len(keys) - index)
        if natural[key] > share:
            shared[key] = share
        width -= min(natural[key], share)
    return shared


def _rows(table: Table, fit: _Fit, long: bool) -> list[str]:
    """A line per row. The rows of a model stand together, under its name, which where pages may break is said in each row that
    has room for it."""
    models, grouped = [row.get("model") for row in table.rows], _grouped(table)
    lines = []
    for index, row in enumerate(table.rows):
        cells = [_cell(column, row, column.key in fit.widths) for column in fit.columns]
        if grouped and index and models[index] != models[index - 1]:
            lines.append(r"\midrule")
        elif grouped and index and not long and fit.columns[0].key == "model":
            cells[0] = ""
        if fit.spanned and (not index or models[index] != models[index - 1]):
            lines.append(rf"\multicolumn{{{len(cells)}}}{{@{{}}l}}{{\textit{{{escape(str(row['model']))}}}}} \\*")
        lines.append(" & ".join(cells) + r" \\")
    return lines


def _cell(column: Column, row: Row, broken: bool) -> str:
    text = one_line(cell_text(column, row))
    value = r"\allowbreak{}".join(map(escape, _parts(text))) if broken else escape(text)
    return rf"\textbf{{{value}}}" if column.is_best(row) else value


def document(tables: Sequence[Table]) -> str:
    """A document with all of them, that compiles by itself from any folder."""
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
