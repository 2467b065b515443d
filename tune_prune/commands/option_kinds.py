"""Kinds of values of options, beside the kinds that hyperparameters have (core/kinds.py).

`read` makes a value of a command line's text, `of` checks one that a Python caller gives. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_prune.core import machine
from tune_prune.core.config import check_label
from tune_prune.core.errors import UserError
from tune_prune.core.kinds import Choice, Kind, plain
from tune_prune.core.store import Location, is_address, location


class Wrong(argparse.ArgumentTypeError):
    """A clause on a wrong value, as the rest of a sentence that begins with the option; argparse understands it, too."""


class _Named(Kind):
    """A kind whose values are named by the same `words` always."""

    words: str

    def __str__(self) -> str:
        return self.words


class _Written(_Named):
    """Values that Python callers write as text, too."""

    is_text = True

    def holds(self, value: Any) -> bool:
        return False


class Switch(_Named):
    """True or False; on a command line a flag without a value."""

    is_text = False
    words = "True or False"

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and value in (0, 1)

    def of(self, value: Any) -> bool:
        return bool(super().of(value))


class Text(_Written):
    """A name, a path or an address."""

    words = "a text or a path"

    def read(self, text: str) -> str:
        if not text.strip():
            raise Wrong("is empty; give a value or leave the flag out")
        if text.startswith("~") and os.path.expanduser(text) == text:
            raise Wrong(f"{text!r} has no such home folder; write the whole path")
        return text


class TaskName(_Named):
    """The name of a benchmark; which ones there are is not known here."""

    is_text = True
    words = "the name of a task"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value) is not None


class Repository(_Named):
    """A name of a model on the Hugging Face hub, by the rules of huggingface_hub.utils.validate_repo_id."""

    is_text = True
    words = "a name on the hub, such as YOU/smaller-model"

    def holds(self, value: Any) -> bool:
        name = r"\w([\w.-]{0,94}\w)?"
        fits = isinstance(value, str) and re.fullmatch(f"{name}/{name}", value, re.ASCII) is not None
        return fits and not re.search(r"--|\.\.|\.git$", value)


class Size(_Named):
    """An amount of memory in bytes; as text with a unit."""

    is_text = True
    words = f"a whole number of bytes from {2**20} to {2**50}, or a text such as 20GiB"

    def read(self, text: str) -> int:
        try:
            return machine.parse_size(text)
        except ValueError as error:
            raise Wrong(str(error)) from None

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 2**20 <= value <= 2**50


@dataclass(frozen=True)
class Amount(_Written):
    """CPUs or GPUs of a trial: a whole number or 1/k, or auto, which is None. `name`: of the option."""

    name: str
    allow_zero: bool

    words = "a number or auto"

    def read(self, text: str) -> float | None:
        return self._parsed(text, f"--{self.name.replace('_', '-')}")

    def of(self, value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(value)
        return self._parsed(value, self.name)

    def _parsed(self, value: float | str, name: str) -> float | None:
        from tune_prune.tuning.resources import parse_amount

        return parse_amount(value, name, allow_zero=self.allow_zero)


class GpuKind(_Written):
    """A GPU that a plan is made for, a tuning.gpus.Card."""

    words = "the name of a GPU"

    def read(self, text: str) -> Any:
        from tune_prune.tuning.gpus import parse_card

        try:
            return parse_card(text)
        except ValueError as error:
            raise Wrong(str(error)) from None


@dataclass(frozen=True)
class Several(_Written):
    """Values of a kind, as a tuple that has each once; as text with commas between them, unless there is no `example` of that."""

    kind: Kind
    example: str = ""
    least: int = 1  # of them in a Python list

    def __str__(self) -> str:
        return f"a list, each of it {self.kind}" if self.example else str(self.kind)

    def read(self, text: str) -> tuple[Any, ...]:
        if not self.example:
            return (self.kind.read(text),)
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise Wrong(f"{text!r} names none; name at least one, e.g. {self.example}")
        values = []
        for part in parts:
            try:
                values.append(self.kind.read(part))
            except ValueError:
                if isinstance(self.kind, Choice):
                    raise Wrong(self.kind.unknown(part)) from None
                raise Wrong(f"{part!r} is not {self.kind}; separate values by commas, e.g. {self.example}") from None
        return tuple(dict.fromkeys(values))

    def of(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            return self.read(value)
        if not isinstance(value, (list, tuple)):
            raise ValueError(value)
        if len(value) < self.least:
            raise Wrong(f"{value!r} names none; name at least one")
        return tuple(dict.fromkeys(self.kind.of(plain(one)) for one in value))


class Folder(_Written):
    """A folder or file that is written: no address."""

    words = "a path"

    def read(self, text: str) -> Path:
        if not text.strip() or is_address(text):
            raise Wrong(f"{text!r} is no folder; name one, and copy from there what is to be kept elsewhere")
        return Path(text).expanduser()


class Place(_Written):
    """A folder or file that is read, which may be at an address."""

    words = "a path or an address"

    def read(self, text: str) -> Location:
        try:
            return location(text).expanduser() if is_address(text) else Folder().read(text)
        except UserError as error:
            raise Wrong(str(error)) from error


class LabelledPlace(_Written):
    """A model's name and a results file of it."""

    words = "MODEL=PATH, e.g. Llama=all_methods_results.csv"

    def read(self, text: str) -> tuple[str, Location]:
        label, _, path = (part.strip() for part in text.partition("="))
        if not label or not path:
            raise ValueError(text)
        try:
            check_label(label, f"the results of {path:.60}")
        except UserError as error:
            raise Wrong(str(error)) from None
        return label, Place().read(path)


class LabelledAccuracy(_Written):
    """A model's name and its accuracy, as a fraction or a percentage."""

    words = "MODEL=ACCURACY with a fraction above 0 or a percentage, e.g. Llama=0.651 or Llama=65.1"

    def read(self, text: str) -> tuple[str, float]:
        label, _, written = text.rpartition("=")
        accuracy = float(written.removesuffix("%"))
        if written.endswith("%") or accuracy > 1:
            accuracy /= 100
        if not label.strip() or not 0 < accuracy <= 1:
            raise ValueError(text)
        return label.strip(), accuracy
