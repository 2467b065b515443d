"""Measures by which trials are compared: the metrics whose mean counts, and the sign with which more is better; and the standard
errors of accuracies of exactly 0 or 1, of which sqrt(p (1 - p) / (n - 1)) says that they are certain.

Of n items that were all answered right, or all wrong, Wilson's 95% interval (1927) is z^2 / (n + z^2) wide. Half of that over z,
z / (2 (n + z^2)), is the standard error that has an interval of this width.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

ACCURACY_DIGITS = 12  # beyond them two accuracies differ by rounding, not in an item

_Z = 1.959964  # of the normal distribution, for 95%

MEASURES = {
    "accuracy": (1, ("acc_mean",)),
    "perplexity": (-1, ("ppl",)),
    "gold_logprob": (1, ("gold_logprob_mean",)),
    "kl": (-1, ("kl_text", "kl_tasks")),
}


def measured(metrics: Mapping[str, float], measure: str, known: Container[str] = ()) -> float:
    """Return one of MEASURES of a trial, more is better: the mean of its metrics.

    `known`: those that trials have which it is compared with: NaN where it lacks one of them, has none, or one is infinite."""
    sign, names = MEASURES[measure]
    values = [metrics.get(name, math.nan) for name in names if name in metrics or name in known]
    mean = sign * sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else math.nan


def comparable(accuracy: float) -> float:
    """Return an accuracy to compare by: means that were summed in another order differ in their last bits."""
    return round(accuracy, ACCURACY_DIGITS)


def fraction(value: float) -> str:
    """Return an accuracy or its error, as all tables have it: .8851."""
    return f"{value:.4f}".replace("0.", ".", 1) if 0 <= value < 1 else f"{value:.4f}"


def chance(choices: int, gold: int) -> float:
    """Return the accuracy of picking one of so many choices blindly; NaN where `gold` is -1 (several are right), but 0 of one
    such, an answer that is only asked for (lm-eval's type loglikelihood)."""
    if choices == 1 and gold < 0:
        return 0.0
    return 1 / choices if gold >= 0 else math.nan


def wilson_interval(accuracy: float, items: float) -> tuple[float, float]:
    """Return Wilson's 95% interval of an accuracy of 0 or 1 over so many items."""
    width = _Z * _Z / (items + _Z * _Z)
    return (0.0, width) if accuracy == 0 else (1 - width, 1.0)


def wilson_stderr(items: float) -> float:
    """Return the standard error of an accuracy of 0 or 1 over so many items."""
    return _Z / (2 * (items + _Z * _Z))


def wilson_items(stderr: float) -> float:
    """Return over how many items an accuracy of 0 or 1 has that standard error."""
    return _Z / (2 * stderr) - _Z * _Z


def is_certain(metrics: Mapping[str, Any], task: str) -> bool:
    """Say whether the accuracy of a task is 0 or 1 and has a standard error of 0."""
    return metrics.get(f"acc_{task}") in (0, 1) and metrics.get(f"acc_{task}_stderr") == 0


def wilson_errors(metrics: Mapping[str, Any], items: Mapping[str, float]) -> dict[str, float]:
    """Return what takes the place of standard errors in `metrics`, by name: that of Wilson's interval of a task with an
    accuracy of 0 or 1 and an error of 0 (`items`: how many it has), and that of acc_mean with what it adds, of k tasks its
    square over k^2."""
    errors = {f"acc_{task}_stderr": wilson_stderr(n) for task, n in items.items() if is_certain(metrics, task)}
    if errors and metrics.get("acc_mean_stderr") is not None:
        names = (name for name in metrics if name.startswith("acc_") and not name.endswith("_stderr"))
        tasks = [name for name in names if name != "acc_mean" and metrics[name] == metrics[name]]
        added = sum(error**2 for error in errors.values()) / len(tasks) ** 2
        errors["acc_mean_stderr"] = math.sqrt(metrics["acc_mean_stderr"] ** 2 + added)
    return errors
