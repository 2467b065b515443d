"""Numbers and messages in words, in every language of the reports; templates/messages.toml is their catalogue.

A value is formatted where its sentence is written, by the part of the placeholder behind the colon: `{naive:acc}` is
`.5980`, `{points:points}` is `1.25`, `{others:list}` is `a, b and 2 more` (`{others:list8}` spells out 8). Without one, a list is
joined with commas, a number is printed short and a message that is a value of another is put into the same language.
"""

from __future__ import annotations

import math
import re
import string
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from tune_prune.analysis.cost import duration
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.tables.table import Column, Row, Table, missing
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.measures import wilson_interval

LANGUAGES = ("en", "zh")
MISSING = "–"
CATALOGUE = tomllib.loads((Path(__file__).parent / "templates" / "messages.toml").read_text(encoding="utf-8"))
TRANSLATIONS = {"en": {}} | CATALOGUE.pop("translations")
WORDS = {name: CATALOGUE.pop(name) for name in ("methods", "task_references", "captions")}  # in English alone
_LISTED = 4  # names of a list that a sentence spells out
_ROWS = ("method", "name", "config", "setting", "kind")
_WORDS = {"dense": "original", "refit": "repair"}
_IN_PERCENT: ContextVar[bool] = ContextVar("accuracies in percent", default=False)
_ACCURACIES = ("acc", "acc3")
_FORMS = {
    "acc": ".4f",  # a fraction without its leading zero, as accuracies were published: .5980, -.7972, 1.0000
    "acc3": ".3f",
    "r": ".4f",  # a coefficient of correlation
    "p": ".3f",  # <.001 below
    "nats": ".3f",
    "points": ".2f",  # percentage points, or any number
    "ppl": ".2f",  # 3 significant digits where a model is broken and it is huge
    "percent": ".1%",  # a fraction as 85.5%
    "int": ",.0f",  # a whole number with thousands
    "number": ".4g",  # any number, short: a whole one in full, else at most 4 significant digits
    "duration": "",  # seconds as 1m40s
}


def format_message(message: Message, language: str = "en") -> str:
    """Return the sentence of `message`. KeyError naming a kind, a language or a value that is not there."""
    if message.kind not in CATALOGUE:
        raise KeyError(f"no message of kind {message.kind!r}; add one to templates/messages.toml")
    return _Sentence(language).vformat(CATALOGUE[message.kind][language], (), message.values)


def label(text: str, language: str = "en") -> str:
    """English text of a column or a template in `language`; as it is where the catalogue has no other."""
    return str(TRANSLATIONS[language].get(text, text))


def translate(text: str, language: str = "en", **values: Any) -> str:
    """Return a sentence with placeholders in `language`, filled with `values`; one without is for `label`."""
    return _Sentence(language).vformat(label(text, language), (), values)


def note_sentences(
    table: Table, language: str = "en", best: str = "Bold", columns: Sequence[Column] | None = None
) -> list[str]:
    """Return the notes of a table, and what the marks in `columns` (None: all shown) mean; a renderer shows that of the best as
    `best`."""
    cells = [(column, row) for column in (table.shown if columns is None else columns) for row in table.rows]
    marks = {
        "best": Column.is_best,
        "at_chance": Column.at_chance,
        "one_draw": Column.of_one_draw,
        "interval": _interval,
        "percent": lambda column, row: in_percent() and row.get("_format", column.format) in _ACCURACIES,
    }
    meaning = {"mark": best, "meaning": Message(table.best)}  # of the best
    shown = [name for name, marked in marks.items() if any(marked(column, row) for column, row in cells)]
    notes = [*table.notes, *(Message(f"mark_{name}", meaning) for name in shown)]
    return [format_message(note, language) for note in notes]


@contextmanager
def accuracies_in_percent(percent: bool = True) -> Iterator[None]:
    """Inside, accuracies are printed in percent: 59.80 instead of .5980."""
    token = _IN_PERCENT.set(percent)
    try:
        yield
    finally:
        _IN_PERCENT.reset(token)


def in_percent() -> bool:
    """Return whether accuracies are printed in percent."""
    return _IN_PERCENT.get()


