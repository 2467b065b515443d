"""Tables of the whole study: every trial, its tasks and other measures, sums and distributions, problems of the input, cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import TEXTS
from tune_prune.analysis.input.study import Message, Model, Problem
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.configurations import (
    ACCURACY,
    CONFIGURATION,
    DRAWS,
    INFORMATIVE,
    MARKED_ACCURACY,
    MEASURE_COLUMNS,
    MODEL,
    PERPLEXITY,
    TOKENS,
    accuracy_column,
    configuration,
    draws_of,
    hyperparameter_columns,
    informative,
    limits,
    of_model,
    unread,
)
from tune_prune.analysis.tables.table import Column, Table, missing
from tune_prune.core.records import in_order

STATUS_WORDS = {name: name.replace("_", " ") for name in ("complete", "not_finite", "stopped_early", "failed")}
_GAP = "accuracy less that of the most accurate, in percentage points"
_P_VALUE = (
    "chance of such a gap if no other were better; below .05 it counts as behind; corrected for all configurations"
)
_COUNTS = {
    "runs": "Trials",
    "complete": "Complete",
    "failed": "Failed",
    "stopped_early": "Stopped early",
    "not_finite": "Without a finite accuracy",
    "task_evaluations": "Task evaluations",
}
_DISTRIBUTION = ("max", "min", "median", "mean", "std")


def counts(model: Model) -> str:
    """Return how many trials it has and how they ended: 5 trials (4 complete, 1 failed)."""
    status = model.states.value_counts()
    states = ", ".join(f"{status[name]} {words}" for name, words in STATUS_WORDS.items() if name in status)
    return f"{len(model.rows)} trial{'' if len(model.rows) == 1 else 's'} ({states or 'none complete'})"


def trials(findings: Findings) -> Table:
    """Return every trial: what is eligible first, best first; then the others with the reason why they do not count."""
    rows: list[dict[str, Any]] = []
    for label, model in findings.study.models.items():
        rest = model.rows
        if (result := findings.models.get(label)) is not None:
            shown = result.eligible.index.union([index for draws in result.draws.values() for index in draws.index])
            rest = rest.drop(index=shown)
            places = result.eligible["ppl"].rank(method="first")
            for rank, (row, place) in enumerate(zip(result.eligible.to_dict("records"), places, strict=True), 1):
                one = {name: value for name, value in row.items() if name not in ("draws", "draw_share", "draw_stderr")}
                one |= unread(result, row) | draws_of(result, row) | informative(result, row)
                one |= {"state": "complete", "rank": rank, "ppl_rank": None if missing(place) else int(place)}
                one |= {"chosen": row["name"] == result.best["name"], "tied": row["name"] in result.marked}
                rows.append(one | {"model": label} | limits(result))
        for row in rest.to_dict("records"):
            row["state"] = "not finite" if row["success"] else str(row["status"]).replace("_", " ")
            if row["success"] and math.isfinite(row["acc_mean"]):
                row |= {"state": "complete", "reason": "another run of it was stopped early"}
            elif row["success"]:
                row["reason"] = row["reason"] or f"acc_mean is {row['acc_mean']}"
            row |= dict.fromkeys(("difference_points", "difference_stderr_points", "p_value", "rank", "ppl_rank"))
            rows.append(row | {"chosen": False, "tied": False, "model": label})
    for row in rows:
        # The first two are of the machine and no part of a publication; the last is said by the other columns.
        del row["output_dir"], row["host"], row["configuration"]
    tasks = dict.fromkeys(task for model in findings.study.models.values() for task in model.tasks)
    columns = [
        *(MODEL, replace(CONFIGURATION, badge="chosen"), Column("state", "Status", style="state")),
        *(*hyperparameter_columns(findings), DRAWS, MARKED_ACCURACY),
        Column("difference_points", "Gap", "points", "difference_stderr_points", hint=_GAP),
        *(Column("p_value", "p", "p", hint=_P_VALUE), INFORMATIVE, PERPLEXITY, *MEASURE_COLUMNS),
        *(accuracy_column(task, task, detail=True, style="task") for task in tasks),
        Column("removed_fraction", "Removed", "percent", hint="share of all parameters that was removed", style="more"),
        *(Column("elapsed_time", "Time", "duration", style="more"), Column("reason", "Reason", wrap=True), TOKENS),
        Column("rank", "Rank", "int", detail=True, style="more"),
        Column("ppl_rank", "Perplexity rank", "int", detail=True, style="more"),
    ]
    notes = [Message("note_trials")]
    if any(row["state"] == STATUS_WORDS["stopped_early"] for row in rows):
        notes.append(Message("note_stopped_early"))
    return Table("trials", "All configurations", columns, rows, notes, best="best_tied", long=True)


def draws(findings: Findings) -> Table | None:
    """Return the configurations with several draws of calibration samples: what each draw scored, and the 95% interval of their
    mean."""
    rows, notes, columns = [], [Message("note_draws")], {}
    for label, result in findings.models.items():
        usual = (result.model.source or {}).get("seed")
        for place, (index, row) in enumerate(result.eligible.iterrows()):
            if index not in result.draws:
                continue
            runs, half = result.draws[index], result.comparison.half_width(place)
            values = {
                "low": np.clip(row["acc_mean"] - half, 0, 1),
                "high": np.clip(row["acc_mean"] + half, 0, 1),
                "spread": 100 * runs["acc_mean"].std(),
            }
            for seed, accuracy in zip(runs["seed"], runs["acc_mean"], strict=True):
                seed = usual if missing(seed) else int(seed)
                columns[seed] = Column(f"seed_{seed}", "Run's seed" if seed is None else f"Seed {seed}", "acc")
                values[f"seed_{seed}"] = accuracy
            rows.append(configuration(result, row) | values)
        if (between := result.draw_variance) is not None:
            share = min(1.0, between.interaction / between.mean_square) if between.mean_square > 0 else 0.0
            values = {"points": 100 * math.sqrt(between.variance), "freedom": between.freedom, "share": share}
            notes.append(Message("note_draw_variance", {"model": label} | values))
    settings = [about.get("settings", {}) for about in findings.study.experiments.values()]
    given = dict.fromkeys((one["draws"], one.get("draws_by", "accuracy")) for one in settings if one.get("draws"))
    notes += [Message("note_draws_given", {"most": most, "by": Message(f"rule_{by}")}) for most, by in given]
    shown = [
        *(MODEL, replace(CONFIGURATION, detail=False), DRAWS, ACCURACY),
        Column("low", "95% interval", "acc", upper="high"),
        Column("spread", "Std of runs", "points", hint="standard deviation between its runs, in points"),
        *(columns[seed] for seed in sorted(columns, key=lambda seed: -1 if seed is None else seed)),
    ]
    return Table("draws", "Runs with other sample text", shown, rows, notes) if rows else None


def trial_tasks(findings: Findings) -> Table:
    """Return every complete trial's accuracy on every task."""
    table, columns = trials(findings), [MODEL, Column("name", "Configuration", best="tied")]
    for task in (column for column in table.shown if column.style == "task"):
        label = task.label.replace("arc_easy", "arc_e").replace("arc_challenge", "arc_c")
        columns.append(replace(task, label=label, format="acc3", detail=False))
    names = [name for c in columns for name in (c.key, c.stderr, c.best, c.threshold, c.items) if name]
    rows = [{name: row.get(name) for name in names} for row in table.rows if row["state"] == "complete"]
    title = "Accuracy of all complete configurations by task"
    return Table("trial_tasks", title, columns, rows, [Message("note_best_first")], best="best_tied", long=True)


