"""Tables of the whole study: every trial, its tasks and other measures, what cheaper looks tell, sums and distributions, problems
of the input, cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import GOLD, TEXTS
from tune_prune.analysis.input.study import Model, Problem
from tune_prune.analysis.statistics.findings import Findings, Message
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
    TRIALS,
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

STATUS_WORDS = {
    "complete": "complete",
    "not_finite": "not finite",
    "stopped_early": "stopped early",
    "failed": "failed",
}
_ALL = "All models"
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
    """Every trial: what is eligible first, best first; then the others with the reason why they do not."""
    rows: list[dict[str, Any]] = []
    for label, model in findings.study.models.items():
        rest = model.rows
        if (result := findings.models.get(label)) is not None:
            shown = result.eligible.index.union([index for draws in result.draws.values() for index in draws.index])
            rest = rest.drop(index=shown)
            places = result.eligible["ppl"].rank(method="first")
            tied, of_all = result.marked, {"model": label} | limits(result)
            for rank, (row, place) in enumerate(zip(result.eligible.to_dict("records"), places, strict=True), 1):
                ranks = {"rank": rank, "ppl_rank": None if missing(place) else int(place)}
                state = {"state": "complete", **ranks, "chosen": row["name"] == result.best["name"]}
                of_draws = draws_of(result, row) | informative(result, row)
                rows.append(
                    _without_draws(row)
                    | unread(result, row)
                    | of_draws
                    | state
                    | {"tied": row["name"] in tied}
                    | of_all
                )
        for row in rest.to_dict("records"):
            finite = row["success"] and math.isfinite(row["acc_mean"])
            row["state"] = "not finite" if row["success"] else str(row["status"]).replace("_", " ")
            if finite:
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
        *hyperparameter_columns(findings),
        *(DRAWS, MARKED_ACCURACY),
        Column("difference_points", "Gap", "points", "difference_stderr_points", hint=_GAP),
        Column("p_value", "p", "p", hint=_P_VALUE),
        *(INFORMATIVE, PERPLEXITY, *MEASURE_COLUMNS),
        *(accuracy_column(task, task, detail=True, style="task") for task in tasks),
        Column("removed_fraction", "Removed", "percent", hint="share of all parameters that was removed", style="more"),
        *(Column("elapsed_time", "Time", "duration", style="more"), Column("reason", "Reason", wrap=True), TOKENS),
        *(
            Column("rank", "Rank", "int", detail=True, style="more"),
            Column("ppl_rank", "Perplexity rank", "int", detail=True, style="more"),
        ),
    ]
    notes = [Message("note_trials")]
    if any(row["state"] == STATUS_WORDS["stopped_early"] for row in rows):
        notes.append(Message("note_stopped_early"))
    return Table("trials", "All configurations", columns, rows, notes, best="best_tied", long=True)


def _without_draws(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("draws", "draw_share", "draw_stderr")}


def draws(findings: Findings) -> Table | None:
    """The configurations with several draws of calibration samples: what each draw scored, and the 95% interval of their mean."""
    rows, notes, columns = [], [], {}
    for label, result in findings.models.items():
        usual = (result.model.source or {}).get("seed")
        for place, (index, row) in enumerate(result.eligible.iterrows()):
            if index not in result.draws:
                continue
            own = result.draws[index]
            half = result.comparison.half_width(place)
            values = {
                "low": np.clip(row["acc_mean"] - half, 0, 1),
                "high": np.clip(row["acc_mean"] + half, 0, 1),
                "spread": 100 * own["acc_mean"].std(),
            }
            for seed, accuracy in zip(own["seed"], own["acc_mean"], strict=True):
                seed = usual if missing(seed) else int(seed)
                columns[seed] = Column(f"seed_{seed}", "Run's seed" if seed is None else f"Seed {seed}", "acc")
                values[f"seed_{seed}"] = accuracy
            rows.append(configuration(result, row) | values)
        if (between := result.draw_variance) is None:
            continue
        note = {"model": label, "points": 100 * math.sqrt(between.variance), "freedom": between.freedom}
        notes.append(Message("note_draw_variance", note | {"share": _share(between.interaction, between.mean_square)}))
    settings = [about.get("settings", {}) for about in findings.study.experiments.values()]
    given = dict.fromkeys((own["draws"], own.get("draws_by", "accuracy")) for own in settings if own.get("draws"))
    notes += [Message("note_draws_given", {"most": most, "by": Message(f"rule_{by}")}) for most, by in given]
    shown = [
        *(MODEL, replace(CONFIGURATION, detail=False), DRAWS, ACCURACY),
        Column("low", "95% interval", "acc", upper="high"),
    ]
    shown.append(Column("spread", "Std of runs", "points", hint="standard deviation between its runs, in points"))
    by_seed = [columns[seed] for seed in sorted(columns, key=lambda seed: -1 if seed is None else seed)]
    table = Table("draws", "Runs with other sample text", [*shown, *by_seed], rows, [Message("note_draws"), *notes])
    return table if rows else None


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def trial_tasks(findings: Findings) -> Table:
    """Every complete trial's accuracy on every task."""
    table, columns = trials(findings), [MODEL, Column("name", "Configuration", best="tied")]
    for task in (column for column in table.shown if column.style == "task"):
        label = task.label.replace("arc_easy", "arc_e").replace("arc_challenge", "arc_c")
        columns.append(replace(task, label=label, format="acc3", detail=False))
    names = [name for c in columns for name in (c.key, c.stderr, c.best, c.threshold, c.items) if name]
    rows = [{name: row.get(name) for name in names} for row in table.rows if row["state"] == "complete"]
    title = "Accuracy of all complete configurations by task"
    return Table("trial_tasks", title, columns, rows, [Message("note_best_first")], best="best_tied", long=True)


