"""Paper tables of the whole experiment: its statistics, and every trial with its status and reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.table_data import (
    MARK,
    MODEL,
    Column,
    Form,
    PaperTable,
    accuracy_note,
    one_line,
    paper_table,
    ratio,
    short_accuracy,
    with_stderr,
)

ALL = "All models"

_COUNTS = {
    "runs": "Runs",
    "complete": "Complete",
    "failed": "Failed",
    "stopped_early": "Stopped early",
    "not_finite": "Without a finite accuracy",
    "task_evaluations": "Task evaluations",
}
_COSTS = {"gradient_passes": "Gradient passes", "removal_passes": "Removal passes"}
_OF_THE_MACHINE = ("output_dir", "host")  # no part of a publication
_DISTRIBUTION = ("max", "min", "median", "mean", "std")


def statistics(findings: Findings) -> PaperTable:
    """Runs, task evaluations, completeness, cost and the distribution of accuracy: a column per model, and one for all."""
    counts: dict[str, Mapping[str, float]] = {label: found.statistics for label, found in findings.models.items()}
    columns = {label: _time(findings, [label]) | dict(values) for label, values in counts.items()}
    if len(columns) > 1:
        pooled = pd.concat([found.competing["acc_mean"] for found in findings.models.values()])
        columns[ALL] = {name: sum(values[name] for values in counts.values()) for name in _COUNTS}
        columns[ALL] |= {name: float(getattr(pooled, name)()) for name in _DISTRIBUTION} | _time(findings, list(counts))
    last = list(columns)[-1]  # cost.json tells of an experiment, not of a model
    columns[last] |= _cost(findings)
    for values in columns.values():
        values["completeness"] = ratio(values["complete"], values["runs"])
    forms: dict[str, tuple[str, Form]] = {name: (title, messages.integer) for name, title in _COUNTS.items()}
    forms |= {
        "completeness": ("Completeness", messages.percent),
        "trial_hours": ("Time in trials (h)", messages.points),
    }
    forms |= {name: (title, messages.integer) for name, title in _COSTS.items()}
    forms |= {"worker_hours": ("Time of workers (h)", messages.points), "gpu_hours": ("GPU hours", messages.points)}
    forms |= {"evaluation_fraction": ("Evaluation's part of that time", messages.percent)}
    forms |= {name: (f"Accuracy: {name}", messages.acc) for name in _DISTRIBUTION}
    known = [name for name in forms if any(not messages.missing(values.get(name)) for values in columns.values())]
    frame = pd.DataFrame({"Statistic": [forms[name][0] for name in known]}, dtype="str")
    numbers = pd.DataFrame({"statistic": known})
    for label, values in columns.items():
        frame[label] = [with_stderr(values.get(name), None, forms[name][1]) for name in known]
        numbers[label] = pd.Series([values.get(name) for name in known], dtype="float64")
    note = "Accuracy over the complete runs; std with n - 1. A task evaluation is one run's accuracy on one task. Completeness: "
    note += "complete runs of all. "
    missing = [problem for model in findings.study.models.values() for problem in model.problems]
    duplicates = sum(problem.kind == "duplicate" for problem in missing)
    if duplicates:
        note += f"{duplicates} duplicate{'s are' if duplicates > 1 else ' is'} not counted again. "
    if findings.without:
        note += f"No complete run, so not here: {messages.names(findings.without, most=20)}. "
    aligns = "l" + "r" * len(columns)
    return PaperTable("experiment_statistics", "Experiment statistics", note.strip(), frame, numbers, aligns)


def _time(findings: Findings, labels: list[str]) -> dict[str, float | None]:
    seconds = pd.concat([findings.study.models[label].rows["elapsed_time"] for label in labels]).dropna()
    return {"trial_hours": float(seconds.sum()) / 3600 if len(seconds) else None}


def _cost(findings: Findings) -> dict[str, float | None]:
    """Sums over the experiments that have a cost.json; None where none tells."""
    costs = findings.study.costs.values()

    def total(name: str) -> float | None:
        known = [cost[name] for cost in costs if cost.get(name) is not None]
        return float(sum(known)) if known else None

    seconds = total("worker_seconds")
    spent = [
        cost["evaluation_fraction"] * cost["worker_seconds"]
        for cost in costs
        if cost.get("worker_seconds") and "evaluation_fraction" in cost
    ]
    return {
        **{name: total(name) for name in (*_COSTS, "gpu_hours")},
        "worker_hours": None if seconds is None else seconds / 3600,
        "evaluation_fraction": ratio(sum(spent), seconds) if spent else None,
    }


def trials(findings: Findings) -> PaperTable:
    """Every trial: what competes first, best first; then the others with the reason why they do not."""
    rows = _trial_rows(findings)
    columns = [
        *(MODEL, Column("Method", "pruning_method", align="l")),
        Column("Seq.", "taylor_seq_len", messages.integer),
        Column("Samples", "taylor_num_samples", messages.integer),
        Column("Accuracy", "acc_mean", messages.acc, "acc_mean_stderr", bold="most_accurate", dagger="not_told_apart"),
        Column("To the best", "difference_points", messages.points, "difference_stderr_points"),
        Column("p", "p_best", messages.p_value, optional=True),
        Column("PPL", "ppl", messages.perplexity),
        Column("Size", "removed_fraction", lambda removed: f"-{messages.percent(removed)}", optional=True),
        Column("Time (s)", "elapsed_time", lambda seconds: f"{seconds:,.0f}", optional=True),
        Column("Status", "outcome", one_line, align="p" if any(row["reason"] for row in rows) else "l"),
    ]
    note = f"{accuracy_note(findings)} Bold: the model's most accurate. {MARK} To the best: accuracy less that of the most "
    note += (
        "accurate, in points. p: chance of a gap to the best as large as this if none were better, corrected for all "
    )
    note += "configurations. Size: parameters removed, of all."
    return paper_table("trials", "All trials", note, rows, columns, long=True)


def trial_tasks(findings: Findings) -> PaperTable:
    """Every complete trial's accuracy on every task."""
    rows = [row for row in _trial_rows(findings) if row["state"] == "complete"]
    names = [
        name for name in rows[0] if name.startswith("acc_") and not name.endswith("_stderr") and name != "acc_mean"
    ]
    names = [name for name in names if any(not messages.missing(row.get(name)) for row in rows)]
    kept = ["model", "name", "not_told_apart", *(column for name in names for column in (name, f"{name}_stderr"))]
    columns = [
        *(MODEL, Column("Configuration", "name", align="l", dagger="not_told_apart")),
        *(Column(_short(name), name, short_accuracy, f"{name}_stderr") for name in names),
    ]
    rows = [{name: row.get(name) for name in kept} for row in rows]
    note = f"Best first. {MARK}"
    return paper_table("trial_tasks", "Accuracy of all complete trials by task", note, rows, columns, long=True)


