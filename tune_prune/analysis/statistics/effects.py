"""The effect of each hyperparameter on accuracy: factors, level means, trends, analysis of variance, importance, correlations, and
which of two methods is more accurate on average.

Rows are the eligible ones of one model (`ModelFindings.eligible`: complete, finite acc_mean, at least one) in any order.
Accuracies are fractions, differences percentage points.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import CALIBRATION, CONTROL, compared
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.statistics.comparison import Comparison
from tune_prune.core.hyperparameters import HYPERPARAMETERS, RECIPE
from tune_prune.core.kinds import Real, Whole
from tune_prune.core.measures import ACCURACY_DIGITS, comparable
from tune_prune.core.records import MODEL_STAGES

# Columns of the rows. The pruning ratio is none: each is compared in itself; nor is the seed, which repeats a configuration.
FACTORS = tuple(name for name in HYPERPARAMETERS if name not in ("pruning_ratio", "seed"))
# Numbers whose levels are compared by their ratios, which 0 has none of.
NUMERIC = tuple(
    name
    for name in FACTORS
    if isinstance(kind := HYPERPARAMETERS[name].kind, Whole) or (isinstance(kind, Real) and kind.above)
)


def varied(rows: pd.DataFrame) -> tuple[str, ...]:
    """Return the factors with two levels or more among the rows."""
    return tuple(factor for factor in FACTORS if factor in rows and rows[factor].nunique() > 1)


def methods_reading(rows: pd.DataFrame, factor: str) -> set[str]:
    """Return the methods that read a factor, by all trials of a model, failed ones too. A grid holds a method once that does not.

    Calibration samples are read by all but the methods that pruned without a stage of any statistic. Another factor is read by
    the methods that were tried at several levels or, where there is none, by all.
    """
    methods = set(rows["method"])
    if factor in CALIBRATION:
        stages = [f"{stage}_duration_s" for stage in MODEL_STAGES]
        durations = [column for column in rows if column.endswith("_duration_s") and column not in stages]
        pruned = rows[rows["pruning_duration_s"].notna()] if "pruning_duration_s" in rows else rows[:0]
        collected = pruned[durations].notna().any(axis="columns")
        return methods - (set(pruned["method"]) - set(pruned["method"][collected]))
    levels = rows.groupby("method")[factor].nunique()
    several = levels.index[levels > 1]
    return set(several) if len(several) and factor != "method" else methods


def reading(rows: pd.DataFrame, of_model: pd.DataFrame, factor: str) -> pd.Series:
    """Return which `rows` vary with a factor: of methods that read it (by all rows `of_model`), with the part of the recipe that
    does."""
    reads = rows["method"].isin(methods_reading(of_model, factor))
    part = HYPERPARAMETERS[factor].of
    return reads & (rows[part] != "none") if part else reads


def levels_of(rows: pd.DataFrame, factor: str) -> np.ndarray:
    """Return a factor's value of each row, as numbers: whole ones as such."""
    whole = isinstance(HYPERPARAMETERS[factor].kind, Whole)
    return rows[factor].to_numpy(np.int64 if whole else np.float64)


def grid_size(rows: pd.DataFrame) -> int:
    """Return how many configurations a full grid of the levels tried has; a method is in it once for each setting of what it
    reads."""
    reads = {name: methods_reading(rows, name) for name in FACTORS if name not in ("method", *RECIPE)}
    size = sum(
        math.prod(rows[name].nunique() for name, methods in reads.items() if method in methods)
        for method in rows["method"].unique()
    )
    for switch in {row.switch for row in RECIPE.values()} & {
        *rows
    }:  # what only it reads has its levels where it is not none
        switched_on = rows[rows[switch] != "none"]
        settings = [switch, *(name for name, row in RECIPE.items() if row.of == switch)]
        levels = math.prod(switched_on[name].nunique() for name in settings) if len(switched_on) else 0
        size *= levels + bool((rows[switch] == "none").any())
    return size


