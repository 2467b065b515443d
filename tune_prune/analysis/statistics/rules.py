"""Selection rules: which configuration is chosen, from the rows that are eligible.

Rows are `ModelFindings.eligible`, the most accurate first, with the columns name, acc_mean, ppl, tokens (of the calibration),
difference_points and difference_stderr_points (own minus the most accurate's), gradient_pass_s (NaN where not measured),
margin_points (of accuracy, above what is still within --within points of the dense model; NaN where that is unknown),
retained_per_second (NaN where no speed was measured).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import compared
from tune_prune.analysis.statistics.differences import Difference
from tune_prune.core.measures import ACCURACY_DIGITS, MEASURES, measured

WITHIN = 2.0  # points below the dense model's accuracy that rule "smallest" allows if it is not told otherwise
_SAME_SIZE = 0.001  # relative; plans of one budget differ by a channel or two, which is no smaller model
_ROUNDING = 1e-9  # points


def accuracy(rows: pd.DataFrame) -> list[str]:
    """Choose the highest acc_mean; equal ones by perplexity, tokens, name (`rows.ranked`)."""
    return rows["name"].head(1).tolist()


def by_measure(measure: str, rows: pd.DataFrame) -> list[str]:
    """Choose the best by one of MEASURES; of equal ones the more accurate. Empty if none is known and finite."""
    return _highest(rows, score(rows, measure))


def score_columns(rows: pd.DataFrame, rule: str) -> list[str]:
    """Return the columns of MEASURES of a rule, as far as any row has them."""
    return [name for name in MEASURES[rule][1] if name in rows and rows[name].notna().any()]


def score(rows: pd.DataFrame, rule: str) -> np.ndarray:
    """Return what a rule of MEASURES takes the highest of; NaN where that is unknown or infinite."""
    known = score_columns(rows, rule)
    metrics = rows[known].astype("float64").to_dict("records") if known else [{}] * len(rows)
    scores = np.array([measured(row, rule, known) for row in metrics], dtype=np.float64)
    return scores.round(ACCURACY_DIGITS) if rule == "accuracy" else scores  # equal accuracies are equal


def _highest(rows: pd.DataFrame, values: np.ndarray) -> list[str]:
    return [] if np.isnan(values).all() else [str(rows["name"].iloc[int(np.nanargmax(values))])]


def one_standard_error(rows: pd.DataFrame) -> list[str]:
    """Choose the cheapest configuration within one standard error of the most accurate.

    Breiman, Friedman, Olshen and Stone, Classification and Regression Trees (1984), 3.4.3, with the standard error of the
    difference to the most accurate, paired where both have the same items. See `cost_order` for what is cheap; equal costs:
    the more accurate. Where no standard error is known only the most accurate itself is within it.
    """
    gaps, errors = -_numbers(rows["difference_points"]), _numbers(rows["difference_stderr_points"])
    within = (gaps <= errors) | (gaps <= _ROUNDING)
    return [str(rows["name"].iloc[cheapest_within(within, _numbers(rows["acc_mean"]), cost_order(rows))])]


def cheapest_within(within: np.ndarray, accuracies: np.ndarray, cost: np.ndarray) -> int:
    """Return the position, among those `within`, of the lowest cost, then of the highest accuracy, then the first."""
    positions = np.flatnonzero(within)
    return int(positions[np.lexsort((-accuracies[positions].round(ACCURACY_DIGITS), cost[positions]))[0]])


def cost_order(rows: pd.DataFrame) -> np.ndarray:
    """Rank each row's cost, equal ones alike: calibration tokens, then the seconds of a gradient pass (unknown: last)."""
    return rows.groupby(["tokens", "gradient_pass_s"], dropna=False).ngroup().to_numpy()


