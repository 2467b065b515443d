"""The hyperparameters as factors of an analysis: their columns, those that a study varies, and the rows that vary with them."""

from __future__ import annotations

import pandas as pd

from tune_prune.core.config import HYPERPARAMETERS, Whole
from tune_prune.core.records import MODEL_STAGES

# Factor -> column of the rows. The pruning ratio is none: each is compared in itself.
FACTORS = {name: "pruning_method" if name == "method" else name for name in HYPERPARAMETERS if name != "pruning_ratio"}
NUMERIC = tuple(name for name in FACTORS if isinstance(HYPERPARAMETERS[name].kind, Whole))
CALIBRATION = ("taylor_seq_len", "taylor_num_samples")  # what a gradient pass is made with; it serves every method


def varied(rows: pd.DataFrame) -> dict[str, str]:
    """The factors with two levels or more among the rows."""
    return {name: column for name, column in FACTORS.items() if column in rows and rows[column].nunique() > 1}


def methods_reading(rows: pd.DataFrame, factor: str) -> set[str]:
    """The methods that read a factor, by all trials of a model, failed ones too. A grid holds a method once that does not.

    Calibration samples are read by all but the methods that pruned without a stage of any statistic. Another factor is read by
    the methods that were tried at several levels or, where there is none, by all.
    """
    methods = set(rows["pruning_method"])
    if factor in CALIBRATION:
        stages = [f"{stage}_duration_s" for stage in MODEL_STAGES]
        own = [column for column in rows if column.endswith("_duration_s") and column not in stages]
        pruned = rows[rows["pruning_duration_s"].notna()] if "pruning_duration_s" in rows else rows[:0]
        collected = pruned[own].notna().any(axis="columns")
        return methods - (set(pruned["pruning_method"]) - set(pruned["pruning_method"][collected]))
    levels = rows.groupby("pruning_method")[FACTORS[factor]].nunique()
    several = levels.index[levels > 1]
    return set(several) if len(several) and factor != "method" else methods
