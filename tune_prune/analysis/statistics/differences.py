"""How far apart two trials are, item by item where both answered the same items, else by their standard errors.

From it come what models lose with each other's best configurations (`transfer`), and what a refit or a training changes
(`changes`): each is kept where it is better on held-out samples of its own text, which says nothing of other text, so it is judged
there: where KL(dense || pruned) has risen, and where right choices have become less likely that are likelier to the dense model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import GOLD, TEXTS, gold_logprobs, kl_blocks, read_items
from tune_prune.analysis.input.rows import plain_value, plain_values, without_draw
from tune_prune.analysis.statistics.draws import mean_of_draws
from tune_prune.core.config import PruningConfig
from tune_prune.core.measures import comparable

Items = Callable[[str], "pd.Series | None"]  # `read_items`, or an ItemReader
FEW_ITEMS = 5  # of a task: with so few all differences are often equal, and their variance, of 0, says nothing


def few_items_variance(counts: Iterable[int]) -> float:
    """Return what tasks of FEW_ITEMS or fewer, of tasks with so many items, add to the variance of acc_mean: the greatest that a
    mean of so many scores can have."""
    counts = list(counts)
    return sum(0.25 / n for n in counts if n <= FEW_ITEMS) / len(counts) ** 2


def paired_difference(first: pd.Series, second: pd.Series) -> tuple[float, float] | None:
    """Return the difference in acc_mean of two trials on the same items and its standard error; None if the items differ.

    With d_i the difference of item i's scores and n_t the items of task t, of T tasks: mean_t mean_i d_i, and
    sqrt(sum_t var(d) / n_t) / T with the n_t - 1 variance, tasks being independent samples. NaN for a task of one item.
    """
    if not first.index.equals(second.index):
        return None
    by_task = (first.astype("float64") - second).groupby(level="task")
    variances = by_task.var(ddof=1) / by_task.count()
    return float(by_task.mean().mean()), math.sqrt(variances.sum(skipna=False)) / len(variances)


def paired_gap(first: pd.Series, second: pd.Series) -> tuple[float, float] | None:
    """Return the mean difference in any measure and its error, by item or by block of text (`items.kl_blocks`), whose mean is
    over tokens. None where items or blocks differ; NaN for the error of one block.

    Of blocks it is the error of a ratio, as of KL itself (evaluation/divergence.py): of the differences' mean over tokens.
    """
    if not first.index.equals(second.index):
        return None
    if first.index.names[0] == "task":
        return paired_difference(first, second)
    gaps, tokens = (first - second).to_numpy(), first.index.get_level_values(1).to_numpy()
    n, mean = len(gaps), float((gaps @ tokens) / tokens.sum())
    variance = n / (n - 1) * np.square(tokens * (gaps - mean)).sum() / tokens.sum() ** 2 if n > 1 else math.nan
    return mean, math.sqrt(variance)


def paired_freedom(first: pd.Series, second: pd.Series) -> float:
    """Return the degrees of freedom of the error of `paired_gap`, of the same items or blocks: blocks - 1; over tasks, each with
    items - 1, those of a sum of variances (Satterthwaite, Biometrics Bulletin 1946). Infinite for an error of 0, NaN for one that
    is NaN."""
    if first.index.names[0] != "task":
        return len(first) - 1 or math.nan
    by_task = (first.astype("float64") - second).groupby(level="task")
    counts = by_task.count()
    variances = by_task.var(ddof=1) / counts
    squares = float((variances**2 / (counts - 1)).sum(skipna=False))
    return float(variances.sum()) ** 2 / squares if squares else math.inf


def _observed(folders: Iterable[str], measure: str) -> pd.Series | None:
    """Return a measure by item (GOLD) or block of text (TEXTS), averaged over trials of several draws, whose `folders` these are;
    None where one has none, or others."""
    return _mean([gold_logprobs(folder) if measure == GOLD else kl_blocks(folder).get(measure) for folder in folders])


def _mean(series: Sequence[pd.Series | None]) -> pd.Series | None:
    """Return the mean of several; None where one is not there, or of other items or blocks."""
    known = [blocks for blocks in series if blocks is not None]
    same = len(known) == len(series) and all(blocks.index.equals(known[0].index) for blocks in known)
    return sum(known[1:], known[0]) / len(known) if same else None


@dataclass(frozen=True)
class Difference:
    """acc_mean of one trial minus that of another, in percentage points."""

    points: float
    stderr_points: float
    basis: str  # "paired": same items; "unpaired": each trial's own standard error; "unknown": there is none


def difference(first: Mapping[str, Any], second: Mapping[str, Any], items: Items = read_items) -> Difference:
    """Return how far the trial of row `first` is above that of row `second`, which must be of the same model; rows of
    configurations (`draws`) have the errors of their draws beside those of the items, which both share."""
    folder = first["output_dir"]
    # The same trial. Not by its folder alone: a foreign file may name one folder for all.
    if folder and folder == second["output_dir"] and first["configuration"] == second["configuration"]:
        return Difference(0.0, 0.0, "paired")
    of_draws = math.hypot(*(float(np.nan_to_num(row.get("draw_stderr", 0.0))) for row in (first, second)))
    first_items, second_items = items(first["output_dir"]), items(second["output_dir"])
    if first_items is not None and second_items is not None:
        paired = paired_difference(first_items, second_items)
        if paired is not None and math.isfinite(paired[1]):
            alike = (first_items == second_items).all()
            few = 0.0 if alike else few_items_variance(first_items.groupby(level="task").size())
            return Difference(100 * paired[0], 100 * math.hypot(paired[1], of_draws, math.sqrt(2 * few)), "paired")
    stderr = math.hypot(first["acc_mean_stderr"], second["acc_mean_stderr"])
    basis = "unpaired" if math.isfinite(stderr) else "unknown"
    return Difference(100 * (first["acc_mean"] - second["acc_mean"]), 100 * stderr, basis)


@dataclass(frozen=True)
class Transfer:
    """Losses in percentage points, as plain data: {"config": what was tried, "name": of the row, "evaluated": True, "acc_mean",
    "acc_mean_stderr", "ppl", "loss_points", "loss_points_stderr", "loss_basis"}, or {"config": name, "evaluated": False}."""

    losses: Mapping[str, Mapping[str, Mapping[str, Any]]]  # model -> model whose best is used (itself too) -> loss
    # of the highest mean acc_mean over the models, its fields and "models": what each loses to its own most accurate; of models
    # that were trained and others only the others count. "config" is None where no configuration was evaluated on all of these, and
    # where there is one such model
    best_for_all: Mapping[str, Any]


def transfer(eligible: Mapping[str, pd.DataFrame], best: Mapping[str, pd.Series], items: Items) -> Transfer:
    """Return what models lose, from the eligible rows of each, the most accurate first, and its chosen one."""
    # of a configuration that is there twice the first row: the more accurate
    rows = {label: {_tried(row): row for _, row in of_model[::-1].iterrows()} for label, of_model in eligible.items()}
    # of a model that was trained what another was tried with that was not, and the other way round
    cut = {label: {config.untrained(): row for config, row in of_model.items()} for label, of_model in rows.items()}
    trained = {label for label, of_model in rows.items() if next(iter(of_model)).recovery != PruningConfig.recovery}

    def loss(label: str, config: PruningConfig, best_row: pd.Series, other: str) -> dict[str, Any]:
        alike = (label in trained) == (other in trained)
        config = config if alike else config.untrained()
        row = (rows if alike else cut)[label].get(config)
        if row is None:
            return {"config": config.name, "evaluated": False}
        same = row["name"] == best_row["name"]
        gap = Difference(0.0, 0.0, "paired") if same else difference(best_row, row, items)
        return {
            "config": config.name,
            "name": row["name"],
            "evaluated": True,
            **plain_values(row, "acc_mean", "acc_mean_stderr", "ppl"),
            "loss_points": gap.points,
            "loss_points_stderr": plain_value(gap.stderr_points),
            "loss_basis": gap.basis,
        }

    losses = {
        label: {other: loss(label, _tried(theirs), best_row, other) for other, theirs in best.items()}
        for label, best_row in best.items()
    }
    compared = [label for label in rows if label not in trained] if trained != set(rows) else list(rows)
    shared = set.intersection(*(set(rows[label]) for label in compared))
    if not shared or len(compared) == 1:
        return Transfer(losses, {"config": None, "num_candidates": 0})

    def rank(config: PruningConfig) -> tuple[float, float, int, str]:
        of_config = [rows[label][config] for label in compared]
        ppl = sum(math.inf if pd.isna(row["ppl"]) else row["ppl"] for row in of_config)
        tokens = config.seq_len * config.num_samples
        return -comparable(math.fsum(row["acc_mean"] for row in of_config)), ppl, tokens, config.name

    config = min(shared, key=rank)
    models = {label: loss(label, config, eligible[label].iloc[0], label) for label in compared}
    stderrs = [entry["acc_mean_stderr"] for entry in models.values()]
    ratios = {float(rows[label][config]["pruning_ratio"]) for label in compared}
    best_for_all = {
        "config": config.name,
        **config.to_dict(),
        "pruning_ratio": ratios.pop() if len(ratios) == 1 else None,
        "num_candidates": len(shared),
        "acc_mean": math.fsum(entry["acc_mean"] for entry in models.values()) / len(models),
        # the models answer the same items, so their errors go together: an upper bound of the mean's
        "acc_mean_stderr": None if None in stderrs else math.fsum(stderrs) / len(models),
        "models": models,
    }
    return Transfer(losses, best_for_all)


def _tried(row: Mapping[str, Any]) -> PruningConfig:
    """Return what was tried, apart from pruning ratio and draw: models that differ in those are compared by the rest."""
    return replace(without_draw(row["configuration"]), pruning_ratio=PruningConfig.pruning_ratio)


# By the hyperparameter that switches it on: what it is called, and the metric of a trial that says how much of the error is left
# on held-out samples of its own text.
_KINDS = {"compensation": ("refit", "refit_error"), "recovery": ("training", "recovery_error")}
LEVEL = 0.05
JUDGED = (*TEXTS, GOLD)
_OF_RUN = -1  # a draw whose seed is that of the run
# Eligible configurations and, of those with several draws, their trials by index.
WithDraws = tuple[pd.DataFrame, Mapping[int, pd.DataFrame]]


@dataclass(frozen=True)
class Shift:
    """A change of one measure, in nats: means over the draws that both have, their difference, its standard error, and the chance
    of one as bad as this where there is no difference."""

    before: float
    after: float
    change: float
    stderr: float
    p: float


@dataclass(frozen=True, eq=False)
class Change:
    """A configuration without (`before`) and with (`after`) its refit or training: rows with acc_mean, its error and ppl over the
    `draws` that both have."""

    kind: str  # "refit" or "training"
    before: pd.Series
    after: pd.Series
    draws: int
    gain: float  # in acc_mean, percentage points
    gain_stderr: float
    shifts: Mapping[str, Shift]  # by measure: of JUDGED those that all its trials have
    own_text: float  # what is left of the error on held-out samples of its own text; NaN where it is not recorded
    worse: tuple[str, ...] = ()  # the measures that are significantly so


def changes(changed: WithDraws, untrained: WithDraws, dense_gold: float = math.nan) -> tuple[Change, ...]:
    """Return the changes of the configurations in `changed` with a refit and no training, or with a training, beside the same ones
    without it in `untrained`, which are `changed` themselves where nothing is trained; the order is that of `changed`.
    `dense_gold`: GOLD of the dense model."""
    return judged(list(_pairs(changed, untrained, dense_gold)))


def judged(all_changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes with what is `worse`: at a family-wise 5% (Holm 1979) over all measures of all of them."""
    tests = [(shift.p, i, name) for i, c in enumerate(all_changes) for name, shift in c.shifts.items()]
    tests = sorted(test for test in tests if math.isfinite(test[0]))
    worse = set()
    for rank, (p, index, name) in enumerate(tests):
        if p * (len(tests) - rank) > LEVEL:
            break
        worse.add((index, name))
    return tuple(replace(c, worse=tuple(n for n in JUDGED if (i, n) in worse)) for i, c in enumerate(all_changes))


