"""What the statistics say of a study, as plain data: everything that tables, figures and reports print is in here.

Accuracies and their standard errors are fractions, differences are percentage points. Tables are data frames; what a column
holds is said where it is declared. A value that cannot be computed is None or NaN and its reason stands beside it as a
`Remark`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from tune_prune.analysis.input.study import Model, Study

RULES = ("accuracy", "perplexity", "one-standard-error", "pareto")


@dataclass(frozen=True)
class Remark:
    """Something to be said in words, in any language: `messages.format_message(remark, language)` makes the sentence of it."""

    kind: str  # a key of messages.SENTENCES
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CrossFit:
    """The best configuration's accuracy free of selection bias: chosen on one part of the items, scored on the other."""

    naive: float  # acc_mean of the best on all items
    corrected: float
    stderr: float  # of `corrected`
    folds: int
    repeats: int
    chosen: Mapping[str, float]  # configuration name -> share of the folds in which it was chosen


@dataclass(frozen=True)
class Trend:
    """How accuracy moves with a knob's levels."""

    knob: str  # taylor_seq_len or taylor_num_samples
    direction: (
        str  # "rises", "falls", "rises_then_falls", "falls_then_rises", "flat", "mixed", "unknown" (no standard error)
    )
    spread_points: float  # highest less lowest level mean
    stderr_points: float  # of that difference
    best_level: int
    spearman: float  # rank correlation of level and acc_mean over the rows
    spearman_p: float


@dataclass(frozen=True)
class Correlation:
    """Pearson correlation of acc_mean with another column over the complete rows."""

    column: str
    r: float | None  # None: not computable, see `reason`
    n: int  # rows
    reason: Remark | None = None
    low: float | None = None  # 95% interval (Fisher), over n_independent where rows share the value
    high: float | None = None
    n_independent: int | None = None  # distinct gradient passes, where the column is the same for all methods of one
    r_independent: float | None = None  # over those: each pass once, with the mean accuracy of its rows


@dataclass(frozen=True)
class ModelFindings:
    """One model. `competing` has a row per complete trial with a finite accuracy, best first by accuracy."""

    model: Model
    rule: str  # one of RULES, by which `best` was chosen ("pareto": the most accurate of its set)
    best: pd.Series  # a row of `competing`
    # columns of model.rows and: tokens (seq_len x samples); difference_points, difference_stderr_points (own minus the most
    # accurate's, 0 for itself), p_best (chance of a gap to the best as large as this if this were the best; corrected for all
    # configurations), in_confidence_set (p_best above 0.05: cannot be told from the best)
    competing: pd.DataFrame
    basis: str  # of the differences: "paired" (same items), "unpaired" (standard errors of each alone), "unknown"
    chosen: Mapping[str, list[str]]  # rule -> names; one but for "pareto"
    cross_fit: CrossFit | None  # None without item outcomes, or with fewer than two configurations
    # index: method; columns: n, mean, std (n - 1), std_n (divides by n, as published), min, median, max, best (name)
    methods: pd.DataFrame
    # knob -> index: level; columns: n, mean, std, stderr, min, max
    levels: Mapping[str, pd.DataFrame]
    trends: Mapping[str, Trend]  # of knobs with two levels or more
    # index: term ("method", "taylor_seq_len", "method:taylor_seq_len", ..., "residual"); columns: df, sum_sq, share, F, p
    effects: pd.DataFrame | None  # ANOVA where the complete trials are a full grid
    importance: Mapping[str, float]  # knob -> share; from `effects`, else Optuna's evaluator
    importance_basis: str  # "anova", "optuna", "none"
    correlations: tuple[Correlation, ...]
    tasks: pd.DataFrame  # index: task; columns: acc, stderr, dense, retained (acc / dense), items; of `best`
    statistics: Mapping[
        str, float
    ]  # runs, complete, failed, stopped_early, not_finite, task_evaluations, max, min, median, mean, std
    warnings: tuple[Remark, ...]


@dataclass(frozen=True)
class Findings:
    """Everything."""

    study: Study
    rule: str
    models: Mapping[str, ModelFindings]  # with a complete trial at least
    without: tuple[str, ...]  # labels of models that have none
    # row: model; column: model whose best is used; points lost against the row's own best, and its standard error; NaN where
    # that configuration has no complete trial there. `transfer_percent`: the same in percent of the own best.
    transfer_points: pd.DataFrame | None  # None with fewer than two models
    transfer_stderr: pd.DataFrame | None
    transfer_percent: pd.DataFrame | None
    # the best single configuration for all: config, acc_mean, models {label: {loss_points, loss_points_stderr, ...}}
    best_for_all: Mapping[str, Any] | None
