"""A table for a paper: its numbers in full precision, and how they are printed.

A printed cell says what one number is and, where it is known, its standard error (`.5980 ± .0050`). What is missing is an
en dash. † marks a value of a configuration that cannot be told from the most accurate one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics.findings import Findings, Trend

KNOBS = {
    "taylor_seq_len": "the calibration sequence length",
    "taylor_num_samples": "the number of calibration samples",
}
DAGGER = "†"
MARK = f"{DAGGER} cannot be told from the model's most accurate configuration (95%, corrected for all of them)."

Form = Callable[[Any], str]


@dataclass(frozen=True)
class PaperTable:
    """One table. `frame` is what is printed (texts only), `numbers` what its CSV file holds."""

    name: str  # file name without suffix
    title: str
    note: str  # what the columns hold and what the marks mean, in sentences
    frame: pd.DataFrame
    numbers: pd.DataFrame
    aligns: str  # per column of `frame`: "l" text, "r" number, "p" text that is wrapped
    bold: frozenset[tuple[int, str]] = frozenset()  # (row, column) of the best values
    long: bool = False  # may break across pages

    @property
    def label(self) -> str:
        """What \\ref{...} takes."""
        return f"tab:{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Column:
    """How columns of the numbers are printed as one."""

    header: str
    name: str  # column of the numbers
    form: Form = str
    stderr: str | None = None  # column of the numbers that stands behind ±, where it is known
    align: str = "r"
    bold: str | None = None  # boolean column of the numbers
    dagger: str | None = None  # likewise
    optional: bool = False  # left out where no row has a value


MODEL = Column("Model", "model", align="l")


def paper_table(
    name: str, title: str, note: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], long: bool = False
) -> PaperTable:
    """The table of `rows`, each a row of its numbers, of which there must be one at least."""
    numbers = pd.DataFrame(rows)
    columns = [column for column in columns if not (column.optional and all(map(_blank, numbers[column.name])))]
    frame = pd.DataFrame({column.header: [_cell(column, row) for row in rows] for column in columns}, dtype="str")
    bold = {
        (index, column.header)
        for column in columns
        if column.bold is not None
        for index, row in enumerate(rows)
        if row[column.bold]
    }
    return PaperTable(name, title, note, frame, numbers, "".join(c.align for c in columns), frozenset(bold), long)


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    text = with_stderr(row[column.name], None if column.stderr is None else row[column.stderr], column.form)
    return text + (DAGGER if column.dagger is not None and row[column.dagger] else "")


def with_stderr(value: Any, stderr: Any, form: Form) -> str:
    """`value ± stderr`; the value alone where its standard error is not known, an en dash where it is not known itself."""
    if _blank(value):
        return messages.MISSING
    return form(value) if _blank(stderr) else f"{form(value)} ± {form(stderr)}"


def _blank(value: Any) -> bool:
    return messages.missing(value) or value == ""


def short_accuracy(value: Any) -> str:
    """A fraction with 3 digits, where four are too wide: .598."""
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def one_line(value: Any, most: int = 120) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def ratio(value: Any, whole: Any) -> float | None:
    """value / whole; None where either is not known."""
    return None if messages.missing(value) or messages.missing(whole) or whole <= 0 else float(value / whole)


def accuracy_note(findings: Findings) -> str:
    """What accuracies and their standard errors are."""
    kinds = {found.model.kind for found in findings.models.values()}
    basis = {"experiment": "from the outcome of each item", "published": "binomial, from the sizes of the tasks"}
    return f"Accuracy: mean over the tasks ± standard error ({'; '.join(basis[kind] for kind in sorted(kinds))})."


def p_words(p: float) -> str:
    """`p = .032`, `p < .001`; nothing where there is none."""
    return (
        ""
        if messages.missing(p)
        else f"p {messages.p_value(p).replace('<', '< ') if p < 0.001 else f'= {messages.p_value(p)}'}"
    )


def trend_words(trend: Trend) -> str:
    """What a trend says, with the knob in words, as a clause."""
    remark = messages.trend_remark(trend)
    return messages.format_message(replace(remark, values={**remark.values, "knob": KNOBS[trend.knob]}))