def _pairs(changed: WithDraws, untrained: WithDraws, dense_gold: float) -> Iterator[Change]:
    without = {without_draw(config): place for place, config in untrained[0]["configuration"][::-1].items()}
    for place, row in changed[0].iterrows():
        config = without_draw(row["configuration"])
        switch = "recovery" if config.recovery != PruningConfig.recovery else "compensation"
        other = without.get(replace(config, **{switch: getattr(PruningConfig, switch)}).canonical())
        if other is None or getattr(config, switch) == getattr(PruningConfig, switch):
            continue
        first, second = (
            part.set_index(part["seed"].fillna(_OF_RUN))
            for part in (draws.get(at, rows.loc[[at]]) for (rows, draws), at in ((untrained, other), (changed, place)))
        )
        if untrained[0].loc[other, "draw_share"] == 0:  # of no draw: it is what each of them is without
            first = first.loc[[_OF_RUN] * len(second)].set_index(second.index)
        both = first.index.intersection(second.index)
        if not len(both):
            continue
        kind, metric = _KINDS[switch]
        before, after = first.loc[both], second.loc[both]
        shifts = {name: shift for name in JUDGED if (shift := _shift(before, after, name)) is not None}
        if GOLD in shifts and shifts[GOLD].after >= dense_gold:  # nearer to the dense model, not worse
            shifts[GOLD] = replace(shifts[GOLD], p=1.0)
        own_text = float(after[metric].mean()) if metric in after else math.nan
        pair = _over(untrained[0].loc[other], first, before), _over(row, second, after)
        yield Change(kind, *pair, len(both), *_gain(before, after), shifts, own_text)