def statistics(findings: Findings) -> Table:
    """Return runs, task evaluations, completeness, cost and the distribution of accuracy: a column per model, and one for all."""
    values = pd.DataFrame(
        {
            label: {**result.statistics, "trial_hours": _hours(result.model.rows)}
            for label, result in findings.models.items()
        }
    )
    if len(findings.models) > 1:
        every = pd.concat([result.model.rows for result in findings.models.values()])
        total = values.loc[list(_COUNTS)].sum(axis="columns").to_dict() | {"trial_hours": _hours(every)}
        if len({(one.model.ratio, one.model.trained) for one in findings.models.values()}) == 1:
            # else a distribution of accuracies that nobody compares
            pooled = pd.concat([result.eligible["acc_mean"] for result in findings.models.values()])
            total |= {name: getattr(pooled, name)() for name in _DISTRIBUTION}
        values["All models"] = pd.Series(total)
    values.loc["completeness"] = values.loc["complete"] / values.loc["runs"]
    cost = pd.DataFrame({values.columns[-1]: _cost(findings)})  # cost.json tells of an experiment, not of a model
    values = pd.concat([values, cost])
    shown = {name: (title, "int") for name, title in _COUNTS.items()}
    shown |= {"completeness": ("Completeness", "percent"), "trial_hours": ("Trial time (h)", "points")}
    shown |= {name: (title, "int") for name, title in _passes(findings).items()}
    shown |= {"worker_hours": ("Worker time (h)", "points"), "gpu_hours": ("GPU hours", "points")}
    shown |= {"evaluation_fraction": ("Evaluation's share of worker time", "percent")}
    shown |= {name: (f"Accuracy: {name}", "acc") for name in _DISTRIBUTION}
    thresholds = {
        f"_{of_model(label)}": one.guessing.loc["mean", "threshold"] for label, one in findings.models.items()
    }
    rows = [
        {"statistic": name, "_title": title, "_format": form, **values.loc[name].rename(of_model)}
        | (thresholds if name in _DISTRIBUTION[:-1] else {})
        for name, (title, form) in shown.items()
        if values.loc[name].notna().any()
    ]
    notes = [Message("note_statistics")]
    kinds = [problem.kind for model in findings.study.models.values() for problem in model.problems]
    if "duplicate" in kinds:
        notes.append(Message("note_duplicates", {"count": kinds.count("duplicate")}))
    if findings.without:
        notes.append(Message("note_without", {"names": findings.without}))
    columns = [
        Column("_title", "Statistic"),
        *(Column(of_model(label), label, "number", threshold=f"_{of_model(label)}") for label in values),
    ]
    return Table("experiment_statistics", "Experiment statistics", columns, rows, notes)


