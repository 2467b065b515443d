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
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tune_prune.analysis.cost import duration
from tune_prune.analysis.statistics.findings import Message
from tune_prune.analysis.tables.table import Column, Row, Table, missing

LANGUAGES = ("en", "zh")
MISSING = "–"
CATALOGUE = tomllib.loads((Path(__file__).parent / "templates" / "messages.toml").read_text(encoding="utf-8"))
TRANSLATIONS = {"en": {}} | CATALOGUE.pop("translations")
_LISTED = 4  # names of a list that a sentence spells out
_FORMS = {
    "acc": ".4f",  # a fraction without its leading zero, as accuracies were published: .5980, -.7972, 1.0000
    "acc3": ".3f",
    "p": ".3f",  # <.001 below
    "points": ".2f",  # percentage points, or any number
    "ppl": ".2f",  # 3 significant digits where a model is broken and it is huge
    "percent": ".1%",  # a fraction as 85.5%
    "int": ",.0f",  # a whole number with thousands
    "number": ".4g",  # any number, short: a whole one in full, else at most 4 significant digits
    "duration": "",  # seconds as 1m40s
}


def format_message(message: Message, language: str = "en") -> str:
    """The sentence of `message`. KeyError naming a kind, a language or a value that is not there."""
    if message.kind not in CATALOGUE:
        raise KeyError(f"no message of kind {message.kind!r}; add one to templates/messages.toml")
    return _Sentence(language).vformat(CATALOGUE[message.kind][language], (), message.values)


def label(text: str, language: str = "en") -> str:
    """English text of a column or a template in `language`; as it is where the catalogue has no other."""
    return str(TRANSLATIONS[language].get(text, text))


def say(text: str, language: str = "en", **values: Any) -> str:
    """The same of a sentence with `values`."""
    return _Sentence(language).vformat(label(text, language), (), values)


def note_sentences(table: Table, language: str = "en", best: str = "Bold", tied: str = "†") -> list[str]:
    """The notes of a table, and what its marks mean, which a renderer shows as `best` and `tied`."""
    marks = {column.mark(row) for column in table.shown for row in table.rows}
    notes = list(table.notes)
    if "best" in marks:
        notes.append(Message("mark_best", {"mark": best, "meaning": Message(table.best)}))
    if "tied" in marks:
        notes.append(Message("mark_tied", {"mark": tied}))
    return [format_message(note, language) for note in notes]


def cell_text(column: Column, row: Row, language: str = "en") -> str:
    """What a table shows of a row in a column: `value`, `value ± stderr` or `[lower, upper]`; an en dash for a number that is
    not known, nothing for such a text."""
    value = row.get(column.key)
    if isinstance(value, Message):
        return format_message(value, language)
    if missing(value) or not column.format:
        return MISSING if column.format else "" if missing(value) else str(value)
    form = row.get("_format", column.format)
    if column.upper:
        return f"[{printed(value, form)}, {printed(row[column.upper], form)}]"
    return pm(value, row.get(column.stderr), form)


def names(items: Iterable[Any], language: str = "en", most: int = _LISTED) -> str:
    """The first `most` of a list, and how many more there are."""
    texts = [str(item) for item in items]
    if not texts:
        return MISSING
    shown, left = (texts, 0) if len(texts) <= most + 1 else (texts[:most], len(texts) - most)
    if language == "zh":
        return "、".join(shown) + (f" 及另外 {left} 个" if left else "")
    if left:
        return f"{', '.join(shown)} and {left} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


class _Sentence(string.Formatter):
    def __init__(self, language: str) -> None:
        self.language = language

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Message):
            return format_message(value, self.language)
        if format_spec.startswith("list"):
            return names(value, self.language, int(format_spec.removeprefix("list") or _LISTED))
        if isinstance(value, (list, tuple)):
            return label(", ", self.language).join(self.format_field(item, "") for item in value)
        return value if isinstance(value, str) else printed(value, format_spec or "number")


def one_line(text: str, most: int = 120) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printed(value: Any, form: str) -> str:
    """A number by one of _FORMS; an en dash where there is none, and no sign before one that is printed as zero."""
    if missing(value):
        return MISSING
    if form == "duration":
        return duration(value)
    if not math.isfinite(value):
        return f"{value:f}"
    if form == "p" and value < 0.001:
        return "<.001"
    spec = _FORMS[form]
    if form == "ppl" and abs(value) >= 100_000:
        spec = ".3g"
    if form == "number" and value == int(value):
        spec = ",.0f" if abs(value) >= 10_000 else ".0f"
    text = format(value, spec)
    text = text if text.strip("-0.,%") else text.removeprefix("-")
    return re.sub(r"^(-?)0\.", r"\1.", text) if form in ("acc", "acc3", "p") else text


def pm(value: Any, stderr: Any, form: str = "acc") -> str:
    """`value ± stderr`, both by the same one of _FORMS; the value alone where there is no standard error."""
    text = printed(value, form)
    return text if missing(value) or missing(stderr) else f"{text} ± {printed(stderr, form)}"


NUMBERS = {form: partial(printed, form=form) for form in _FORMS}
acc = NUMBERS["acc"]