def _over(configuration: pd.Series, draws: pd.DataFrame, some: pd.DataFrame) -> pd.Series:
    """Return the row of a configuration with such draws, with what the table shows of it over `some` of them."""
    if len(some) == len(draws):
        return configuration
    shown = {name: mean_of_draws(some[name]) for name in ("acc_mean", "acc_mean_stderr", "ppl")}
    return pd.concat([configuration.drop(list(shown)), pd.Series(shown)])


def _gain(before: pd.DataFrame, after: pd.DataFrame) -> tuple[float, float]:
    """Return the gain in acc_mean, in points, of trials of the same draws, and its error, which is made as that of `_shift`."""
    gaps = after["acc_mean"].to_numpy(np.float64) - before["acc_mean"].to_numpy(np.float64)
    first, second = (_mean([read_items(folder) for folder in part["output_dir"]]) for part in (before, after))
    paired = None if first is None or second is None else paired_difference(second, first)
    if paired is not None and math.isfinite(paired[1]):
        of_items = paired[1] ** 2
    else:
        of_items = sum(float(part["acc_mean_stderr"].mean()) ** 2 for part in (before, after))
    return 100 * float(gaps.mean()), 100 * math.sqrt(of_items + _draws_variance(gaps))


def _draws_variance(gaps: np.ndarray) -> float:
    """Return what draws add to the variance of the mean of their differences."""
    return float(gaps.var(ddof=1)) / len(gaps) if len(gaps) > 1 else 0.0