def _short(name: str) -> str:
    """The task of a column, as short as the field writes it."""
    return name.removeprefix("acc_").replace("arc_easy", "arc_e").replace("arc_challenge", "arc_c")


def _trial_rows(findings: Findings) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    own = ("difference_points", "difference_stderr_points", "p_best")
    for label, model in findings.study.models.items():
        found = findings.models.get(label)
        if found is not None:
            for index, row in enumerate(found.competing.to_dict("records")):
                tied = bool(row["in_confidence_set"]) and index > 0
                rows.append(
                    row | {"model": label, "state": "complete", "most_accurate": index == 0, "not_told_apart": tied}
                )
        rest = model.rows[~(model.rows["success"] & np.isfinite(model.rows["acc_mean"]))]
        for row in rest.to_dict("records"):
            state = "not finite" if row["success"] else str(row["status"]).replace("_", " ")
            row |= {"model": label, "state": state, "most_accurate": False, "not_told_apart": False}
            if row["success"]:
                row["reason"] = f"acc_mean is {row['acc_mean']}"
            rows.append(row | dict.fromkeys(own))
    for row in rows:
        row["outcome"] = ": ".join(filter(None, (row["state"], row["reason"])))
    return [{name: value for name, value in row.items() if name not in _OF_THE_MACHINE} for row in rows]
