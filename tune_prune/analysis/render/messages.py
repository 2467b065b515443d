"""Numbers and messages in words, in every language of the reports; templates/messages.toml is their catalogue.

A value is formatted where its sentence is written, by the part of the placeholder behind the colon: `{naive:acc}` is
`.5980`, `{points:points}` is `1.25`, `{count:row}` is `1 row` or `3 rows`, `{others:list}` is `a, b and 2 more` (`{others:list8}`
spells out 8), `{side:word}` is looked up. Without one, a list is joined with commas, a number is printed short and a message
that is a value of another is put into the same language.
"""

from __future__ import annotations

import math
import string
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tune_prune.analysis.cost import duration
from tune_prune.analysis.statistics.findings import Message
from tune_prune.analysis.tables.table import Column, Row, Table, missing

LANGUAGES = ("en", "zh")
MISSING = "–"
CATALOGUE = tomllib.loads((Path(__file__).parent / "templates" / "messages.toml").read_text(encoding="utf-8"))
_WORDS, _LABELS = CATALOGUE.pop("words"), CATALOGUE.pop("labels")
_LISTED = 4  # names of a list that a sentence spells out
_COMMA = {"en": ", ", "zh": "，"}


def format_message(message: Message, language: str = "en") -> str:
    """The sentence of `message`. KeyError naming a kind, a language or a value that is not there."""
    if message.kind not in CATALOGUE:
        raise KeyError(f"no message of kind {message.kind!r}; add one to templates/messages.toml")
    return _Sentence(language).vformat(CATALOGUE[message.kind][language], (), message.values)


def label(text: str, language: str = "en") -> str:
    """The label of a column or an entry; as it is where the catalogue has no other."""
    return str(_LABELS.get(language, {}).get(text, text))


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
        return f"[{NUMBERS[form](value)}, {NUMBERS[form](row[column.upper])}]"
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
        if format_spec == "word":
            return str(_WORDS[value][self.language])
        if format_spec in NUMBERS:
            return NUMBERS[format_spec](value)
        if format_spec:
            noun = _WORDS[format_spec][self.language]
            return f"{integer(value)} {noun}{'s' if self.language == 'en' and value != 1 else ''}"
        if isinstance(value, (list, tuple)):
            return _COMMA[self.language].join(self.format_field(item, "") for item in value)
        return str(value) if isinstance(value, (str, bool)) else number(value)


def one_line(text: str, most: int = 120) -> str:
    """The beginning of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _finite(value: Any, form: str, scale: float = 1.0) -> str:
    """`value` by `form`; an en dash where there is none, and no sign before a number that is printed as zero."""
    if missing(value):
        return MISSING
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    text = form.format(scale * value)
    return text.removeprefix("-") if not text.strip("-0.,") else text


def acc(value: Any, digits: int = 4) -> str:
    """A fraction without its leading zero, as accuracies were published: .5980, -.7972, 1.0000."""
    text = _finite(value, f"{{:.{digits}f}}")
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def points(value: Any) -> str:
    """Percentage points, or any number, with 2 digits."""
    return _finite(value, "{:.2f}")


def percent(value: Any) -> str:
    """A fraction as a percentage with 1 digit: 85.5%."""
    text = _finite(value, "{:.1f}", 100.0)
    return text if text == MISSING else f"{text}%"


def integer(value: Any) -> str:
    """A whole number with thousands."""
    return _finite(value, "{:,.0f}")


def number(value: Any) -> str:
    """Any number, short: at most 4 significant digits where it has a fraction."""
    if not missing(value) and math.isfinite(value) and value == int(value):
        return integer(value) if abs(value) >= 10_000 else str(int(value))
    return _finite(value, "{:.4g}")


def perplexity(value: Any) -> str:
    """2 digits; 3 significant ones where a model is broken and it is huge."""
    return _finite(value, "{:.2f}" if missing(value) or abs(value) < 100_000 else "{:.3g}")


def p_value(value: Any) -> str:
    """3 digits; <.001 below."""
    if missing(value):
        return MISSING
    return "<.001" if value < 0.001 else _finite(value, "{:.3f}").replace("0.", ".", 1)


def pm(value: Any, stderr: Any, form: str = "acc") -> str:
    """`value ± stderr`, both by the same one of NUMBERS; the value alone where there is no standard error."""
    text = NUMBERS[form](value)
    return text if missing(value) or missing(stderr) else f"{text} ± {NUMBERS[form](stderr)}"


def _duration(value: Any) -> str:
    return MISSING if missing(value) else duration(value)


NUMBERS = {
    "acc": acc,
    "acc3": lambda value: acc(value, 3),
    "duration": _duration,
    "points": points,
    "percent": percent,
    "int": integer,
    "number": number,
    "ppl": perplexity,
    "p": p_value,
}
