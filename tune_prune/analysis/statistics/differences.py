"""How far apart two trials are, item by item where both answered the same items, else by their standard errors; what models
lose with each other's best configurations, and the best single configuration for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import read_items
from tune_prune.analysis.input.measures import GOLD, TEXTS, gold_logprobs, kl_blocks
from tune_prune.analysis.input.rows import config_of, configuration_of, plain_value, plain_values
from tune_prune.analysis.statistics.draws import DrawVariance, added
from tune_prune.core.config import PruningConfig
from tune_prune.core.measures import comparable

Items = Callable[[str], "pd.Series | None"]  # `read_items`, or an ItemReader
FEW_ITEMS = 5  # of a task: with so few all differences are often equal, and their variance, of 0, says nothing


def few_items_variance(counts: Iterable[int]) -> float:
    """What tasks of FEW_ITEMS or fewer, of tasks with so many items, add to the variance of acc_mean: the greatest that a mean of
    so many scores can have."""
    counts = list(counts)
    return sum(0.25 / n for n in counts if n <= FEW_ITEMS) / len(counts) ** 2


def paired_difference(first: pd.Series, second: pd.Series) -> tuple[float, float] | None:
    """Difference in acc_mean of two trials on the same items and its standard error; None if the items differ.

    With d_i the difference of item i's scores and n_t the items of task t, of T tasks: mean_t mean_i d_i, and
    sqrt(sum_t var(d) / n_t) / T with the n_t - 1 variance, tasks being independent samples. NaN for a task of one item.
    """
    if not first.index.equals(second.index):
        return None
    by_task = (first.astype("float64") - second).groupby(level="task")
    variances = by_task.var(ddof=1) / by_task.count()
    return float(by_task.mean().mean()), math.sqrt(variances.sum(skipna=False)) / len(variances)


def paired_gap(first: pd.Series, second: pd.Series) -> tuple[float, float] | None:
    """The same of any measure, by item or by block of text (`measures.kl_blocks`), whose mean is over tokens. None where items or
    blocks differ; NaN for the error of one block.

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
    """Degrees of freedom of the error of `paired_gap`, of the same items or blocks: blocks - 1; over tasks, each with items - 1,
    those of a sum of variances (Satterthwaite, Biometrics Bulletin 1946). Infinite for an error of 0, NaN for one that is NaN."""
    if first.index.names[0] != "task":
        return len(first) - 1 or math.nan
    by_task = (first.astype("float64") - second).groupby(level="task")
    counts = by_task.count()
    variances = by_task.var(ddof=1) / counts
    squares = float((variances**2 / (counts - 1)).sum(skipna=False))
    return float(variances.sum()) ** 2 / squares if squares else math.inf


def measure_gaps(
    eligible: pd.DataFrame,
    draws: Mapping[int, pd.DataFrame],
    variances: Mapping[str, DrawVariance],
    gold: Items = gold_logprobs,
    control: Mapping[str, DrawVariance] = MappingProxyType({}),
) -> pd.DataFrame:
    """How far each row is from the best one in gold_logprob_mean (highest), kl_text and kl_tasks (lowest): `<measure>_gap`, own
    minus that of the best, in nats, and `<measure>_gap_stderr`. Index: that of `eligible`. No columns for what no row has.

    Standard errors are of the differences on the same items or blocks, averaged over the `draws` of a row, where both have them,
    and of the `variances` between draws (`control`: those of its rows); else of each one's own, which have both. `gold`:
    `gold_logprobs`, or a GoldReader.
    """
    found = {}
    for measure, sign in {GOLD: 1, **dict.fromkeys(TEXTS, -1)}.items():
        values = sign * eligible[measure] if measure in eligible else pd.Series(dtype="float64")
        if not np.isfinite(values).any():
            continue
        best = values.where(np.isfinite(values)).idxmax()
        folders = {
            row: draws[row]["output_dir"] if row in draws else [own] for row, own in eligible["output_dir"].items()
        }
        blocks = {row: mean_observed(own, measure, gold) for row, own in folders.items()}
        of_draws = added(eligible, variances.get(measure), control.get(measure)).fillna(0 * eligible[measure])
        found[f"{measure}_gap"] = eligible[measure] - eligible.loc[best, measure]
        own = eligible.get(f"{measure}_stderr", pd.Series(math.nan, eligible.index))
        found[f"{measure}_gap_stderr"] = pd.Series(
            {row: 0.0 if row == best else _gap_stderr(own, blocks, of_draws, row, best) for row in eligible.index}
        )
    return pd.DataFrame(found, eligible.index)