# What accuracy is correlated with
_COLUMNS = (
    *("ppl", "gold_logprob_mean", "kl_text", "kl_tasks", "grad_mean_ratio", "grad_norm_ratio", "grad_std_ratio"),
    *("grad_max_ratio", "grad_mean_range", "grad_norm_range", "extreme_pruning_layers", "removed_fraction"),
)

# Of a handful of points nearly any two measures correlate: of 4 random ones |r| is above .95 in one of 20.
MIN_ROWS = 10
# PED-ANOVA. Simulated searches of 20 of 297 configurations, one factor with a large effect and two with none: it puts that
# factor first in 86% (method) and 100% (seq_len) of them; with Optuna's default of a tenth in 20% and 92%, with half as many
# trials in 59% and 98%.
_TARGET_QUANTILE = 0.5
_MIN_TRIALS = 20
_ROUNDING = 1e-12  # relative; a sum of squares or a difference below it is a rounding error


@dataclass(frozen=True)
class Trend:
    """The way in which accuracy moves with a factor's levels."""

    factor: str
    direction: str  # "rises", "falls", "rises_then_falls", "falls_then_rises", "flat", "mixed", "unknown": see `trend`
    spread_points: float  # highest less lowest level mean
    stderr_points: float  # of that difference
    best_level: float  # of a factor of whole numbers an int
    tied_levels: tuple[float, ...]  # that do not differ from it, itself among them; none where it is unknown
    spearman: float  # rank correlation of level and acc_mean over the rows
    spearman_p: float


@dataclass(frozen=True)
class Correlation:
    """Pearson correlation of acc_mean with another column over the complete rows but those of CONTROL."""

    measure: str  # the column
    n: int  # rows
    r: float | None = None  # None: not computable, see `reason`
    low: float | None = None  # 95% interval (Fisher), over `passes` where rows share the value
    high: float | None = None
    passes: int | None = None  # distinct gradient passes, where the column is the same for all methods of one
    r_passes: float | None = None  # over those: each pass once, with the mean accuracy of its rows
    tau: float | None = None  # Kendall's rank correlation over the rows (tau-b)
    reason: Message | None = None


