"""The hyperparameters as factors of an analysis: their columns, those that a study varies, and the rows that vary with them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import CALIBRATION
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE
from tune_prune.core.kinds import Share, Whole
from tune_prune.core.records import MODEL_STAGES

# Columns of the rows. The pruning ratio is none: each is compared in itself; nor is the seed, which repeats a configuration.
FACTORS = tuple(name for name in HYPERPARAMETERS if name not in ("pruning_ratio", "seed"))
NUMERIC = tuple(name for name in FACTORS if isinstance(HYPERPARAMETERS[name].kind, (Share, Whole)))
_SWITCHES = tuple(dict.fromkeys(row.switch for row in RECIPE.values()))


def varied(rows: pd.DataFrame) -> tuple[str, ...]:
    """The factors with two levels or more among the rows."""
    return tuple(factor for factor in FACTORS if factor in rows and rows[factor].nunique() > 1)


def methods_reading(rows: pd.DataFrame, factor: str) -> set[str]:
    """The methods that read a factor, by all trials of a model, failed ones too. A grid holds a method once that does not.

    Calibration samples are read by all but the methods that pruned without a stage of any statistic. Another factor is read by
    the methods that were tried at several levels or, where there is none, by all.
    """
    methods = set(rows["method"])
    if factor in CALIBRATION:
        stages = [f"{stage}_duration_s" for stage in MODEL_STAGES]
        own = [column for column in rows if column.endswith("_duration_s") and column not in stages]
        pruned = rows[rows["pruning_duration_s"].notna()] if "pruning_duration_s" in rows else rows[:0]
        collected = pruned[own].notna().any(axis="columns")
        return methods - (set(pruned["method"]) - set(pruned["method"][collected]))
    levels = rows.groupby("method")[factor].nunique()
    several = levels.index[levels > 1]
    return set(several) if len(several) and factor != "method" else methods


def reading(rows: pd.DataFrame, of_model: pd.DataFrame, factor: str) -> pd.Series:
    """Which `rows` vary with a factor: of methods that read it (by all rows `of_model`), with the part of the recipe that does."""
    reads = rows["method"].isin(methods_reading(of_model, factor))
    part = HYPERPARAMETERS[factor].of
    return reads & (rows[part] != "none") if part else reads


def levels_of(rows: pd.DataFrame, factor: str) -> np.ndarray:
    """Its value of each row, as numbers: whole ones as such."""
    whole = isinstance(HYPERPARAMETERS[factor].kind, Whole)
    return rows[factor].to_numpy(np.int64 if whole else np.float64)


def grid_size(rows: pd.DataFrame) -> int:
    """How many configurations a full grid of the levels tried has; a method is in it once for each setting of what it reads."""
    reads = {name: methods_reading(rows, name) for name in FACTORS if name not in ("method", *RECIPE)}
    each = sum(
        math.prod(rows[name].nunique() for name, methods in reads.items() if method in methods)
        for method in rows["method"].unique()
    )
    return each * math.prod(_levels(rows, switch) for switch in _SWITCHES if switch in rows)


def _levels(rows: pd.DataFrame, switch: str) -> int:
    """How many settings a grid has of that part of a recipe: what only it reads has its levels where it is not none."""
    there = rows[rows[switch] != "none"]
    settings = [switch, *(name for name, row in RECIPE.items() if row.of == switch)]
    return int((rows[switch] == "none").any()) + (
        math.prod(there[name].nunique() for name in settings) if len(there) else 0
    )
