"""Accuracy against size: the best of each pruning ratio beside the dense model, and the smallest that is near enough to it; with
speed, where that was measured."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import plain_values
from tune_prune.analysis.statistics.findings import Findings, Message, ModelFindings
from tune_prune.analysis.tables.configurations import (
    ACCURACY,
    CONFIG,
    MARKED_ACCURACY,
    MODEL,
    PARAMETERS,
    PERPLEXITY,
    RETAINED,
    accuracy_notes,
    limits,
)
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.core.measures import wilson_stderr

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
            rows.append(row | _values(found, found.best, dense.get("params_count")))
    return pd.DataFrame(rows).astype(dict.fromkeys(_VALUES, "float64")) if rows else None


def _values(found: ModelFindings, row: pd.Series, dense_params: float | None) -> dict[str, Any]:
    values = plain_values(row, *_VALUES)
    kept = 1 - row["removed_fraction"]
    if values["params_count"] and dense_params:
        kept = values["params_count"] / dense_params
    return {"config": row["name"], "ratio": found.model.ratio, "kept": kept, **values}


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
            values = _values(found, found.best, found.model.baseline.get("params_count")) | limits(found)
            gap = found.against_dense
            if gap is not None:
                values |= {"difference": gap.points, "difference_stderr": gap.stderr_points}
            values |= {"within": Message(f"within_{is_within(found)}"), "chosen": findings.smallest[series] is found}
            rows.append({"model": found.model.label, **values})
    columns = [
        *(MODEL, CONFIG, _KEPT, PARAMETERS, ACCURACY),
        Column(
            "difference",
            "To original",
            "points",
            "difference_stderr",
            best="chosen",
            hint="in points, on the same questions",
        ),
        Column("within", "Within"),
    ]
    title = f"Smallest within {findings.within:g} points of the original model"
    notes = [Message("note_smallest", {"within": findings.within}), *accuracy_notes(findings)]
    return Table("smallest", title, columns, rows, notes, best="best_smallest")


def by_speed(findings: Findings) -> pd.DataFrame | None:
    """The configurations whose speed was measured, the most accurate first, behind their dense model; None if there is none.

    Columns: series (label without ratio), model, config (name; "dense"), method, _VALUES, kept and kv_kept (of the dense model's
    parameters and KV bytes), kv_bytes_per_token, prefill and decode (times as fast as the dense model; <name>_lowest and
    <name>_highest round), retained, retained_per_second, pareto (whether nothing dominates it), best, tied.
    """
    rows: list[dict[str, Any]] = []
    for series, members in findings.series.items():
        for found in members:
            speeds, dense = found.model.compared_speeds, found.model.baseline
            own = [row for _, row in found.eligible.iterrows() if row["key"] in speeds]
            if not own:
                continue
            about = {"series": series, "model": found.model.label, **limits(found)}
            kv_bytes = speeds[own[0]["key"]].dense_kv_bytes_per_token
            first = about | {
                "config": "dense",
                "method": "dense",
                "kept": 1.0,
                "kv_kept": 1.0,
                "prefill": 1.0,
                "decode": 1.0,
            }
            first |= {name: dense.get(name) for name in _VALUES} | {"kv_bytes_per_token": kv_bytes, "tied": False}
            retained = found.retained(dense.get("acc_mean"))
            rows.append(first | {"retained": retained, "retained_per_second": retained})
            for row in own:
                speed, retained = speeds[row["key"]], found.retained(row["acc_mean"])
                values = about | _values(found, row, dense.get("params_count"))
                for name in ("prefill", "decode"):
                    ratio = getattr(speed, name)
                    values |= {name: ratio.value, f"{name}_lowest": ratio.lowest, f"{name}_highest": ratio.highest}
                values |= {"method": row["method"], "tied": row["name"] in found.marked, "retained": retained}
                values |= {
                    "kv_bytes_per_token": speed.kv_bytes_per_token,
                    "kv_kept": speed.kv_bytes_per_token / kv_bytes,
                }
                values |= {"retained_per_second": None if retained is None else row["retained_per_second"]}
                values |= {"pareto": row["name"] in found.chosen["pareto"], "best": row["name"] == found.best["name"]}
                rows.append(values)
    return pd.DataFrame(rows).astype(dict.fromkeys(_VALUES, "float64")) if rows else None


def pareto(findings: Findings) -> Table | None:
    """Accuracy, size and speed of each configuration whose speed was measured."""
    rows = by_speed(findings)
    if rows is None:
        return None
    shown = rows.assign(pareto=[_yes_or_no(value) for value in rows["pareto"]])
    hint = "times the original's speed"
    columns = [
        *(MODEL, CONFIG, MARKED_ACCURACY, RETAINED, PERPLEXITY, PARAMETERS),
        Column("kv_bytes_per_token", "KV bytes/token", "int"),
        Column("prefill", "Prefill", "points", hint=hint),
        Column("prefill_lowest", "Prefill, rounds", "points", upper="prefill_highest"),
        Column("decode", "Decode", "points", hint=hint),
        Column("decode_lowest", "Decode, rounds", "points", upper="decode_highest"),
        Column("retained_per_second", "Retained per second", "points", hint="1 for the original model"),
        Column("pareto", "Pareto-optimal"),
    ]
    notes = [Message("note_speed"), *map(_conditions, filter(_timed, findings.models.values()))]
    notes += [*accuracy_notes(findings), Message("note_retained")]
    return Table("pareto", "Accuracy, size and speed", columns, shown.to_dict("records"), notes, best="best_tied")


def _yes_or_no(value: Any) -> Message | None:
    return None if pd.isna(value) else Message("within_yes" if value else "within_no")


def _timed(found: ModelFindings) -> bool:
    return bool(found.model.compared_speeds)


def _conditions(found: ModelFindings) -> Message:
    """How the speeds of a model were measured, and how many others there are."""
    speeds = found.model.compared_speeds
    record = next(iter(speeds.values()))
    others = len({one.key for one in found.model.speeds if one.conditions != record.conditions})
    values = {"model": found.model.label, **vars(record.conditions), "graph": record.graph, "others": others}
    return Message("note_speed_conditions_more" if others else "note_speed_conditions", values)


def is_within(found: ModelFindings) -> str:
    """Of the best by rule "smallest": "yes" or "no" by its accuracy as measured; "surely" where that is so with 95% confidence
    (one-sided, normal). Where both answered every item alike, the error is as if they had every item right (Wilson)."""
    if not found.chosen["smallest"]:
        return "no"
    gap = found.against_dense
    assert gap is not None  # else nothing is within
    error = gap.stderr_points
    if error == 0:
        of_tasks = [wilson_stderr(items) for items in found.tasks["items"].drop("mean")]
        error = 100 * math.hypot(*of_tasks) / len(of_tasks)
    return "surely" if found.best["margin_points"] >= _ONE_SIDED * error else "yes"