def pareto(rows: pd.DataFrame) -> list[str]:
    """Choose those that no other one dominates: is nowhere worse and somewhere better.

    Objectives: acc_mean, ppl, params_count and every column that names a latency, as far as any row has them. An unknown or
    infinite value is the worst of its column. Sizes that differ by at most 0.1% are the same, as one budget leaves them.
    """
    names = ["ppl", *(name for name in rows.columns if "latency" in name and not name.endswith("_stderr"))]
    columns = [-_numbers(compared(rows["acc_mean"])), *(_numbers(rows[name]) for name in names)]
    costs = np.column_stack(columns)  # lower is better
    costs = np.where(np.isfinite(costs), costs, np.inf)
    size = np.nan_to_num(_numbers(rows["params_count"]), nan=np.inf)
    undominated = []
    for k, cost in enumerate(costs):
        smaller = size * (1 + _SAME_SIZE) < size[k]
        no_worse = (costs <= cost).all(axis=1) & ~(size[k] * (1 + _SAME_SIZE) < size)
        if not (no_worse & ((costs < cost).any(axis=1) | smaller)).any():
            undominated.append(str(rows["name"].iloc[k]))
    return undominated


def smallest(rows: pd.DataFrame) -> list[str]:
    """Choose the fewest parameters of those whose accuracy, as measured, is within --within points of the dense model's; of the
    same size (0.1%) the more accurate. Empty where none is, and where the dense model's is unknown."""
    within = rows[_numbers(rows["margin_points"]) >= -_ROUNDING]
    size = np.nan_to_num(_numbers(within["params_count"]), nan=np.inf)
    return within[size <= (1 + _SAME_SIZE) * size.min(initial=np.inf)]["name"].head(1).tolist()


def retained_per_second(rows: pd.DataFrame) -> list[str]:
    """Choose the highest accuracy retained per second of a request, of those whose speed was measured (`study.measured_apart`); of
    equal ones the more accurate. Empty if none was."""
    return _highest(rows, _numbers(rows["retained_per_second"]))


def none_within(model: str, within: float, nearest: str, gap: Difference | None) -> str:
    """Return why rule "smallest" chooses nothing; `gap`: of the nearest to the dense model, None where that one's accuracy is
    unknown."""
    if gap is None:
        return (
            f"--rule smallest needs the original model's accuracy, which is not known of {model}; give --baseline "
            f"{model}=ACCURACY"
        )
    points = f"{gap.points:.2f}" + (f" ± {gap.stderr_points:.2f}" if np.isfinite(gap.stderr_points) else "") + " points"
    return (
        f"no configuration of {model} is within {within:g} points of the original model: the nearest, {nearest}, differs by "
        f"{points}; give a larger --within, or search smaller pruning ratios"
    )


def _numbers(values: pd.Series) -> np.ndarray:
    return values.to_numpy(dtype=np.float64, na_value=np.nan)


# Rule -> names of what it chooses, the most accurate first; none where what it needs was not measured
RULES: dict[str, Callable[[pd.DataFrame], list[str]]] = {
    "accuracy": accuracy,
    **{measure: partial(by_measure, measure) for measure in ("perplexity", "gold_logprob", "kl")},
    "one-standard-error": one_standard_error,
    "pareto": pareto,
    "smallest": smallest,
    "retained-per-second": retained_per_second,
}
BY_TEXT = ("perplexity", "kl")  # rules by which no outcome of an item has a part in the choice
# What a rule needs that may not have been measured.
NEEDS = {
    "perplexity": "a finite ppl",
    "gold_logprob": "log-probabilities of right choices",
    "kl": "a finite KL to the original model",
    "smallest": "an accuracy within --within points of the original model's",
    "retained-per-second": "a speed, as tune-prune speed --config FOLDER measures it",
}


def best_rule(rows: Iterable[pd.DataFrame], objective: str) -> str:
    """Return the rule that chooses the best of a search: its objective, or accuracy where a model has no trial with that measure.

    `rows` are those of each model."""
    complete = [of_model[of_model["success"]] for of_model in rows]
    return objective if all(np.isfinite(score(one, objective)).any() for one in complete if len(one)) else "accuracy"