def method_table(eligible: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracy of each method, highest mean first.

    Index: method; columns: n, mean, std (n - 1; NaN for one row), std_n (divides by n, as the published tables), min,
    median, max, best (name of the configuration).
    """
    # Of equal ones the first: as ranked
    ordered = eligible.sort_values("acc_mean", ascending=False, kind="stable", key=compared)
    groups = ordered.groupby("method")
    moments = {"mean": pd.Series.mean, "std": pd.Series.std, "std_n": partial(pd.Series.std, ddof=0)}
    table = groups["acc_mean"].agg(n="count", **moments, min="min", median="median", max="max")
    return table.assign(best=groups["name"].first()).sort_values("mean", ascending=False, kind="stable", key=compared)


def level_table(eligible: pd.DataFrame, factor: str) -> pd.DataFrame:
    """Return the accuracy at each level of `factor`, lowest level first, over all settings of the other hyperparameters.

    Index: level; columns: n, mean, std (n - 1), stderr (std / sqrt(n); how far levels differ is what `trend` tells), min, max.
    """
    rows = eligible.assign(**{factor: levels_of(eligible, factor)})
    kinds = {"n": "count", "mean": "mean", "std": "std", "stderr": "sem", "min": "min", "max": "max"}
    return rows.groupby(factor)["acc_mean"].agg(**kinds)


def trend(eligible: pd.DataFrame, factor: str) -> Trend:
    """Return how accuracy moves with the levels of `factor`, of which there must be two or more.

    Level means and their errors come from least squares, accuracy = level + other factors: on a full grid these are the plain
    level means, elsewhere they are corrected for which settings each level was tried with. What that leaves over, including
    how much the effect depends on the other factors, is the noise: a trend has to hold across them. Where there are too few
    rows for all factors, only methods are taken out, or nothing; with one row a level the errors are the rows' own acc_mean_stderr.

    Two levels differ if their means are more than two standard errors of the difference apart and the levels are not all
    equal (F test, p at most .05): Fisher's protected least significant difference. "flat": no two differ; "rises" and
    "falls": all that differ do so in that direction; "rises_then_falls" and "falls_then_rises": both, with one turn at
    an inner level; "mixed": anything else; "unknown": no error can be computed.
    """
    from scipy.stats import spearmanr

    levels = np.unique(levels_of(eligible, factor))
    means, covariance, p = _level_means(eligible, factor, levels)
    variance = np.diag(covariance)
    stderr = np.sqrt(np.maximum(variance[:, None] + variance[None, :] - 2 * covariance, 0))
    highest, lowest = int(np.argmax(means.round(ACCURACY_DIGITS))), int(np.argmin(means.round(ACCURACY_DIGITS)))
    acc, spearman, spearman_p = compared(eligible["acc_mean"]), math.nan, math.nan
    if acc.nunique() > 1 and len(acc) > 2:
        spearman, spearman_p = map(float, spearmanr(eligible[factor].to_numpy("float64"), acc.to_numpy("float64")))
    direction = _direction(means, stderr, p)
    lower = means[highest] - means > 2 * stderr[highest] + np.abs(means).max() * _ROUNDING
    tied = {"flat": levels, "unknown": levels[:0]}.get(direction, levels[~lower])
    return Trend(
        factor,
        direction,
        100 * float(means[highest] - means[lowest]),
        100 * float(stderr[highest, lowest]),
        levels[highest].item(),
        tuple(tied.tolist()),
        spearman,
        spearman_p,
    )


def _level_means(rows: pd.DataFrame, factor: str, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the means at `levels`, their covariance (NaN: unknown), and p of the hypothesis that all are equal."""
    from scipy.stats import chi2
    from statsmodels.regression.linear_model import OLS

    acc = rows["acc_mean"].to_numpy("float64")
    scale = float(np.abs(acc).max()) * _ROUNDING
    others = [column for column in varied(rows) if column != factor]
    indicators = (levels_of(rows, factor)[:, None] == levels).astype("float64")
    contrasts = np.eye(len(levels))[1:] - np.eye(len(levels))[0]
    for taken_out in (others, [column for column in others if column == "method"], []):
        dummies = [pd.get_dummies(rows[column], drop_first=True, dtype="float64").to_numpy() for column in taken_out]
        design = np.hstack([indicators, *dummies])
        if len(design) > design.shape[1] == np.linalg.matrix_rank(design):
            fit = OLS(acc, design).fit()
            means = fit.params[: len(levels)]
            if math.sqrt(fit.scale) <= scale:  # an exact fit: the test would divide rounding errors
                return means, np.zeros((len(levels), len(levels))), float(np.ptp(means) <= scale)
            equal = fit.f_test(np.pad(contrasts, ((0, 0), (0, design.shape[1] - len(levels)))))
            return means, fit.cov_params()[: len(levels), : len(levels)], float(equal.pvalue)
    ordered = rows.iloc[np.argsort(levels_of(rows, factor))]  # one row a level
    means = ordered["acc_mean"].to_numpy("float64")
    covariance = np.diag(ordered["acc_mean_stderr"].to_numpy("float64") ** 2)
    if not (np.diag(covariance) > 0).all():
        return means, np.full_like(covariance, np.nan), math.nan
    gaps = contrasts @ means
    wald = gaps @ np.linalg.solve(contrasts @ covariance @ contrasts.T, gaps)
    return means, covariance, float(chi2.sf(wald, len(levels) - 1))


def _direction(means: np.ndarray, stderr: np.ndarray, p: float) -> str:
    if math.isnan(p):
        return "unknown"
    gain = means[None, :] - means[:, None]  # [from, to]
    later = np.triu(np.ones_like(gain, dtype=bool), 1)
    bound = 2 * stderr + np.abs(means).max() * _ROUNDING
    if p > 0.05 or not (later & (np.abs(gain) > bound)).any():
        return "flat"
    for sign, monotone, with_a_turn in ((1, "rises", "rises_then_falls"), (-1, "falls", "falls_then_rises")):
        goes_on, goes_back = later & (sign * gain > bound), later & (sign * gain < -bound)
        if not goes_back.any():
            return monotone
        turn = int(np.argmax(sign * means))
        turns = goes_on[:turn, turn].any() and goes_back[turn, turn + 1 :].any()
        if turns and not goes_back[: turn + 1, : turn + 1].any() and not goes_on[turn:, turn:].any():
            return with_a_turn
    return "mixed"


def anova(eligible: pd.DataFrame) -> pd.DataFrame | None:
    """Analysis of variance of acc_mean over the factors with two levels or more, each level a category.

    Index: term ("method", "method:seq_len", ..., "residual"); columns: df, sum_sq, share (of the total sum of
    squares), F, p (both NaN for the residual, and everywhere if it is zero). Main effects and two-way interactions, type II,
    which on a full grid is the same as any other. A grid has one row a cell, so the interaction of all factors serves as the
    residual: the three-way one of three factors, the two-way one of two. None where the rows are not one for each combination of
    levels, where one factor only varies, so that nothing is left for the residual, and where all accuracies are equal.
    """
    factors = varied(eligible)
    cells = eligible[list(factors)]
    if len(factors) < 2 or len(cells) != cells.nunique().prod() or cells.duplicated().any():
        return None
    acc = eligible["acc_mean"].to_numpy("float64")
    if np.ptp(acc) <= np.abs(acc).max() * _ROUNDING:
        return None
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    data = pd.DataFrame({name: pd.Categorical(eligible[name].astype("str")) for name in factors})
    pairs = [] if len(factors) == 2 else [f"{a}:{b}" for a, b in itertools.combinations(factors, 2)]
    fit = ols(f"acc ~ {' + '.join([*factors, *pairs])}", data.assign(acc=acc)).fit()
    table = anova_lm(fit, typ=2).rename(index={"Residual": "residual"}, columns={"PR(>F)": "p"})
    table["share"] = table["sum_sq"] / ((acc - acc.mean()) ** 2).sum()
    nothing = table["share"] < _ROUNDING
    table.loc[nothing, ["sum_sq", "share"]] = 0.0
    if nothing["residual"]:  # F compares with it
        table[["F", "p"]] = math.nan
    return table.astype({"df": "int64"})[["df", "sum_sq", "share", "F", "p"]]


def importance(eligible: pd.DataFrame, anova_table: pd.DataFrame | None) -> dict[str, float]:
    """Return the share of accuracy's variation that each factor answers for, largest first.

    Of an analysis of variance: a main effect's share and half the share of each two-way interaction that the factor is in. These
    are Shapley effects (Owen 2014, "Sobol' indices and Shapley value"), which divide an interaction equally among its factors; they
    add up to one less the residual's share. Where there is no full grid: PED-ANOVA (Watanabe et al. 2023), which tells what it
    takes to be in the better half, over the levels seen; it adds up to one even where nothing has an effect. Empty with fewer
    than 20 rows, with one factor that varies, with equal accuracies, or where Optuna is not installed.
    """
    if anova_table is not None:
        terms = anova_table["share"].drop("residual")
        shares = {str(name): 0.0 for name in terms.index if ":" not in str(name)}
        for term, share in terms.items():
            members = str(term).split(":")
            for name in members:
                shares[name] += float(share) / len(members)
    else:
        shares = _ped_anova(eligible)
    return dict(sorted(shares.items(), key=lambda entry: (-entry[1], entry[0])))


def _ped_anova(eligible: pd.DataFrame) -> dict[str, float]:
    """Optuna's importance of the factors that vary, as the search sees them: levels in order, texts as categories."""
    factors = varied(eligible)
    rows = eligible.sort_values(list(factors))  # the order of the trials must not matter
    if len(rows) < _MIN_TRIALS or compared(rows["acc_mean"]).nunique() < 2 or len(factors) < 2:
        return {}
    try:
        import optuna
    except ModuleNotFoundError:  # it is needed to search, not to look at results
        return {}
    levels = pd.DataFrame({name: pd.factorize(rows[name], sort=True)[0] for name in factors})
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, highest)
        if name in NUMERIC
        else optuna.distributions.CategoricalDistribution(range(highest + 1))
        for name, highest in levels.max().items()
    }
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # or it announces the study on stderr
    try:
        study = optuna.create_study(direction="maximize")
    finally:
        optuna.logging.set_verbosity(verbosity)
    for value, params in zip(compared(rows["acc_mean"]), levels.to_dict("records"), strict=True):
        study.add_trial(optuna.trial.create_trial(value=value, params=params, distributions=distributions))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_TARGET_QUANTILE)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in shares.items()}


