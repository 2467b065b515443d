"""Paper tables as LaTeX (booktabs; longtable where one may break across pages) and as GitHub Markdown.

What is written compiles with pdflatex whatever text a table holds: everything that LaTeX would read as a command is escaped,
and a letter that its fonts do not have is written as its code point.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from tune_prune.analysis.tables.table_data import DAGGER, PaperTable

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
    **{"ß": r"\ss{}", "æ": r"\ae{}", "Æ": r"\AE{}", "ø": r"\o{}", "Ø": r"\O{}", "ł": r"\l{}", "Ł": r"\L{}"},
}
_ACCENTS = {
    **{"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": "."},
    **{"\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0327": "c"},
}


def escape(text: str) -> str:
    """`text` so that LaTeX prints it as it is. White space and control characters become a space."""
    text = re.sub(r"\s+", " ", "".join(" " if unicodedata.category(c) == "Cc" else c for c in text))
    text = re.sub(r"(?<![\w.-])-(?=\.?\d)", "−", text)
    text = re.sub("(?<=-)(?=-)", _JOINER, text)  # two hyphens would be printed as a dash
    return "".join(map(_escaped, unicodedata.normalize("NFC", text)))


def _escaped(character: str) -> str:
    if character in _COMMANDS:
        return _COMMANDS[character]
    if character.isascii():
        return character
    base, *marks = list(unicodedata.normalize("NFD", character))
    if base.isascii() and len(marks) == 1 and marks[0] in _ACCENTS:
        return rf"\{_ACCENTS[marks[0]]}{{{base}}}"
    return f"{{[}}U+{ord(character):04X}]"


# Size commands and the mean width of a character in points, largest first; the text of an A4 page with 2 cm margins is 483
# points wide.
_SIZES = ((r"\small", 4.7), (r"\footnotesize", 4.25), (r"\scriptsize", 3.75), (r"\tiny", 3.0))
_TEXT_WIDTH = 475.0
_COLUMN_SEPARATION = 4.0
_WRAPPED = 0.2  # of the line


def latex_table(table: PaperTable) -> str:
    """The table as an environment to \\input: `table`, or `longtable` where it may break across pages."""
    columns = len(table.aligns)
    aligns = "".join(rf"p{{{_WRAPPED}\linewidth}}" if align == "p" else align for align in table.aligns)
    header = " & ".join(escape(column) for column in table.frame.columns) + r" \\"
    caption = rf"\caption{{{escape(table.title)}}}\label{{{table.label}}}"
    style = rf"{_size(table)}\setlength{{\tabcolsep}}{{{_COLUMN_SEPARATION:g}pt}}"
    if not table.long:
        lines = [
            *(r"\begin{table}[htbp]", r"\centering", caption, style),
            *(rf"\begin{{tabular}}{{@{{}}{aligns}@{{}}}}", r"\toprule", header, r"\midrule"),
            *_rows(table, repeat=False),
            *(r"\bottomrule", r"\end{tabular}", r"\par\smallskip"),
            rf"\begin{{minipage}}{{\linewidth}}\footnotesize {escape(table.note)}\end{{minipage}}",
            r"\end{table}",
        ]
    else:
        lines = [
            *(rf"\begingroup{style}", rf"\begin{{longtable}}{{@{{}}{aligns}@{{}}}}"),
            *(rf"{caption} \\", r"\toprule", header, r"\midrule", r"\endfirsthead"),
            rf"\multicolumn{{{columns}}}{{@{{}}l}}{{Table~\thetable{{}} (continued)}} \\",
            *(r"\toprule", header, r"\midrule", r"\endhead", r"\midrule"),
            rf"\multicolumn{{{columns}}}{{r@{{}}}}{{continued on the next page}} \\",
            *(r"\endfoot", r"\bottomrule", r"\endlastfoot"),
            *_rows(table, repeat=True),
            *(r"\end{longtable}", rf"\noindent\footnotesize {escape(table.note)}\par", r"\endgroup"),
        ]
    return "\n".join([*lines, ""])


def _size(table: PaperTable) -> str:
    """The largest size at which the table is as wide as the page at most; the smallest if none is."""
    frame = table.frame
    texts = [name for name, align in zip(frame.columns, table.aligns, strict=True) if align != "p"]
    characters = sum(max(len(name), frame[name].str.len().max()) for name in texts)
    wrapped = _TEXT_WIDTH * _WRAPPED * (len(frame.columns) - len(texts))
    for command, width in _SIZES:
        if characters * width + wrapped + 2 * _COLUMN_SEPARATION * (len(frame.columns) - 1) <= _TEXT_WIDTH:
            return command
    return _SIZES[-1][0]


def _rows(table: PaperTable, repeat: bool) -> list[str]:
    """A line per row. The rows of a model stand together, under its name (said in each row if `repeat`)."""
    names = list(table.frame.columns)
    models = list(table.frame["Model"]) if "Model" in names else [""] * len(table.frame)
    grouped = names[0] == "Model" and len(set(models)) < len(models)
    lines = []
    for index, row in enumerate(table.frame.itertuples(index=False)):
        cells = [_cell(cell, (index, name) in table.bold) for name, cell in zip(names, row, strict=True)]
        if grouped and index:
            if models[index] != models[index - 1]:
                lines.append(r"\midrule")
            elif not repeat:
                cells[0] = ""
        lines.append(" & ".join(cells) + r" \\")
    return lines


def _cell(text: str, bold: bool) -> str:
    value = escape(text.removesuffix(DAGGER))
    if bold:
        value = rf"\textbf{{{value}}}"
    return value + (r"\rlap{\textsuperscript{\dag}}" if text.endswith(DAGGER) else "")  # out of the way of the digits


def document(tables: Sequence[PaperTable]) -> str:
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


def markdown_table(table: PaperTable) -> str:
    """The table as GitHub Markdown: a heading, the table, its note."""
    rules = ["---:" if align == "r" else "---" for align in table.aligns]
    rows = [[_markdown(column) for column in table.frame.columns], rules]
    for index, row in enumerate(table.frame.itertuples(index=False)):
        cells = [_markdown(cell) for cell in row]
        rows.append(
            [
                f"**{cell}**" if (index, name) in table.bold else cell
                for name, cell in zip(table.frame.columns, cells, strict=True)
            ]
        )
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"## {_markdown(table.title)}", "", *lines, "", _markdown(table.note), ""])


def _markdown(text: str) -> str:
    """`text` as it is; underscores within a word and a < before a number mean nothing to GitHub."""
    return re.sub(r"([\\`*|\[\]~]|(?<!\w)_|_(?!\w)|<(?=[\w/!?]))", r"\\\1", re.sub(r"\s+", " ", text))