def statistics(findings: Findings) -> Table:
    """Runs, task evaluations, completeness, cost and the distribution of accuracy: a column per model, and one for all."""
    values = pd.DataFrame(
        {
            label: {**result.statistics, "trial_hours": _hours(result.model.rows)}
            for label, result in findings.models.items()
        }
    )
    if len(findings.models) > 1:
        every = pd.concat([result.model.rows for result in findings.models.values()])
        total = values.loc[list(_COUNTS)].sum(axis="columns").to_dict() | {"trial_hours": _hours(every)}
        alike = {(result.model.ratio, result.model.trained) for result in findings.models.values()}
        if len(alike) == 1:  # else a distribution of accuracies that nobody compares
            pooled = pd.concat([result.eligible["acc_mean"] for result in findings.models.values()])
            total |= {name: getattr(pooled, name)() for name in _DISTRIBUTION}
        values[_ALL] = pd.Series(total)
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
        f"_{of_model(label)}": result.guessing.loc["mean", "threshold"] for label, result in findings.models.items()
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
    """Sums over the experiments that have a cost.json; NaN where none tells."""
    columns = [*_passes(findings), "gpu_hours", "worker_seconds", "evaluation_fraction"]
    costs = pd.DataFrame(list(findings.study.costs.values()), columns=columns, dtype="float64")
    costs["evaluation_fraction"] *= costs["worker_seconds"]
    total = costs.sum(min_count=1)
    total["evaluation_fraction"] /= total["worker_seconds"] or math.nan
    return pd.concat([total, pd.Series({"worker_hours": total["worker_seconds"] / 3600})])


def _passes(findings: Findings) -> dict[str, str]:
    """Which passes over calibration samples the experiments' cost.json counts, with their titles."""
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
    """Every configuration, the most accurate first, below the dense model: each measure with its distance to the best."""
    rows: list[dict[str, Any]] = []
    for label, result in findings.models.items():
        gaps, dense = result.measure_gaps, result.model.baseline
        if gaps.empty:
            continue
        if dense:
            zeros = {name: 0.0 for name in TEXTS if f"{name}_gap" in gaps}  # by definition
            rows.append(
                {**dense, **zeros, "model": label, "name": "dense", **informative(result, dense), **limits(result)}
            )
        rows += [configuration(result, row) | gaps.loc[index].to_dict() for index, row in result.eligible.iterrows()]
    gap_columns = (
        Column(f"{column.key}_gap", label, "nats", f"{column.key}_gap_stderr", hint="to the best of this measure")
        for column, label in zip(MEASURE_COLUMNS, ("Gold gap", "KL text gap", "KL tasks gap"), strict=True)
    )
    pairs = [part for pair in zip(MEASURE_COLUMNS, gap_columns, strict=True) for part in pair]
    columns = [MODEL, replace(CONFIGURATION, detail=False), *pairs, ACCURACY, INFORMATIVE, PERPLEXITY]
    notes = [Message("note_measures")]
    if any(not missing(row["acc_informative"]) for row in rows):
        notes.append(Message("note_informative"))
    title = "Log-probability of right choices, and KL to the original model"
    return Table("measures", title, columns, rows, notes, long=True) if rows else None


_LOOKS = {
    "kl_text": "KL text",
    "kl_tasks": "KL tasks",
    "kl": "KL, mean of both",
    "ppl": "Perplexity",
    GOLD: "Gold logprob",
    "acc_mean": "Accuracy",
}
_PAGE = 40  # rows: a longer table breaks across pages, and has no place on a web page


def fidelities(findings: Findings) -> Table | None:
    """Every rung that the trials of a model passed through, in their order; None where no model has enough trials."""
    rows = [
        {
            "model": label,
            "rung": _LOOKS[one.measure],
            "items": one.items,
            "n": one.trials,
            "tau": one.tau,
            "tau_stderr": one.stderr,
            "rank": one.rank,
            "let_through": one.let_through,
            "seconds": one.seconds,
        }
        for label, result in findings.models.items()
        for one in result.fidelities
    ]
    columns = [
        *(MODEL, Column("rung", "Rung")),
        Column("items", "Questions seen", "percent", hint="of the zero-shot questions"),
        TRIALS,
        Column("tau", "Kendall's τ", "r", "tau_stderr", hint="with the final accuracy"),
        Column("rank", "Winner's rank", "int", hint="trials that are at least as good as the most accurate one"),
        Column("let_through", "Let through", "percent", hint="what a filter has to, to keep the most accurate one"),
        Column("seconds", "Time", "duration", hint="median over the trials"),
    ]
    title, notes = "What cheaper looks tell of the final accuracy", [Message("note_fidelities")]
    return Table("fidelities", title, columns, rows, notes, long=len(rows) > _PAGE) if rows else None