def _hours(rows: pd.DataFrame) -> float:
    return rows["elapsed_time"].dropna().sum(min_count=1) / 3600


def _cost(findings: Findings) -> pd.Series:
    """Return sums over the experiments that have a cost.json; NaN where none tells."""
    columns = [*_passes(findings), "gpu_hours", "worker_seconds", "evaluation_fraction"]
    costs = pd.DataFrame(list(findings.study.costs.values()), columns=columns, dtype="float64")
    costs["evaluation_fraction"] *= costs["worker_seconds"]
    total = costs.sum(min_count=1)
    total["evaluation_fraction"] /= total["worker_seconds"] or math.nan
    total["worker_hours"] = total["worker_seconds"] / 3600
    return total


def _passes(findings: Findings) -> dict[str, str]:
    """Return which passes over calibration samples the experiments' cost.json counts, with their titles."""
    counts = {name for cost in findings.study.costs.values() for name, n in cost.items() if isinstance(n, int)}
    return {name: name.replace("_", " ").capitalize() for name in sorted(counts) if name.endswith("_passes")}


def problems(findings: Findings) -> Table | None:
    """Return what is wrong with the input, in the order in which it was found."""
    rows = [
        {"model": problem.model, "kind": problem.kind.replace("_", " "), "what": problem.what, "where": problem.where}
        for model in findings.study.models.values()
        for problem in model.problems
    ]
    columns = [
        *(MODEL, Column("kind", "Kind"), Column("what", "What", wrap=True)),
        Column("where", "Where", wrap=True, style="long"),
    ]
    return Table("problems", "Problems of the input", columns, rows) if rows else None


def problem_counts(problems: Iterable[Problem]) -> list[Message]:
    """Return how many there are of each kind."""
    kinds = Counter(problem.kind for problem in problems)
    return [Message(f"problem_{kind}_one" if n == 1 else f"problem_{kind}", {"count": n}) for kind, n in kinds.items()]


def costs(findings: Findings) -> Table | None:
    """Return what each experiment has cost, where its cost.json is there."""
    seconds = {folder: cost.get("seconds_per_stage", {}) for folder, cost in findings.study.costs.items()}
    stages = in_order(sorted({stage for values in seconds.values() for stage in values}))
    rows = [
        {"folder": folder.as_posix(), **cost, **{f"{stage}_s": seconds[folder].get(stage) for stage in stages}}
        for folder, cost in findings.study.costs.items()
    ]
    columns = [
        *(Column("folder", "Experiment", wrap=True), Column("trials", "Trials", "int")),
        *(Column(name, label, "int") for name, label in _passes(findings).items()),
        *(Column(f"{stage}_s", stage.replace("_", "-"), "duration") for stage in stages),
        Column("worker_seconds", "Worker time", "duration"),
        *(Column("evaluation_fraction", "Evaluation's share", "percent"), Column("gpu_hours", "GPU hours", "points")),
    ]
    return Table("costs", "Cost", columns, rows) if rows else None


def measures(findings: Findings) -> Table | None:
    """Return every configuration, the most accurate first, below the dense model, by measures beside accuracy."""
    rows: list[dict[str, Any]] = []
    names = [column.key for column in MEASURE_COLUMNS]
    for label, result in findings.models.items():
        known = [name for name in names if np.isfinite(result.eligible.get(name, math.nan)).any()]
        if known and (dense := result.model.baseline):
            zeros = {name: 0.0 for name in TEXTS if name in known}  # by definition
            row = {**dense, **zeros, "model": label, "name": "dense"}
            rows.append(row | informative(result, dense) | limits(result))
        if known:
            rows += [configuration(result, row) for _, row in result.eligible.iterrows()]
    columns = [
        *(MODEL, replace(CONFIGURATION, detail=False)),
        *(replace(column, detail=False) for column in MEASURE_COLUMNS),
        *(ACCURACY, INFORMATIVE, PERPLEXITY),
    ]
    notes = [Message("note_measures")]
    if any(not missing(row["acc_informative"]) for row in rows):
        notes.append(Message("note_informative"))
    title = "Log-probability of right choices, and KL to the original model"
    return Table("measures", title, columns, rows, notes, long=True) if rows else None
