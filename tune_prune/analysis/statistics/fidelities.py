"""The cheaper looks at a trial, and what each tells of its final accuracy: how far a filter by each may be trusted.

A trial is looked at in turn by KL, by perplexity and by growing slices of the zero-shot items: the rungs of successive halving
(ASHA), each of them a lower fidelity of the final accuracy. A rung ranks trials as they end (Kendall's tau-b), or it does not;
and a filter by it keeps the winner if it lets through what is at least as good as the winner there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import GOLD, TEXTS, SliceMeans
from tune_prune.analysis.input.rows import compared
from tune_prune.analysis.statistics.draws import SEED
from tune_prune.core.measures import ACCURACY_DIGITS

FEWEST = 5  # trials: fewer have no ranking to speak of
_ROWS = 512  # of the pairs of all trials that are compared at a time


@dataclass(frozen=True)
class Fidelity:
    """One rung; the trials are those of one draw that it was measured of."""

    measure: str  # a metric; "kl": the mean of kl_text and kl_tasks
    items: float  # the share of the zero-shot items that it has seen; NaN of a rung before them
    trials: int
    tau: float  # Kendall's tau-b with the final acc_mean, signed so that higher is better; NaN where one of both is constant
    stderr: float  # of tau, by jackknife over the trials
    rank: int | None  # trials at least as good there as the most accurate one, itself among them; None: it has no value
    seconds: float  # of its stage (`_seconds`); a slice has its items' share of that of all items; NaN where unknown

    @property
    def let_through(self) -> float:
        """The share of the trials that a filter by this rung has to let through to keep the most accurate one."""
        return math.nan if self.rank is None else self.rank / self.trials


def fidelities(trials: pd.DataFrame, slices: Callable[[str], SliceMeans | None]) -> tuple[Fidelity, ...]:
    """Every rung that at least FEWEST of the eligible `trials` (`rows.ranked`: the most accurate first) were measured of, in the
    order of a trial; `slices`: what the one in a folder scores on slices of the items.

    Of several draws of calibration samples the one that most trials are of: a filter compares within a draw.
    """
    if SEED in trials and len(trials):
        draw = trials[SEED].fillna(-1)
        trials = trials[draw == draw.value_counts(sort=False).sort_index().idxmax()]
    if len(trials) < FEWEST:
        return ()
    accuracy = _numbers(compared(trials["acc_mean"]))

    def rung(measure: str, values: np.ndarray, seconds: float, items: float = math.nan) -> Fidelity | None:
        known = ~np.isnan(values)
        if known.sum() < FEWEST:
            return None
        tau, stderr = kendall(values[known], accuracy[known])
        rank = int((values[known] >= values[0]).sum()) if known[0] else None
        return Fidelity(measure, items, int(known.sum()), tau, stderr, rank, seconds)

    metrics = {name: -_numbers(trials[name]) for name in (*TEXTS, "ppl") if name in trials}
    if set(TEXTS) <= set(metrics):
        metrics["kl"] = (metrics["kl_text"] + metrics["kl_tasks"]) / 2
    stages = {name: _seconds(trials, name) for name in ("kl", "perplexity", "zero_shot")}
    rungs = [rung(name, metrics[name], stages["kl"]) for name in (*TEXTS, "kl") if name in metrics]
    rungs += [rung("ppl", metrics["ppl"], stages["perplexity"])] if "ppl" in metrics else []

    means = [slices(folder) if folder else None for folder in trials["output_dir"]]
    first = next((mean.items for mean in means if mean is not None), np.array([]))
    same = [mean if mean is not None and np.array_equal(mean.items, first) else None for mean in means]
    for number, count in enumerate(first):
        share = float(count / first[-1])
        golds, right = (
            np.array([math.nan if mean is None else getattr(mean, name)[number] for mean in same])
            for name in ("gold_logprob", "accuracy")
        )
        rungs.append(rung(GOLD, golds, share * stages["zero_shot"], share))
        if number + 1 < len(first):  # the last is the final accuracy itself
            rungs.append(rung("acc_mean", right.round(ACCURACY_DIGITS), share * stages["zero_shot"], share))
    return tuple(one for one in rungs if one is not None)


def kendall(values: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Kendall's tau-b of two rankings [n] (Kendall 1945), and its standard error by the jackknife: the root of (n - 1) / n times
    the sum of squares that tau moves by when one of n is left out. NaN where a ranking is all ties, or is so without one of them.

    The pairs of a trial, concordant less discordant, are counted once; every tau without a trial follows from these counts.
    """
    first, second = (_places(ranking) for ranking in (values, others))
    n = len(first)
    agreeing = np.empty(n)
    for start in range(0, n, _ROWS):
        rows = slice(start, start + _ROWS)
        signs = (np.sign(ranks[rows, None] - ranks) for ranks in (first, second))
        agreeing[rows] = np.einsum("ij,ij->i", *signs, dtype=np.int32)
    apart = [n - np.bincount(ranks)[ranks] for ranks in (first, second)]  # pairs of each one that are no ties
    pairs = agreeing.sum() / 2, apart[0].sum() / 2, apart[1].sum() / 2
    if not pairs[1] or not pairs[2]:
        return math.nan, math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        without = (pairs[0] - agreeing) / np.sqrt((pairs[1] - apart[0]) * (pairs[2] - apart[1]))
    stderr = math.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    return float(pairs[0] / math.sqrt(pairs[1] * pairs[2])), stderr


def _places(ranking: np.ndarray) -> np.ndarray:
    places = np.unique(ranking, return_inverse=True)[1]
    return places.astype(np.int16 if len(ranking) < 2**15 else np.int32)  # differences of either fit into it


def _seconds(trials: pd.DataFrame, stage: str) -> float:
    """The median, without those that found the stage's result in the cache: less than a tenth of the longest."""
    times = _numbers(trials[f"{stage}_duration_s"]) if f"{stage}_duration_s" in trials else np.array([math.nan])
    return math.nan if np.isnan(times).all() else float(np.median(times[times >= np.nanmax(times) / 10]))


def _numbers(values: pd.Series) -> np.ndarray:
    return values.to_numpy(dtype=np.float64, na_value=np.nan)
