"""Which of two methods is more accurate on average, with the error of that difference: paired by configuration and by item."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import compared
from tune_prune.analysis.statistics.comparison import Comparison
from tune_prune.analysis.statistics.factors import methods_reading, varied
from tune_prune.core.measures import comparable

COLUMNS = ("n", "points", "stderr_points", "p_value")
_ROUNDING = 1e-6  # points


def method_pairs(
    trials: pd.DataFrame, eligible: pd.DataFrame, comparison: Comparison, generator: np.random.Generator
) -> pd.DataFrame:
    """The mean difference in acc_mean of every two methods over the configurations that both completed.

    Two configurations are a pair where they agree in all hyperparameters that both methods read. Index: first and second, the
    method that is higher over the pairs first (one that has failed where it is hard may have the higher mean over all its own);
    columns: n (pairs), points, stderr_points (percentage points), p_value.

    The squared standard error is the sum of two, as for crossed random effects, and so rather too large than too small: that of
    other items (of the same bootstrap as `Comparison`; without items that of each mean alone) and that of other settings, the
    variance of the differences over the number of settings. Draws of calibration samples, where their spread is known, are a part
    of both and count once, by the larger. p_value is corrected for all pairs: the chance that any of them
    shows a smaller single p by noise alone (Westfall and Young 1993, min p), from the bootstrap's errors and, for the settings,
    Student's t. NaN where an error is unknown, as that of settings is where two methods have one pair, and where they have none.
    `trials`: all of the model, failed ones too; `comparison`: that of `eligible`.
    """
    accuracy = eligible["acc_mean"].to_numpy(np.float64)
    own = np.sqrt(comparison.variances - comparison.draw_variances)
    reads = {factor: methods_reading(trials, factor) for factor in varied(trials) if factor != "method"}
    means = compared(eligible.groupby("method")["acc_mean"].mean())
    order = means.sort_values(ascending=False, kind="stable").index
    rows = eligible.reset_index(drop=True)
    found, matches, weights = [], [], []
    for names in itertools.combinations(order, 2):
        common = [factor for factor, methods in reads.items() if methods.issuperset(names)]
        sides = (rows.loc[rows["method"] == name, common].rename_axis("row").reset_index() for name in names)
        matched = pd.merge(*sides, on=common) if common else pd.merge(*sides, how="cross")
        pair = {"first": names[0], "second": names[1]} | dict.fromkeys(COLUMNS, math.nan) | {"n": len(matched)}
        found.append(pair)
        first, second = (matched[row].to_numpy(np.int64) for row in ("row_x", "row_y"))
        matches.append((first, second))
        sides = (np.bincount(side, minlength=len(rows)) / max(1, len(matched)) for side in (first, second))
        weights.append(tuple(sides))
    paired = comparison.basis == "paired"
    variances = comparison.variances_of([one - other for one, other in weights]) if paired else []
    errors = []
    for index, (pair, (first, second)) in enumerate(zip(found, matches, strict=True)):
        if not len(first) or not np.isfinite(own[[*first, *second]]).all():
            errors.append(np.full(len(comparison.errors), np.nan))
            continue
        draw_variance = float(np.square(weights[index][0] - weights[index][1]) @ comparison.draw_variances)
        if paired:
            item_variance = variances[index]
            item_errors = comparison.errors @ (weights[index][0] - weights[index][1])
        else:  # the items of a method's configurations are the same, so their errors do not average out
            item_variance = sum(float(own @ part) ** 2 for part in weights[index]) + draw_variance
            item_errors = generator.standard_normal(len(comparison.errors)) * math.sqrt(item_variance)
        gaps = pd.Series(accuracy[first] - accuracy[second])
        # One configuration may stand in several pairs: what counts are those of a side, of the side with the larger spread
        means = [gaps.groupby(side).mean() for side in (first, second)]
        spreads = [(float(m.var()) / len(m), len(m) - 1) for m in means if len(m) > 1]
        if comparable(gaps.mean()) < 0:
            pair |= {"first": pair["second"], "second": pair["first"]}
        pair["points"] = 100 * abs(gaps.mean())
        if not spreads:  # what another setting would change is not known
            errors.append(np.full(len(comparison.errors), np.nan))
            continue
        spread, freedom = max(spreads)
        spread = max(0.0, spread - draw_variance)
        pair["stderr_points"] = 100 * math.sqrt(max(0.0, item_variance) + spread)
        errors.append(100 * (item_errors + math.sqrt(spread) * generator.standard_t(freedom, len(item_errors))))
    table = pd.DataFrame(found, columns=["first", "second", *COLUMNS])
    if found:
        table["p_value"] = _corrected(table["points"].to_numpy(), np.column_stack(errors))
    return table.set_index(["first", "second"])


def _corrected(observed: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """p of each observed difference, corrected for all of them. `errors`: [draws, differences]; NaN for one of unknown error."""
    values = np.full(len(observed), np.nan)
    tested = np.isfinite(errors).all(axis=0)
    sizes, draws = np.abs(errors[:, tested]), len(errors)
    if tested.any():
        single = (1 + (sizes >= np.abs(observed[tested]) - _ROUNDING).sum(axis=0)) / (1 + draws)
        smaller = [np.searchsorted(np.sort(column), column) for column in sizes.T]
        least = 1 - np.max(smaller, axis=0) / draws  # the smallest single p of each draw
        values[tested] = (1 + (least[:, None] <= single).sum(axis=0)) / (1 + draws)
    return values
