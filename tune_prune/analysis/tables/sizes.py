"""Accuracy against size: the best of each pruning ratio beside the dense model, and the smallest that is near enough to it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import plain_values
from tune_prune.analysis.statistics.findings import Findings, Message, ModelFindings
from tune_prune.analysis.tables.configurations import (
    ACCURACY,
    CONFIG,
    MODEL,
    PARAMETERS,
    PERPLEXITY,
    accuracy_notes,
    limits,
)
from tune_prune.analysis.tables.table import Column, Table

_VALUES = ("params_count", "acc_mean", "acc_mean_stderr", "ppl")
_KEPT = Column("kept", "Parameters kept", "percent")
_ONE_SIDED = 1.645  # standard errors: 95% of a normal distribution lie above -1.645


def by_size(findings: Findings) -> pd.DataFrame | None:
    """Accuracy against size, of the models with two pruning ratios or more; None if there is none.

    A row for the dense model, where it is known (ratio 0), and one for the best configuration of each ratio: model (label
    without ratio), config (name), ratio, kept (of the dense parameters), _VALUES, acc_lowest and acc_highest (of draws).
    """
    rows: list[dict[str, Any]] = []
    for series, members in findings.series.items():
        if len({found.model.ratio for found in members}) < 2:
            continue
        dense = next((found.model.baseline for found in members if found.model.baseline), {})
        if "acc_mean" in dense:
            row = {"model": series, "config": "dense", "ratio": 0.0, "kept": 1.0}
            rows.append(row | plain_values(dense, *_VALUES))
        for found in members:
            draws = found.draws.get(found.best.name, found.best.to_frame().T)["acc_mean"]
            row = {"model": series, "acc_lowest": draws.min(), "acc_highest": draws.max()}
            rows.append(row | _best(found, dense.get("params_count")))
    return pd.DataFrame(rows).astype(dict.fromkeys(_VALUES, "float64")) if rows else None


def _best(found: ModelFindings, dense_params: float | None) -> dict[str, Any]:
    values = plain_values(found.best, *_VALUES)
    kept = 1 - found.best["removed_fraction"]
    if values["params_count"] and dense_params:
        kept = values["params_count"] / dense_params
    return {"config": found.best["name"], "ratio": found.model.ratio, "kept": kept, **values}


def accuracy_by_size(findings: Findings) -> Table | None:
    """The dense model and the best configuration of each pruning ratio, of models with two ratios or more."""
    rows = by_size(findings)
    if rows is None:
        return None
    columns = [MODEL, Column("ratio", "Pruning ratio", "number"), CONFIG, _KEPT, PARAMETERS, ACCURACY, PERPLEXITY]
    notes = [*accuracy_notes(findings), Message("note_sizes")]
    return Table("accuracy_by_size", "Accuracy against size", columns, rows.to_dict("records"), notes)


def smallest(findings: Findings) -> Table | None:
    """By rule "smallest": of every pruning ratio the smallest configuration within the bound, or the nearest to it, and its
    difference to the dense model; None by other rules."""
    if findings.rule != "smallest":
        return None
    rows = []
    for series, members in findings.series.items():
        for found in members:
            values = _best(found, found.model.baseline.get("params_count")) | limits(found)
            gap = found.against_dense
            if gap is not None:
                values |= {"difference": gap.points, "difference_stderr": gap.stderr_points}
            values |= {"within": Message(f"within_{is_within(found)}"), "chosen": findings.smallest[series] is found}
            rows.append({"model": found.model.label, **values})
    columns = [
        *(MODEL, CONFIG, _KEPT, PARAMETERS, ACCURACY),
        Column(
            "difference", "To dense", "points", "difference_stderr", best="chosen", hint="in points, on the same items"
        ),
        Column("within", "Within"),
    ]
    title = f"Smallest within {findings.within:g} points of the dense model"
    notes = [Message("note_smallest", {"within": findings.within}), *accuracy_notes(findings)]
    return Table("smallest", title, columns, rows, notes, best="best_smallest")


def is_within(found: ModelFindings) -> str:
    """Of the best by rule "smallest": "yes" or "no" by its accuracy as measured; "surely" where that is so with 95% confidence
    (one-sided, normal)."""
    if not found.chosen["smallest"]:
        return "no"
    gap = found.against_dense
    assert gap is not None  # else nothing is within
    return "surely" if found.best["margin_points"] >= _ONE_SIDED * gap.stderr_points else "yes"
