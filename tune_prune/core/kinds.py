"""Kinds of values that hyperparameters take, and how files and flags write them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

from tune_prune.core.errors import UserError, did_you_mean

# What a pruned model's layers may look like (docs/methods.md, "Shapes"); in a configuration `aligned` has its number.
SHAPES = ("free", "aligned", "uniform")
NORMALIZATIONS = ("none", "kind", "layer")
_SHAPE = re.compile(r"free|(aligned|uniform)(?:-([1-9][0-9]{0,6}))?(?:-tp([2-9]|[1-9][0-9]{1,2}))?")
KNOWN_TEXTS = ("embedded", "wikitext2", "c4")  # calibration texts that need no file
MAX_STEM = 20  # letters of a file's name in the name of a configuration
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})")


class Shape(NamedTuple):
    """The parts of a shape's name, e.g. of aligned-64-tp2."""

    kind: str  # one of SHAPES
    align: int | None = None  # that MLP widths are multiples of; None: of nothing, or not resolved yet
    gpus: int = 1  # over which every layer can be split

    @classmethod
    def read(cls, name: str) -> Shape:
        """Read a shape's name. Raises UserError where it is none."""
        if (match := _SHAPE.fullmatch(name)) is None:
            raise UserError(f"shape is {name!r}; it must be {ShapeName()}")
        kind, align, gpus = match.groups()
        return cls(kind or name, int(align) if align else None, int(gpus or 1))

    def __str__(self) -> str:
        split = f"tp{self.gpus}" if self.gpus > 1 else None
        return "-".join(str(part) for part in (self.kind, self.align, split) if part)


class Kind(Protocol):
    """A kind of values. As text it finishes the sentence "it must be ..."."""

    is_text: bool  # its values are text, so a file may quote them

    def read(self, text: str) -> Any:
        """Return the value that a file or a flag asks for; ValueError where it is none. As here: the text itself."""
        if not self.holds(text):
            raise ValueError(text)
        return text

    def holds(self, value: Any) -> bool:
        """Say whether a configuration may have that value."""

    def of(self, value: Any) -> Any:
        """The value that a Python caller asks for; ValueError where it is none."""
        if self.is_text and isinstance(value, str):
            return self.read(value)
        if not self.holds(value):
            raise ValueError(value)
        return value

    def short(self, value: Any) -> str:
        """Return the value in names, also of files."""
        return str(value)


@dataclass(frozen=True)
class Whole(Kind):
    """Whole numbers within bounds, both included."""

    low: int
    high: int
    is_text = False

    def __str__(self) -> str:
        return f"a whole number from {self.low} to {self.high}, in plain decimal digits"

    def read(self, text: str) -> int:
        # Not what else int or YAML take: 1_000, 010 (eight), 0x10, 1:30 (ninety).
        if not _DECIMAL.fullmatch(text) or not self.holds(int(text)):
            raise ValueError(text)
        return int(text)

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclass(frozen=True)
class Real(Kind):
    """Numbers within bounds, both included, or the lower one excluded (`above`); `words` names them."""

    low: float
    high: float
    words: str
    above: bool = False
    is_text = False

    def __str__(self) -> str:
        return self.words

    def read(self, text: str) -> float:
        if "_" in text:  # Python reads 0.1_5, which is a slip of the finger
            raise ValueError(text)
        return float(self.of(float(text)))

    def holds(self, value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and self.low <= value <= self.high and not (self.above and value == self.low)

    def short(self, value: float) -> str:
        return f"{value:g}"


def share(high: float) -> Real:
    """Return the numbers above 0, at most `high`."""
    return Real(0.0, high, f"a number above 0, at most {high:g}", above=True)


class Ratio(Real):
    """A part of a whole: above 0 where it is asked for, also 0 (nothing is removed) in a configuration."""

    def of(self, value: Any) -> Any:
        if not value:
            raise ValueError(value)
        return super().of(value)

    def short(self, value: float) -> str:
        return str(value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of several names."""

    names: tuple[str, ...]
    is_text = True

    def __str__(self) -> str:
        return f"{', '.join(self.names[:-1])} or {self.names[-1]}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.names

    def unknown(self, value: object) -> str:
        """Say in a clause that a value is none of them."""
        return f"unknown value {value!r}; {did_you_mean(str(value), self.names)}"


class ShapeName(Kind):
    """The name of a Shape. `aligned` may be asked for without its N, which it gets by the model's size."""

    is_text = True

    def __str__(self) -> str:
        return (
            "free, aligned or uniform, the last two also with a whole number N from 1, e.g. aligned-64, and of GPUs, "
            "e.g. aligned-64-tp2"
        )

    def read(self, text: str) -> str:
        if _SHAPE.fullmatch(text) is None:
            raise ValueError(text)
        return text

    def holds(self, value: Any) -> bool:
        match = _SHAPE.fullmatch(value) if isinstance(value, str) else None
        return match is not None and (match[1] != "aligned" or match[2] is not None)


class MethodName(Kind):
    """A module of tune_prune/pruning/methods; which ones there are is not known here."""

    is_text = True

    def __str__(self) -> str:
        return "the name of a pruning method"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)


class TextNames(Kind):
    """Calibration texts: a known name or a text file, or a mixture of several."""

    is_text = True

    def __str__(self) -> str:
        return f"{', '.join(KNOWN_TEXTS)}, a text file, or several of them with a plus sign between them, e.g. wikitext2+c4"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and value.strip() == value != "" and value.isprintable()

    def short(self, value: str) -> str:
        return "+".join(re.sub(r"[^\w.]", "_", PurePath(part).stem)[:MAX_STEM] for part in texts_of(value))


def texts_of(source: str) -> list[str]:
    """Return the texts of a mixture, known names or absolute paths without a plus sign; of any other source itself alone."""
    parts = source.split("+")
    return parts if all(part in KNOWN_TEXTS or part.startswith("/") for part in parts) else [source]


def plain(value: Any) -> Any:
    """Return Python's own value for one of numpy, a list for an array, and the text of a path; anything else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "tolist") else value
