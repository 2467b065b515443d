"""What models lose with each other's best configurations, and the best single configuration for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import config_of, plain_value, plain_values
from tune_prune.analysis.statistics.differences import Difference, Items, difference
from tune_prune.core.config import PruningConfig


@dataclass(frozen=True)
class Transfer:
    """Losses in percentage points, as plain data: {"config": name, "evaluated": True, "acc_mean", "acc_mean_stderr", "ppl",
    "loss_points", "loss_points_stderr", "loss_basis"}, or {"config": name, "evaluated": False}."""

    losses: Mapping[str, Mapping[str, Mapping[str, Any]]]  # model -> model whose best is used (itself too) -> loss
    # of the highest mean acc_mean over the models, its fields and "models": what each loses to its own most accurate;
    # "config" is None where no configuration was evaluated on all
    best_for_all: Mapping[str, Any]


def transfer(eligible: Mapping[str, pd.DataFrame], best: Mapping[str, pd.Series], items: Items) -> Transfer:
    """From the eligible rows of each model, the most accurate first, and its chosen one."""
    # of a configuration that is there twice the first row: the more accurate
    rows = {label: {_tried(row): row for _, row in found[::-1].iterrows()} for label, found in eligible.items()}

    def loss(label: str, config: PruningConfig, own: pd.Series) -> dict[str, Any]:
        row = rows[label].get(config)
        if row is None:
            return {"config": config.name, "evaluated": False}
        gap = Difference(0.0, 0.0, "paired") if row["name"] == own["name"] else difference(own, row, items)
        return {
            "config": config.name,
            "evaluated": True,
            **plain_values(row, "acc_mean", "acc_mean_stderr", "ppl"),
            "loss_points": gap.points,
            "loss_points_stderr": plain_value(gap.stderr_points),
            "loss_basis": gap.basis,
        }

    losses = {
        label: {other: loss(label, _tried(theirs), own) for other, theirs in best.items()}
        for label, own in best.items()
    }
    shared = set.intersection(*(set(of_model) for of_model in rows.values()))
    if not shared:
        return Transfer(losses, {"config": None, "num_candidates": 0})

    def rank(config: PruningConfig) -> tuple[float, float, int, str]:
        found = [of_model[config] for of_model in rows.values()]
        ppl = sum(math.inf if pd.isna(row["ppl"]) else row["ppl"] for row in found)
        tokens = config.taylor_seq_len * config.taylor_num_samples
        return -math.fsum(row["acc_mean"] for row in found), ppl, tokens, config.name

    config = min(shared, key=rank)
    models = {label: loss(label, config, of_model.iloc[0]) for label, of_model in eligible.items()}
    stderrs = [entry["acc_mean_stderr"] for entry in models.values()]
    ratios = {float(of_model[config]["pruning_ratio"]) for of_model in rows.values()}
    return Transfer(
        losses,
        {
            "config": config.name,
            **asdict(config),
            "pruning_ratio": ratios.pop() if len(ratios) == 1 else None,
            "num_candidates": len(shared),
            "acc_mean": math.fsum(entry["acc_mean"] for entry in models.values()) / len(models),
            # the models answer the same items, so their errors go together: an upper bound of the mean's
            "acc_mean_stderr": None if None in stderrs else math.fsum(stderrs) / len(models),
            "models": models,
        },
    )


def _tried(row: Mapping[str, Any]) -> PruningConfig:
    """What was tried, apart from the pruning ratio: models of different ratios are compared by the rest."""
    return replace(config_of(row), pruning_ratio=PruningConfig.pruning_ratio)
