"""Plain data from a file as typed objects: pydantic checks every field; the first that is wrong is named in a clause."""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from tune_prune.core.files import number

T = TypeVar("T")


def _number(value: Any) -> float | int:
    try:
        return number(value)
    except ValueError:
        raise PydanticCustomError("number", "Input should be a number") from None


def _indices(value: Any) -> tuple[int, ...]:
    grows = isinstance(value, (list, tuple)) and all(type(index) is int for index in value)
    if not grows or not all(low < high for low, high in zip((-1, *value), value, strict=False)):
        raise PydanticCustomError("indices", "Input should be a list of growing whole numbers")
    return tuple(value)


Number = Annotated[float, PlainValidator(_number)]  # also "nan", "inf", "-inf", as `to_json` writes them
Amount = Annotated[Number, Field(ge=0)]
Indices = Annotated[tuple[int, ...], PlainValidator(_indices)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


def validated(kind: type[T], values: Any) -> T:
    """Return `values`, plain data or the bytes of its JSON text, as a `kind`: a dataclass or TypedDict. Nothing is converted, and
    unknown fields are left out. Raises ValueError with the field's full name, its value and what it must be."""
    text = values if isinstance(values, bytes) else json.dumps(values, default=lambda value: value.item())
    try:
        adapter: TypeAdapter[T] = _adapter(kind)  # type: ignore[arg-type]  # a type is hashable
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(_problem(error)) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "value_error":  # of a check of ours, which names the field within its object
        text = str(first["ctx"]["error"])
        return f"{place}.{text}" if place else text
    if first["type"] == "missing":
        return f"{place} is missing"
    an_object = first["type"].startswith(("dataclass", "dict", "typed_dict"))
    due = "an object {...}" if an_object else first["msg"].removeprefix("Input should be ")
    return f"{place or 'it'} is {' '.join(repr(first['input']).split()):.60}; it must be {due}"
