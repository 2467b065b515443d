"""Effects of the hyperparameters, against published figures, planted effects, hand computations and scipy or statsmodels."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.formula.api import ols

from tests.findings import published_findings
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.statistics import effects
from tune_prune.analysis.statistics.effects import grid_size, varied

METHODS = ("taylor", "layerwise", "blockwise")
SEQ_LENS = (16, 32, 64, 128, 256)
SAMPLES = (128, 256, 512)


def grid(
    methods: Sequence[str] = METHODS, seq_lens: Sequence[int] = SEQ_LENS, samples: Sequence[int] = SAMPLES
) -> pd.DataFrame:
    """One row a combination, typed as `rows.typed` types them; every accuracy is 0.5."""
    cells = list(itertools.product(methods, seq_lens, samples))
    rows = pd.DataFrame(cells, columns=["method", "seq_len", "num_samples"])
    rows["name"] = [f"{m}-s{s}-n{n}" for m, s, n in cells]
    return rows.assign(acc_mean=0.5, acc_mean_stderr=0.01).astype(
        {"method": "str", "seq_len": "Int64", "num_samples": "Int64"}
    )


def planted(rows: pd.DataFrame, noise: float = 0.0, seed: int = 0, **by_level: dict[Any, float]) -> pd.DataFrame:
    """The rows with an effect added for each level of a column, and normal noise."""
    total = np.random.default_rng(seed).normal(0, 1, len(rows)) * noise
    for column, effect in by_level.items():
        total = total + np.array([effect[level] for level in rows[column]])
    return rows.assign(acc_mean=rows["acc_mean"] + total)


@pytest.fixture(scope="module")
def llama() -> pd.DataFrame:
    return published_findings().models["Llama"].eligible


def test_published_methods_and_levels(llama: pd.DataFrame) -> None:
    methods = effects.method_table(llama).round(4)
    assert methods["mean"].to_dict() == {"blockwise": 0.5821, "taylor": 0.5412, "layerwise": 0.5323}
    best = methods.loc["blockwise"]
    assert (best["n"], best["min"], best["max"]) == (15, 0.5493, 0.5980)
    assert (best["std"], best["std_n"], best["best"]) == (0.0178, 0.0172, "blockwise-s64-n128")
    seq_lens = effects.level_table(llama, "seq_len")["mean"].round(4).to_dict()
    assert seq_lens == {16: 0.4988, 32: 0.5345, 64: 0.5699, 128: 0.5755, 256: 0.5805}
    samples = effects.level_table(llama, "num_samples")["mean"].round(4).to_dict()
    assert samples == {128: 0.5504, 256: 0.5515, 512: 0.5537}
    trends = [effects.trend(llama, factor) for factor in ("seq_len", "num_samples")]
    assert [(trend.direction, trend.best_level) for trend in trends] == [("rises", 256), ("flat", 512)]


def test_published_correlations(llama: pd.DataFrame) -> None:
    found = {entry.measure: entry for entry in effects.correlations(llama)}
    expected = {"ppl": -0.7972, "grad_mean_ratio": 0.6972, "grad_mean_range": 0.4659, "extreme_pruning_layers": -0.2940}
    assert {name: round(found[name].r or 0, 4) for name in expected} == expected
    norms = found["grad_norm_ratio"]
    assert (norms.r, norms.n, norms.low) == (None, 45, None)
    assert norms.reason == Message("not_finite", {"column": "grad_norm_ratio", "count": 3})
    assert "grad_std_ratio" not in found  # an empty column
    assert found["ppl"].passes is None
    assert found["grad_mean_ratio"].passes == found["grad_mean_range"].passes == 15


def test_method_table_by_hand() -> None:
    rows = grid(("a", "b"), (16, 32, 64), (8,)).assign(acc_mean=[0.1, 0.6, 0.2, 0.5, 0.5, 0.5])
    table = effects.method_table(rows)
    assert list(table.columns) == ["n", "mean", "std", "std_n", "min", "median", "max", "best"]
    assert list(table.index) == ["b", "a"]
    squares = 0.2**2 + 0.3**2 + 0.1**2
    numbers = [3, 0.3, math.sqrt(squares / 2), math.sqrt(squares / 3), 0.1, 0.2, 0.6]
    assert table.loc["a"].to_list()[:-1] == pytest.approx(numbers) and table.loc["a", "best"] == "a-s32-n8"
    assert table.loc["b", "best"] == "b-s16-n8"  # equal accuracies: the first name
    alone = effects.method_table(rows.iloc[:1])
    assert math.isnan(alone.loc["a", "std"]) and alone.loc["a", "std_n"] == 0  # a single row


@pytest.mark.parametrize(
    ("points", "direction", "best"),
    [
        ((0, 3, 6, 7, 8), "rises", 256),
        ((0, 6, 6, 6, 6), "rises", None),
        ((8, 7, 6, 3, 0), "falls", 16),
        ((0, 3, 8, 6, 5), "rises_then_falls", 64),
        ((8, 3, 0, 3, 7), "falls_then_rises", 16),
        ((0, 8, 1, 8, 1), "mixed", None),
        ((4, 0, 8, 6, 5), "mixed", None),
        ((5, 5, 5, 5, 5), "flat", None),
    ],
)
def test_trend_finds_the_planted_shape(points: tuple[float, ...], direction: str, best: int | None) -> None:
    shape = dict(zip(SEQ_LENS, np.array(points) / 100, strict=True))
    methods = {"taylor": 0.0, "layerwise": 0.1, "blockwise": -0.2}  # larger than the trend: must be taken out
    for noise in (0.0, 0.005):
        trend = effects.trend(planted(grid(), noise, seq_len=shape, method=methods), "seq_len")
        assert trend.direction == direction
        assert trend.spread_points == pytest.approx(np.ptp(points), abs=6 * 100 * noise / 3 + 1e-9)
        assert best in (None, trend.best_level)


def test_trend_is_of_the_level_and_not_of_what_it_was_tried_with() -> None:
    """The good method was tried at the long lengths only: plain level means rise by 10 points, the length does nothing."""
    tried = {"taylor": (16, 32), "layerwise": SEQ_LENS, "blockwise": (128, 256)}
    rows = grid()
    rows = rows[[row.seq_len in tried[row.method] for row in rows.itertuples()]]
    rows = planted(rows, 0.002, method={"taylor": 0.0, "layerwise": 0.1, "blockwise": 0.2})
    assert np.ptp(effects.level_table(rows, "seq_len")["mean"]) > 0.09
    trend = effects.trend(rows, "seq_len")
    assert (trend.direction, trend.spread_points < 1) == ("flat", True)


@pytest.mark.parametrize("n", [45, 30, 25], ids=["full grid", "30 of 45", "25 of 45"])
def test_trend_is_the_least_squares_contrast(n: int) -> None:
    shape = dict(zip(SEQ_LENS, (0, 0.02, 0.09, 0.05, 0.04), strict=True))
    rows = planted(grid(), 0.01, seq_len=shape).sample(n, random_state=1)
    trend = effects.trend(rows, "seq_len")
    data = rows.astype({"seq_len": "str", "num_samples": "str"})
    fit = ols("acc_mean ~ seq_len + method + num_samples", data).fit()
    contrast = fit.t_test("seq_len[T.64] - seq_len[T.16] = 0")
    assert trend.spread_points == pytest.approx(100 * contrast.effect.item())
    assert trend.stderr_points == pytest.approx(100 * contrast.sd.item())
    expected = stats.spearmanr(rows["seq_len"].to_numpy(int), rows["acc_mean"])
    assert (trend.spearman, trend.spearman_p) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.slow
def test_trend_of_noise_is_flat_but_for_one_in_twenty() -> None:
    """Two standard errors alone would find a trend in about a quarter of these, as five levels have ten pairs."""
    found = Counter(effects.trend(planted(grid(), 0.01, seed), "seq_len").direction != "flat" for seed in range(300))
    assert stats.binomtest(found[True], 300, 0.05).pvalue > 0.001


def sum_of_squares(rows: pd.DataFrame, columns: list[str]) -> float:
    """Return it for an effect on a full grid: the cell means over `columns`, less the effects of fewer columns."""
    parts = {(): np.full(len(rows), rows["acc_mean"].mean())}
    for size in range(1, len(columns) + 1):
        for some in itertools.combinations(columns, size):
            means = rows["acc_mean"].groupby([rows[column] for column in some]).transform("mean").to_numpy()
            parts[some] = means - sum(parts[fewer] for fewer in parts if set(fewer) < set(some))
    return float((parts[tuple(columns)] ** 2).sum())


def test_anova_is_the_decomposition_by_cell_means() -> None:
    rows = planted(grid(seq_lens=(16, 32, 64, 128)), 0.02, seq_len={16: 0, 32: 0.02, 64: 0.03, 128: 0.03})
    table = effects.anova(rows.sample(frac=1, random_state=0))
    assert table is not None
    assert list(table.columns) == ["df", "sum_sq", "share", "F", "p"]
    for term in table.index.drop("residual"):
        factors = term.split(":")
        assert table.loc[term, "sum_sq"] == pytest.approx(sum_of_squares(rows, factors))
    assert table.loc["residual", "sum_sq"] == pytest.approx(sum_of_squares(rows, list(varied(rows))))
    assert table["df"].to_list() == [2, 3, 2, 6, 4, 6, 12]
    assert table["share"].sum() == pytest.approx(1)
    f = table.loc["seq_len", "sum_sq"] / 3 / (table.loc["residual", "sum_sq"] / 12)
    assert table.loc["seq_len", ["F", "p"]].to_list() == pytest.approx([f, stats.f.sf(f, 3, 12)])
    two = planted(grid(samples=(8,)), 0.01)  # their interaction is the residual
    table = effects.anova(two)
    assert table is not None and table["df"].to_dict() == {"method": 2, "seq_len": 4, "residual": 8}
    assert table["sum_sq"]["residual"] == pytest.approx(sum_of_squares(two, ["method", "seq_len"]))


def test_an_additive_grid_has_no_interaction() -> None:
    lengths, methods = dict(zip(SEQ_LENS, (0, 1, 2, 3, 4), strict=True)), {"taylor": 0, "layerwise": 3, "blockwise": 6}
    rows = planted(grid(), seq_len=lengths, method=methods)
    table = effects.anova(rows)
    assert table is not None
    # variances over levels: 2 for lengths, 6 for methods
    assert table["share"].to_list() == pytest.approx([0.75, 0.25, 0, 0, 0, 0, 0])
    assert table["F"].isna().all() and table["p"].isna().all()  # no residual to compare with, but for rounding errors
    shares = effects.importance(rows, table)
    assert list(shares) == ["method", "seq_len", "num_samples"]
    assert list(shares.values()) == pytest.approx([0.75, 0.25, 0])


def test_an_interaction_counts_half_for_each_of_its_factors() -> None:
    """Length helps one method by as much as it harms the other, and neither does anything on average."""
    rows = grid(("taylor", "layerwise"), (16, 32), (8, 16))
    sign = np.where((rows["method"] == "taylor") == (rows["seq_len"] == 16), 1, -1)
    rows = rows.assign(acc_mean=0.5 + 0.1 * sign)
    table = effects.anova(rows)
    assert table is not None and table.loc["method:seq_len", "share"] == pytest.approx(1)
    halves = {"method": 0.5, "seq_len": 0.5, "num_samples": 0}
    assert effects.importance(rows, table) == pytest.approx(halves)


@pytest.mark.parametrize(
    "rows",
    [
        planted(grid(), 0.01).drop(index=7),
        pd.concat([planted(grid(), 0.01).drop(index=7), planted(grid(), 0.01).iloc[[8]]]),
        planted(grid(("taylor",), samples=(8,)), 0.01),
        planted(grid(), 0.01).iloc[:1],
        grid(),
    ],
    ids=["missing cell", "missing and double cell", "one factor", "one row", "all equal"],
)
def test_no_anova(rows: pd.DataFrame) -> None:
    assert effects.anova(rows) is None


def adaptive(seed: int, n: int, **by_level: dict[Any, float]) -> pd.DataFrame:
    """`n` of the 297 configurations of the adaptive search space, at random."""
    lengths, samples = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256), (32, 48, 64, 96, 128, 192, 256, 384, 512)
    return planted(grid(METHODS, lengths, samples), 0.01, seed, **by_level).sample(n, random_state=seed)


def test_importance_of_an_adaptive_search_finds_the_planted_factor(capfd: pytest.CaptureFixture[str]) -> None:
    methods = {"taylor": 0.0, "layerwise": 0.06, "blockwise": 0.03}
    first = Counter()
    for seed in range(20):
        rows = adaptive(seed, 40, method=methods)
        shares = effects.importance(rows, effects.anova(rows))
        assert shares.keys() == {"method", "seq_len", "num_samples"}
        assert sum(shares.values()) == pytest.approx(1)
        first[next(iter(shares))] += 1
    assert first["method"] >= 16
    assert capfd.readouterr() == ("", "")


def test_importance_says_nothing_where_there_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not effects.importance(adaptive(0, 19), None)
    assert not effects.importance(adaptive(0, 40).assign(acc_mean=0.5), None)
    assert not effects.importance(planted(grid(("taylor",), range(16, 48), (8,)), 0.01), None)
    assert effects.importance(adaptive(0, 20), None)
    monkeypatch.setitem(sys.modules, "optuna", None)  # not installed
    assert not effects.importance(adaptive(0, 20), None)


def test_correlation_and_its_interval() -> None:
    generator = np.random.default_rng(0)
    rows = planted(grid(), 0.01).assign(extreme_pruning_layers=generator.integers(0, 9, 45)).convert_dtypes()
    (found,) = effects.correlations(rows)
    x, y = rows["extreme_pruning_layers"].to_numpy(float), rows["acc_mean"].to_numpy(float)
    r = float(np.corrcoef(x, y)[0, 1])
    half = stats.norm.ppf(0.975) / math.sqrt(45 - 3)  # Fisher
    interval = [math.tanh(math.atanh(r) + sign * half) for sign in (-1, 1)]
    assert [found.r, found.low, found.high] == pytest.approx([r, *interval])
    assert (found.n, found.passes, found.reason) == (45, None, None)


def test_rows_of_one_gradient_pass_count_once() -> None:
    rows = planted(grid(samples=(8, 16)), 0.05, method={"taylor": 0, "layerwise": 0.1, "blockwise": 0.2})
    by_length = dict(zip(SEQ_LENS, (7.0, 15.0, 17.0, 18.0, 20.0), strict=True))
    rows["grad_mean_ratio"] = rows["seq_len"].map(by_length).astype("float64") + rows["num_samples"] / 8
    rows["grad_max_ratio"] = rows["grad_mean_ratio"] + np.arange(30)  # differs within a pass: not shared
    rows["ppl"] = rows["grad_mean_ratio"]  # measured for each row, whatever its value
    (ppl, shared, own) = effects.correlations(rows)
    means = rows.groupby(["seq_len", "num_samples"])[["grad_mean_ratio", "acc_mean"]].mean()
    expected = stats.pearsonr(means["grad_mean_ratio"], means["acc_mean"])
    interval = expected.confidence_interval(0.95)
    assert (shared.n, shared.passes, shared.r_passes) == (30, 10, pytest.approx(expected.statistic))
    assert (shared.low, shared.high) == pytest.approx((interval.low, interval.high))
    assert shared.r == pytest.approx(np.corrcoef(rows["grad_mean_ratio"], rows["acc_mean"])[0, 1])
    assert (own.passes, ppl.passes) == (None, None)
    assert (ppl.low or 0) > -1 and (ppl.high or 0) - (ppl.low or 0) < (shared.high or 0) - (shared.low or 0)
    alone = rows[rows["method"] == "taylor"]  # every pass has one row
    assert effects.correlations(alone)[1].passes is None
    few = rows[rows["seq_len"] < 256]  # 8 passes give no interval
    (_, eight, _) = effects.correlations(few)
    assert (eight.passes, eight.low, eight.high, eight.r is None) == (8, None, None, False)


def test_correlations_that_cannot_be_computed() -> None:
    rows = planted(grid(samples=(8,)), 0.01).assign(ppl=np.arange(15.0), removed_fraction=0.2, grad_std_ratio=math.nan)
    rows["grad_max_ratio"] = [math.inf, math.nan, *range(13)]
    found = effects.correlations(rows)
    assert [entry.measure for entry in found] == ["ppl", "grad_max_ratio", "removed_fraction"]
    assert [entry.reason for entry in found] == [
        None,
        Message("not_finite", {"column": "grad_max_ratio", "count": 2}),
        Message("constant", {"column": "removed_fraction"}),
    ]
    assert all(entry.r is None and entry.low is None for entry in found[1:])
    assert effects.correlations(rows.iloc[2:11])[0].reason == Message("too_few", {"n": 9, "least": 10})
    ten = effects.correlations(rows.iloc[2:12])[0]
    assert ten.n == 10 and ten.r is not None
    control = rows.iloc[:2].assign(method="random", acc_mean=0.1, ppl=1e6)  # far off, and no part of any
    assert effects.correlations(pd.concat([rows.iloc[2:12], control]))[0] == ten
    assert effects.correlations(control) == ()
    flat = effects.correlations(rows.assign(acc_mean=0.5))[0]
    assert flat.reason == Message("constant", {"column": "acc_mean"})


def test_trend_with_one_row_a_level_uses_the_rows_own_errors() -> None:
    rows = planted(grid(("taylor",), samples=(8,)), seq_len=dict.fromkeys(SEQ_LENS, 0.0) | {32: 0.1, 64: 0.02})
    rows = rows.assign(acc_mean_stderr=[0.03, 0.04, 0.03, 0.03, 0.03]).iloc[[3, 1, 4, 0, 2]]
    trend = effects.trend(rows, "seq_len")
    assert (trend.direction, trend.best_level) == ("flat", 32)  # 10 points against 5
    assert (trend.spread_points, trend.stderr_points) == (pytest.approx(10), pytest.approx(5))
    sharp = effects.trend(rows.assign(acc_mean_stderr=rows["acc_mean_stderr"] / 10), "seq_len")
    assert sharp.direction == "rises_then_falls"
    unknown = effects.trend(rows.assign(acc_mean_stderr=math.nan), "seq_len")
    assert (unknown.direction, math.isnan(unknown.stderr_points)) == ("unknown", True)


def test_trend_where_rows_are_too_few_for_all_factors() -> None:
    """8 rows cannot carry 5 lengths, 2 methods and 3 sample counts and leave something: the methods are taken out."""
    rows = planted(grid(), 0.002, seq_len=dict(zip(SEQ_LENS, (0, 0.1, 0.2, 0.3, 0.4), strict=True)))
    rows = rows.iloc[[0, 4, 8, 9, 13, 17, 21, 25]]
    trend = effects.trend(rows, "seq_len")
    fit = ols("acc_mean ~ seq_len + method", rows.astype({"seq_len": "str"})).fit()
    contrast = fit.t_test("seq_len[T.256] - seq_len[T.16] = 0")
    assert (trend.direction, trend.stderr_points) == ("rises", pytest.approx(100 * contrast.sd.item()))


def test_a_full_grid_has_what_only_a_refit_reads_among_refits_alone():
    points = [(m, s, "none", 0.1) for m in ("taylor", "fisher") for s in (16, 64)]
    points += [(m, s, "least_squares", d) for m, s, _, _ in points for d in (0.1, 0.3, 1.0)]
    columns = ["method", "seq_len", "compensation", "damping"]
    rows = pd.DataFrame(points, columns=columns).assign(
        num_samples=8, removal_divisor=5, shape="free", calibration="c", refit_tokens=2048, steps=1, pruning_duration_s=1.0,
        importance_duration_s=1.0, removal_power=1.0, normalization="none", layer_cap=1.0, whole_experts=1.0, recovery_rank=8,
    )  # fmt: skip
    assert grid_size(rows) == len(rows) == 16
    assert grid_size(rows[rows["compensation"] == "none"]) == 4
    assert grid_size(rows[rows["compensation"] != "none"]) == 12
    trained = [rows.assign(recovery="lora", recovery_steps=steps, recovery_rate=0.1) for steps in (5, 10)]
    both = pd.concat(
        [rows.assign(recovery="none", recovery_steps=100, recovery_rate=0.001), *trained], ignore_index=True
    )
    assert grid_size(both) == len(both) == 48


def test_passes_of_several_texts_are_told_apart() -> None:
    noise, rows = np.random.default_rng(1), []
    for text, seq_len, samples in itertools.product(("a", "b"), (64, 128), (128, 256)):
        ratio, level = noise.uniform(2, 4), noise.normal(0.5, 0.03)  # of one pass, which three methods share
        own = {"seq_len": seq_len, "num_samples": samples, "calibration": text, "grad_mean_ratio": ratio}
        rows += [{"method": method, "acc_mean": level + noise.normal(0, 0.001), **own} for method in "xyz"]
    (found,) = effects.correlations(pd.DataFrame(rows))
    assert (found.n, found.passes) == (24, 8)
