"""What trials can be compared by: by name the metrics whose mean counts, and the sign with which more of it is better."""

from __future__ import annotations

import math
from collections.abc import Mapping

MEASURES = {
    "accuracy": (1, ("acc_mean",)),
    "perplexity": (-1, ("ppl",)),
    "gold_logprob": (1, ("gold_logprob_mean",)),
    "kl": (-1, ("kl_text", "kl_tasks")),
}


def measured(metrics: Mapping[str, float], measure: str) -> float:
    """One of MEASURES of a trial, more is better: the mean of those of its metrics that are known; NaN where none is, or one is
    infinite."""
    sign, names = MEASURES[measure]
    values = [metrics[name] for name in names if name in metrics]
    found = sign * sum(values) / len(values) if values else math.nan
    return found if math.isfinite(found) else math.nan


def chance(choices: int, gold: int) -> float:
    """The accuracy of picking one of so many choices blindly. NaN where the right one, `gold`, is -1: how many are right is not
    kept; but 0 of one such, as an answer that is only asked for (lm-eval's type loglikelihood) is one of all that could be said."""
    if choices == 1 and gold < 0:
        return 0.0
    return 1 / choices if gold >= 0 else math.nan