def correlations(eligible: pd.DataFrame) -> tuple[Correlation, ...]:
    """Pearson's correlation of acc_mean with each of _COLUMNS that has a value at all, with Fisher's 95% interval; and Kendall's.

    Columns with an infinite or missing value are not computed: leaving those rows out would leave out the extreme ones.
    Rows of CONTROL, far off the others, would make one and are left out, and those of methods that run no gradient pass, which
    have no gradient columns (grad_*), of these.
    Gradient columns are the same for all methods of one gradient pass. Where they are, to within the noise of repeating that pass,
    rows are not independent evidence, and the interval is that of the correlation over passes, each with the mean accuracy of its
    rows. Passes at one seq_len still share samples, so even that interval is rather too narrow.
    """
    eligible = eligible[eligible["method"] != CONTROL]
    present = [column for column in _COLUMNS if column in eligible and eligible[column].notna().any()]
    gradients = [column for column in present if column.startswith("grad_")]
    taken = eligible[gradients].notna().any(axis=1).groupby(eligible["method"]).transform("any")
    with_gradients = eligible[taken]
    return tuple(_correlation(with_gradients if c in gradients else eligible, c) for c in present)


def _correlation(rows: pd.DataFrame, column: str) -> Correlation:
    from scipy.stats import kendalltau

    data = rows[[column, "acc_mean"]].astype("float64").set_axis(["value", "acc"], axis="columns")
    n = len(data)
    if bad := int(n - np.isfinite(data["value"]).sum()):
        return Correlation(column, n, reason=Message("not_finite", {"column": column, "count": bad}))
    if n < MIN_ROWS:
        return Correlation(column, n, reason=Message("too_few", {"n": n, "least": MIN_ROWS}))
    for name, values in ((column, data["value"]), ("acc_mean", data["acc"])):
        if _is_constant(values):
            return Correlation(column, n, reason=Message("constant", {"column": name}))
    r, low, high = _pearson(data)
    tau = float(kendalltau(data["value"].to_numpy(), compared(data["acc"]).to_numpy()).statistic)
    texts = rows.get("calibration", pd.Series("", rows.index)).fillna("").to_numpy()  # "": the run's
    passes = data.groupby([*(rows[name].to_numpy("int64") for name in CALIBRATION), texts])
    within = passes["value"].max() - passes["value"].min()
    if not column.startswith("grad_") or len(passes) == n or within.max() > 1e-3 * np.ptp(data["value"]):
        return Correlation(column, n, r, low, high, tau=tau)
    means = passes.mean()
    if len(means) < MIN_ROWS or _is_constant(means["acc"]):
        return Correlation(column, n, r, passes=len(means), tau=tau)
    r_passes, low, high = _pearson(means)
    return Correlation(column, n, r, low, high, len(means), r_passes, tau)


