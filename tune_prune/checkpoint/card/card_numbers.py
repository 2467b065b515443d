"""Numbers as the model card writes them: digits that mean something, units that the Hub uses, a dash for what is not known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tune_prune.core.files import number
from tune_prune.core.terminal.escapes import markdown_code
from tune_prune.models.gguf.files import GgufOrigin

UNKNOWN = "–"


def metric(metrics: Mapping[str, Any], name: str) -> float | None:
    """A recorded number; None where there is none, or it is not a number."""
    value = None if metrics.get(name) is None else float(number(metrics[name]))
    return None if value is None or math.isnan(value) else value


def fraction(value: float) -> str:
    """A fraction with 4 digits and no leading zero, as accuracies are published: .5980."""
    return f"{value:.4f}".removeprefix("0")


def accuracy(metrics: Mapping[str, Any], name: str) -> str:
    """`.5980 ± .0041`; without its standard error where that is not known or, of 0 and 1, no estimate; a dash where nothing is."""
    value, stderr = metric(metrics, name), metric(metrics, f"{name}_stderr")
    if value is None:
        return UNKNOWN
    return fraction(value) if stderr is None or value in (0, 1) else f"{fraction(value)} ± {fraction(stderr)}"


def format_perplexity(value: float | None) -> str:
    """2 digits; 3 significant ones where a model is broken and it is huge."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 100_000 else f"{value:.3g}"


def kept(value: float | None, whole: float | None) -> str:
    """`value` in percent of `whole`: 80.0%."""
    return UNKNOWN if value is None or not whole else f"{value / whole:.1%}"


def short_count(count: int) -> str:
    """A number of parameters in 3 digits: 8.03B."""
    return _in_units(count, ("", "k", "M", "B", "T"))


def short_bytes(count: float) -> str:
    """Bytes in decimal units, as the Hub shows them: 16.1 GB."""
    return _in_units(count, (" B", " kB", " MB", " GB", " TB"))


def _in_units(count: float, units: Sequence[str]) -> str:
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f}{units[power]}"


def dequantised(file: GgufOrigin) -> str:
    """What a dense model was read from."""
    what = f"{markdown_code(file.file)}, a GGUF file in {markdown_code(file.quantization)} (SHA-256 {markdown_code(file.sha256)})"
    return f"read from {what} and made floating-point: that is the dense model of all comparisons here"
