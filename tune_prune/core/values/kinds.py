"""What values hyperparameters take, and how files and flags write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol

# What a pruned model's layers may look like (docs/methods.md, "Shapes"); in a configuration `aligned` has its number.
SHAPES = ("free", "aligned", "uniform")
SHAPE = re.compile(r"free|aligned-([1-9][0-9]{0,6})|uniform")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})")


class Kind(Protocol):
    """What values a hyperparameter takes. As text it finishes the sentence "it must be ..."."""

    is_text: bool  # its values are text, so a file may quote them

    def read(self, text: str) -> Any:
        """The value that a file or a flag asks for; ValueError where it is none."""

    def holds(self, value: Any) -> bool:
        """Whether a configuration may have that value."""


@dataclass(frozen=True)
class Whole:
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


class Fraction:
    """A part of a whole: above 0 where it is asked for, also 0 (nothing is removed) in a configuration."""

    is_text = False

    def __str__(self) -> str:
        return "a number above 0 and below 1, e.g. 0.2 for 20% smaller"

    def read(self, text: str) -> float:
        if not 0 < (value := float(text)) < 1:
            raise ValueError(text)
        return value

    def holds(self, value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


class ShapeName:
    """free, uniform or aligned-N; asked for also as aligned, which gets its N by the model's size."""

    is_text = True

    def __str__(self) -> str:
        return "free, uniform, aligned or aligned-N with a whole number N from 1, e.g. aligned-64"

    def read(self, text: str) -> str:
        if text not in SHAPES and not self.holds(text):
            raise ValueError(text)
        return text

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and SHAPE.fullmatch(value) is not None


class MethodName:
    """A module of tune_prune/pruning/methods; which ones there are is not known here."""

    is_text = True

    def __str__(self) -> str:
        return "the name of a pruning method"

    def read(self, text: str) -> str:
        return text

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)