def _shift(before: pd.DataFrame, after: pd.DataFrame, measure: str) -> Shift | None:
    """Return the shift of a measure between trials of the same draws, in their order. The error is that of the same items or
    blocks, averaged over draws, and, of several draws, of what their differences differ by; its degrees of freedom are those of
    both (Satterthwaite 1946)."""
    from scipy.stats import t

    if measure not in before or measure not in after:
        return None
    gaps = after[measure].to_numpy(np.float64) - before[measure].to_numpy(np.float64)
    if not np.isfinite(gaps).all():
        return None
    change, of_draws = float(gaps.mean()), _draws_variance(gaps)
    first, second = (_observed(part["output_dir"], measure) for part in (before, after))
    paired = None if first is None or second is None else paired_gap(second, first)
    if paired is not None:
        of_items, items_freedom = paired[1] ** 2, paired_freedom(second, first)
    else:  # an error that is known by its size alone, of other items or blocks, is taken for one of many
        errors = [part.get(f"{measure}_stderr") for part in (before, after)]
        of_items = float(sum(math.nan if error is None else error.mean() ** 2 for error in errors))
        items_freedom = math.inf
    stderr = math.sqrt(of_items + of_draws)
    squares = of_items**2 / items_freedom + of_draws**2 / max(1, len(gaps) - 1)
    freedom = stderr**4 / squares if squares else math.inf
    worse = -change if measure == GOLD else change
    p = float(t.sf(worse / stderr, freedom)) if stderr > 0 else 1.0 if worse <= 0 else math.nan
    return Shift(float(before[measure].mean()), float(after[measure].mean()), change, stderr, p)
