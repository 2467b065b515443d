"""Typed access to an object that was read from JSON: every value is of the type asked for, or its name is in the error."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tune_prune.core.files import number


class Fields:
    """The fields of the JSON object `values`, which stands at `place` in its file ("" for the whole file).

    Every method raises ValueError with the field's full name, its value and what it must be.
    """

    def __init__(self, values: Any, place: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{place or 'it'} is {shown(values)}; it must be an object {{...}}")
        self.values = values
        self.place = place

    def name(self, field: str) -> str:
        return f"{self.place}.{field}" if self.place else field

    def any(self, field: str) -> Any:
        if field not in self.values:
            raise ValueError(f"{self.name(field)} is missing")
        return self.values[field]

    def text(self, field: str) -> str:
        value = self.any(field)
        if not isinstance(value, str) or not value:
            raise self.wrong(field, "a text")
        return value

    def text_or_none(self, field: str) -> str | None:
        return None if self.any(field) is None else self.text(field)

    def whole(self, field: str, low: int = 0) -> int:
        value = self.any(field)
        if type(value) is not int or value < low:  # True is an int, too
            raise self.wrong(field, f"a whole number of at least {low}")
        return value

    def number_or_none(self, field: str) -> float | None:
        try:
            return None if self.any(field) is None else number(self.any(field))
        except ValueError:
            raise self.wrong(field, "a number or null") from None

    def indices(self, field: str, end: int | None = None) -> tuple[int, ...]:
        """Whole numbers in growing order, below `end`."""
        value = self.any(field)
        grows = isinstance(value, (list, tuple)) and all(type(i) is int for i in value)
        grows = grows and all(low < high for low, high in zip((-1, *value), value, strict=False))
        if not grows or (end is not None and value and value[-1] >= end):
            below = "" if end is None else f" below {end}"
            raise self.wrong(field, f"a list of growing whole numbers{below}")
        return tuple(value)

    def date(self, field: str) -> str:
        try:
            datetime.fromisoformat(self.text(field))
        except ValueError:
            raise self.wrong(field, "an ISO date such as 2025-01-31") from None
        return self.values[field]

    def object(self, field: str) -> Fields:
        return Fields(self.any(field), self.name(field))

    def object_or_none(self, field: str) -> Fields | None:
        return None if self.any(field) is None else self.object(field)

    def items(self, field: str) -> list[Fields]:
        """The objects of a list."""
        value = self.any(field)
        if not isinstance(value, (list, tuple)):
            raise self.wrong(field, "a list")
        return [Fields(item, f"{self.name(field)}[{index}]") for index, item in enumerate(value)]

    def numbers(self) -> dict[str, float | None]:
        """All fields, each a number or null."""
        return {field: self.number_or_none(field) for field in self.values}

    def texts(self) -> dict[str, str]:
        """All fields, each a text."""
        return {field: self.text(field) for field in self.values}

    def sentences(self, field: str) -> list[str]:
        """A list of texts; none where the field is missing."""
        values = self.values.get(field, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(field, "a list of texts")
        return list(values)

    def wrong(self, field: str, due: str) -> ValueError:
        return ValueError(f"{self.name(field)} is {shown(self.values[field])}; it must be {due}")


def shown(value: Any) -> str:
    """A value as part of a sentence."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