def _is_constant(values: pd.Series) -> bool:
    return bool(np.ptp(values) <= _ROUNDING * np.abs(values).max())


def _pearson(data: pd.DataFrame) -> tuple[float, float, float]:
    from scipy.stats import pearsonr

    result = pearsonr(data["value"].to_numpy(), data["acc"].to_numpy())
    interval = result.confidence_interval(0.95)
    return float(result.statistic), float(interval.low), float(interval.high)


PAIR_COLUMNS = ("n", "points", "stderr_points", "p_value")
_ROUNDING_POINTS = 1e-6  # points


def method_pairs(
    trials: pd.DataFrame, eligible: pd.DataFrame, comparison: Comparison, generator: np.random.Generator
) -> pd.DataFrame:
    """Return the mean difference in acc_mean of every two methods over the configurations that both completed.

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
    item_stderrs = np.sqrt(comparison.variances - comparison.draw_variances)
    reads = {factor: methods_reading(trials, factor) for factor in varied(trials) if factor != "method"}
    means = compared(eligible.groupby("method")["acc_mean"].mean())
    order = means.sort_values(ascending=False, kind="stable").index
    rows = eligible.reset_index(drop=True)
    pairs, matches, weights = [], [], []
    for names in itertools.combinations(order, 2):
        common = [factor for factor, methods in reads.items() if methods.issuperset(names)]
        sides = (rows.loc[rows["method"] == name, common].rename_axis("row").reset_index() for name in names)
        matched = pd.merge(*sides, on=common) if common else pd.merge(*sides, how="cross")
        positions = [matched[row].to_numpy(np.int64) for row in ("row_x", "row_y")]
        pairs.append(
            {"first": names[0], "second": names[1]} | dict.fromkeys(PAIR_COLUMNS, math.nan) | {"n": len(matched)}
        )
        matches.append(positions)
        weights.append([np.bincount(side, minlength=len(rows)) / max(1, len(matched)) for side in positions])
    paired = comparison.basis == "paired"
    variances = comparison.variances_of([one - other for one, other in weights]) if paired else []
    errors = np.full((len(comparison.errors), len(pairs)), np.nan)
    for index, (pair, (first, second), (one, other)) in enumerate(zip(pairs, matches, weights, strict=True)):
        if not len(first) or not np.isfinite(item_stderrs[[*first, *second]]).all():
            continue
        draw_variance = float(np.square(one - other) @ comparison.draw_variances)
        if paired:
            item_variance, item_errors = variances[index], comparison.errors @ (one - other)
        else:  # the items of a method's configurations are the same, so their errors do not average out
            item_variance = sum(float(item_stderrs @ part) ** 2 for part in (one, other)) + draw_variance
            item_errors = generator.standard_normal(len(errors)) * math.sqrt(item_variance)
        gaps = pd.Series(accuracy[first] - accuracy[second])
        # One configuration may stand in several pairs: what counts are those of a side, of the side with the larger spread
        means = [gaps.groupby(side).mean() for side in (first, second)]
        spreads = [(float(m.var()) / len(m), len(m) - 1) for m in means if len(m) > 1]
        if comparable(gaps.mean()) < 0:
            pair |= {"first": pair["second"], "second": pair["first"]}
        pair["points"] = 100 * abs(gaps.mean())
        if spreads:  # else what another setting would change is not known
            spread, freedom = max(spreads)
            spread = max(0.0, spread - draw_variance)
            pair["stderr_points"] = 100 * math.sqrt(max(0.0, item_variance) + spread)
            errors[:, index] = 100 * (item_errors + math.sqrt(spread) * generator.standard_t(freedom, len(errors)))
    table = pd.DataFrame(pairs, columns=["first", "second", *PAIR_COLUMNS])
    if pairs:
        table["p_value"] = _corrected(table["points"].to_numpy(), errors)
    return table.set_index(["first", "second"])


def _corrected(observed: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """p of each observed difference, corrected for all of them. `errors`: [draws, differences]; NaN for one of unknown error."""
    values = np.full(len(observed), np.nan)
    tested = np.isfinite(errors).all(axis=0)
    sizes, draws = np.abs(errors[:, tested]), len(errors)
    if tested.any():
        single = (1 + (sizes >= np.abs(observed[tested]) - _ROUNDING_POINTS).sum(axis=0)) / (1 + draws)
        smaller = [np.searchsorted(np.sort(column), column) for column in sizes.T]
        least = 1 - np.max(smaller, axis=0) / draws  # the smallest single p of each draw
        values[tested] = (1 + (least[:, None] <= single).sum(axis=0)) / (1 + draws)
    return values