def cell_text(column: Column, row: Row, language: str = "en") -> str:
    """Return what a table shows of a row in a column: `value`, `value ± stderr` or `[lower, upper]`, with a dagger behind an
    accuracy that is not distinguishable from guessing, a double one behind one of a single draw; an en dash for a number that is
    not known, nothing for such a text."""
    value = row.get(column.key)
    if isinstance(value, Message):
        return format_message(value, language)
    if missing(value) or not column.format:
        return MISSING if column.format else "" if missing(value) else _text(column.key, str(value), language)
    form = row.get("_format", column.format)
    if column.upper:
        return f"[{printed(value, form)}, {printed(row[column.upper], form)}]"
    text = pm(value, row.get(column.stderr), form)
    if (interval := _interval(column, row)) is not None:
        text += f" [{printed(interval[0], form)}, {printed(interval[1], form)}]"
    return text + "†" * column.at_chance(row) + "‡" * column.of_one_draw(row)


def _text(key: str, value: str, language: str) -> str:
    """Return a text of a row; of a hyperparameter as it stands in names: a calibration text by its file's name. Of some rows that
    are no configuration files keep an older word (_WORDS)."""
    if key in _ROWS and value in _WORDS:
        return label(_WORDS[value], language)
    return HYPERPARAMETERS[key].kind.short(value) if value and key in HYPERPARAMETERS else value


def _interval(column: Column, row: Row) -> tuple[float, float] | None:
    """Wilson's 95% interval of an accuracy of 0 or 1, which says more than a standard error there."""
    value, items = row.get(column.key), row.get(column.items)
    if column.format not in _ACCURACIES or items is None or missing(items) or missing(value) or value not in (0, 1):
        return None
    return wilson_interval(value, items)


def names(items: Iterable[Any], language: str = "en", most: int = _LISTED) -> str:
    """Return the first `most` of a list, and how many more there are."""
    texts = [str(item) for item in items]
    if not texts:
        return MISSING
    shown = texts if len(texts) <= most + 1 else texts[:most]
    left = len(texts) - len(shown)
    if language == "zh":
        return "、".join(shown) + (f" 及另外 {left} 个" if left else "")
    *first, last = [*shown, f"{left} more"] if left else shown
    return f"{', '.join(first)} and {last}" if first else last


class _Sentence(string.Formatter):
    def __init__(self, language: str) -> None:
        self.language = language

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Message):
            return format_message(value, self.language)
        if format_spec.startswith("list"):
            texts = [self.format_field(one, "") if isinstance(one, Message) else one for one in value]
            return names(texts, self.language, int(format_spec.removeprefix("list") or _LISTED))
        if isinstance(value, (list, tuple)):
            return label(", ", self.language).join(self.format_field(item, "") for item in value)
        return value if isinstance(value, str) else printed(value, format_spec or "number")


def one_line(text: str, most: int = 120) -> str:
    """Return the beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printed(value: Any, form: str) -> str:
    """Return a number by one of _FORMS; an en dash where there is none, and no sign before one that is printed as zero."""
    if missing(value):
        return MISSING
    if form == "duration":
        return duration(value)
    if not math.isfinite(value):
        return f"{value:f}"
    if form == "p" and value < 0.001:
        return "<.001"
    spec = _FORMS[form]
    if form in _ACCURACIES and in_percent():
        return format(100 * value, ".2f" if form == "acc" else ".1f")
    if form == "ppl" and abs(value) >= 100_000:
        spec = ".3g"
    if form == "number" and value == int(value):
        spec = ",.0f" if abs(value) >= 10_000 else ".0f"
    text = format(value, spec)
    text = text if text.strip("-0.,%") else text.removeprefix("-")
    return re.sub(r"^(-?)0\.", r"\1.", text) if form in ("acc", "acc3", "r", "p") else text


def pm(value: Any, stderr: Any, form: str = "acc") -> str:
    """`value ± stderr`, both by the same one of _FORMS; the value alone where there is no standard error, as of an accuracy of 0
    or 1."""
    text = printed(value, form)
    alone = missing(value) or missing(stderr) or (form in _ACCURACIES and value in (0, 1))
    return text if alone else f"{text} ± {printed(stderr, form)}"


NUMBERS = {form: partial(printed, form=form) for form in _FORMS}
acc = NUMBERS["acc"]