def mean_observed(folders: Iterable[str], measure: str, gold: Items = gold_logprobs) -> pd.Series | None:
    """A measure by item (GOLD) or block of text (TEXTS), averaged over trials of several draws, which `folders` are of; None
    where one has none, or others."""
    return mean_series([gold(folder) if measure == GOLD else kl_blocks(folder).get(measure) for folder in folders])


def mean_series(found: Sequence[pd.Series | None]) -> pd.Series | None:
    """Their mean; None where one is not there, or of other items or blocks."""
    known = [blocks for blocks in found if blocks is not None]
    same = len(known) == len(found) and all(blocks.index.equals(known[0].index) for blocks in known)
    return sum(known[1:], known[0]) / len(known) if same else None


def _gap_stderr(
    own: pd.Series, blocks: Mapping[Any, pd.Series | None], of_draws: pd.Series, row: Any, best: Any
) -> float:
    first, second = blocks[row], blocks[best]
    paired = None if first is None or second is None else paired_gap(first, second)
    if paired is None:
        return math.hypot(own[row], own[best])
    return float(math.sqrt(paired[1] ** 2 + of_draws[row] + of_draws[best]))


@dataclass(frozen=True)
class Difference:
    """acc_mean of one trial minus that of another, in percentage points."""

    points: float
    stderr_points: float
    basis: str  # "paired": same items; "unpaired": each trial's own standard error; "unknown": there is none


def difference(first: Mapping[str, Any], second: Mapping[str, Any], items: Items = read_items) -> Difference:
    """How far the trial of row `first` is above that of row `second`, which must be of the same model; rows of configurations
    (`draws`) have the errors of their draws beside those of the items, which both share."""
    folder = first["output_dir"]
    # The same trial. Not by its folder alone: a foreign file may name one folder for all.
    if folder and folder == second["output_dir"] and config_of(first) == config_of(second):
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
    """From the eligible rows of each model, the most accurate first, and its chosen one."""
    # of a configuration that is there twice the first row: the more accurate
    rows = {label: {_tried(row): row for _, row in found[::-1].iterrows()} for label, found in eligible.items()}
    # of a model that was trained what another was tried with that was not, and the other way round
    cut = {label: {config.untrained(): row for config, row in found.items()} for label, found in rows.items()}
    trained = {label for label, found in rows.items() if next(iter(found)).recovery != PruningConfig.recovery}

    def loss(label: str, config: PruningConfig, own: pd.Series, other: str) -> dict[str, Any]:
        if (label in trained) != (other in trained):
            config = config.untrained()
            row = cut[label].get(config)
        else:
            row = rows[label].get(config)
        if row is None:
            return {"config": config.name, "evaluated": False}
        gap = Difference(0.0, 0.0, "paired") if row["name"] == own["name"] else difference(own, row, items)
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
        label: {other: loss(label, _tried(theirs), own, other) for other, theirs in best.items()}
        for label, own in best.items()
    }
    if trained != set(rows):
        eligible = {label: found for label, found in eligible.items() if label not in trained}
        rows = {label: rows[label] for label in eligible}
    shared = set.intersection(*(set(of_model) for of_model in rows.values()))
    if not shared or len(rows) == 1:
        return Transfer(losses, {"config": None, "num_candidates": 0})

    def rank(config: PruningConfig) -> tuple[float, float, int, str]:
        found = [of_model[config] for of_model in rows.values()]
        ppl = sum(math.inf if pd.isna(row["ppl"]) else row["ppl"] for row in found)
        tokens = config.seq_len * config.num_samples
        return -comparable(math.fsum(row["acc_mean"] for row in found)), ppl, tokens, config.name

    config = min(shared, key=rank)
    models = {label: loss(label, config, of_model.iloc[0], label) for label, of_model in eligible.items()}
    stderrs = [entry["acc_mean_stderr"] for entry in models.values()]
    ratios = {float(of_model[config]["pruning_ratio"]) for of_model in rows.values()}
    return Transfer(
        losses,
        {
            "config": config.name,
            **config.to_dict(),
            "pruning_ratio": ratios.pop() if len(ratios) == 1 else None,
            "num_candidates": len(shared),
            "acc_mean": math.fsum(entry["acc_mean"] for entry in models.values()) / len(models),
            # the models answer the same items, so their errors go together: an upper bound of the mean's
            "acc_mean_stderr": None if None in stderrs else math.fsum(stderrs) / len(models),
            "models": models,
        },
    )


def _tried(row: Mapping[str, Any]) -> PruningConfig:
    """What was tried, apart from pruning ratio and draw: models that differ in those are compared by the rest."""
    return replace(configuration_of(row), pruning_ratio=PruningConfig.pruning_ratio)
