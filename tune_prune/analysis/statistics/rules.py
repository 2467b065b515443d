"""Selection rules: which configuration is chosen, from the rows that are eligible.

Rows are `ModelFindings.eligible`, the most accurate first, with the columns name, acc_mean, ppl, tokens (seq_len x samples),
difference_points and difference_stderr_points (own minus the most accurate's), gradient_pass_s (NaN where not measured).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from tune_prune.analysis.input.measures import GOLD, TEXTS

# Of rules that take the highest score: the columns whose mean it is, and the sign with which more of it is better
SCORES = {"accuracy": (1, ("acc_mean",)), "gold_logprob": (1, (GOLD,)), "kl": (-1, TEXTS)}
_SAME_SIZE = 0.001  # relative; plans of one budget differ by a channel or two, which is no smaller model


def accuracy(rows: pd.DataFrame) -> list[str]:
    """The highest acc_mean; equal ones by perplexity, tokens, name (`rows.ranked`)."""
    return rows["name"].head(1).tolist()


def perplexity(rows: pd.DataFrame) -> list[str]:
    """The lowest finite perplexity; of equal ones the more accurate. Empty if none is known."""
    finite = rows[np.isfinite(_numbers(rows["ppl"]))]
    return finite.sort_values("ppl", kind="stable")["name"].head(1).tolist()


def gold_logprob(rows: pd.DataFrame) -> list[str]:
    """The highest log-probability of right choices (gold_logprob_mean); of equal ones the more accurate. Empty if none is known."""
    return _highest(rows, score(rows, "gold_logprob"))


def kl(rows: pd.DataFrame) -> list[str]:
    """The lowest KL to the dense model, mean of kl_text and kl_tasks as far as any row has them; of equal ones the more accurate.
    Empty if none is known."""
    return _highest(rows, score(rows, "kl"))


def score_columns(rows: pd.DataFrame, rule: str) -> list[str]:
    """The columns of SCORES of a rule, as far as any row has them."""
    return [name for name in SCORES[rule][1] if name in rows and rows[name].notna().any()]


def score(rows: pd.DataFrame, rule: str) -> np.ndarray:
    """What a rule of SCORES takes the highest of; NaN where that is unknown or infinite."""
    columns = score_columns(rows, rule)
    values = [_numbers(rows[name]) for name in columns] or [np.full(len(rows), np.nan)]
    found = SCORES[rule][0] * np.mean(values, axis=0)
    return np.where(np.isfinite(found), found, np.nan)


def _highest(rows: pd.DataFrame, values: np.ndarray) -> list[str]:
    return [] if np.isnan(values).all() else [str(rows["name"].iloc[int(np.nanargmax(values))])]


def one_standard_error(rows: pd.DataFrame) -> list[str]:
    """The cheapest configuration within one standard error of the most accurate.

    Breiman, Friedman, Olshen and Stone, Classification and Regression Trees (1984), 3.4.3, with the standard error of the
    difference to the most accurate, paired where both have the same items. See `cost_order` for what is cheap; equal costs:
    the more accurate. Where no standard error is known only the most accurate itself is within it.
    """
    gaps, errors = -_numbers(rows["difference_points"]), _numbers(rows["difference_stderr_points"])
    within = (gaps <= errors) | (gaps <= 0)
    return [str(rows["name"].iloc[cheapest_within(within, _numbers(rows["acc_mean"]), cost_order(rows))])]


def cheapest_within(within: np.ndarray, accuracies: np.ndarray, cost: np.ndarray) -> int:
    """The position, among those `within`, of the lowest cost, then of the highest accuracy, then the first."""
    positions = np.flatnonzero(within)
    return int(positions[np.lexsort((-accuracies[positions], cost[positions]))[0]])


def cost_order(rows: pd.DataFrame) -> np.ndarray:
    """Rank of each row's cost, equal ones alike: calibration tokens, then the seconds of a gradient pass (unknown: last)."""
    return rows.groupby(["tokens", "gradient_pass_s"], dropna=False).ngroup().to_numpy()


def pareto(rows: pd.DataFrame) -> list[str]:
    """Those that no other one dominates: is nowhere worse and somewhere better.

    Objectives: acc_mean, ppl, params_count and every column that names a latency, as far as any row has them. An unknown or
    infinite value is the worst of its column. Sizes that differ by at most 0.1% are the same, as one budget leaves them.
    """
    names = ["ppl", *(name for name in rows.columns if "latency" in name and not name.endswith("_stderr"))]
    columns = [-_numbers(rows["acc_mean"]), *(_numbers(rows[name]) for name in names)]
    measured = [np.where(np.isfinite(values), values, np.inf) for values in columns if np.isfinite(values).any()]
    costs = np.column_stack(measured)  # lower is better
    size = np.nan_to_num(_numbers(rows["params_count"]), nan=np.inf)
    kept = []
    for k, cost in enumerate(costs):
        smaller = size * (1 + _SAME_SIZE) < size[k]
        no_worse = (costs <= cost).all(axis=1) & ~(size[k] * (1 + _SAME_SIZE) < size)
        better = (costs < cost).any(axis=1) | smaller
        if not (no_worse & better).any():
            kept.append(str(rows["name"].iloc[k]))
    return kept


def _numbers(values: pd.Series) -> np.ndarray:
    return values.to_numpy(dtype=np.float64, na_value=np.nan)


# Rule -> names of what it chooses, the most accurate first; none where what it needs was not measured
RULES = {
    "accuracy": accuracy,
    "perplexity": perplexity,
    "gold_logprob": gold_logprob,
    "kl": kl,
    "one-standard-error": one_standard_error,
    "pareto": pareto,
}
# What a rule needs that may not have been measured.
NEEDS = {
    "perplexity": "a finite ppl",
    "gold_logprob": "log-probabilities of right choices",
    "kl": "a finite KL to the dense model",
}
