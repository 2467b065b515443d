"""The tables of report.html as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from tune_prune.analysis.cost import duration
from tune_prune.analysis.input.study import Model, Problem
from tune_prune.analysis.render import messages
from tune_prune.analysis.render.page_cells import Cell, Column, Table, blank, number, words
from tune_prune.analysis.render.page_strip import in_set
from tune_prune.analysis.statistics.findings import Correlation, Findings, Message, ModelFindings, Trend

KNOBS = {"taylor_seq_len": "seq_len", "taylor_num_samples": "num_samples"}
STATUS_WORDS = {"complete": "complete", "stopped_early": "stopped early", "failed": "failed"}
_STAGES = ("importance", "removal", "pruning", "perplexity", "zero_shot")


def _with_model(findings: Findings, columns: Iterable[Column]) -> list[Column]:
    """A column for the model in front, where there are several."""
    front = [Column("Model", numeric=False)] if len(findings.study.models) > 1 else []
    return [*front, *columns]


def _in_front(findings: Findings, label: str) -> list[Cell]:
    return [words(label)] if len(findings.study.models) > 1 else []


def _time(seconds: Any) -> str:
    return messages.MISSING if messages.missing(seconds) else duration(seconds)


def task_columns(findings: Findings) -> list[str]:
    """The tasks that any row has an accuracy of, in the order of the columns."""
    tasks: dict[str, None] = {}
    for model in findings.study.models.values():
        for name in model.rows.columns:
            is_task = name.startswith("acc_") and not name.endswith("_stderr") and name != "acc_mean"
            if is_task and model.rows[name].notna().any():
                tasks[name.removeprefix("acc_")] = None
    return list(tasks)


def trials(findings: Findings) -> Table:
    """Every trial of every model, those that compete first, best first; columns of which nothing is known are left out."""
    tasks = task_columns(findings)
    columns = _with_model(
        findings,
        [
            Column("Configuration", numeric=False, style="name"),
            Column("Status", numeric=False),
            Column("Method", numeric=False),
            Column("seq_len", hint="tokens per calibration sample"),
            Column("Samples", hint="calibration samples"),
            Column("Accuracy", hint="mean over the tasks ± standard error"),
            Column("Gap", hint="percentage points above the most accurate ± standard error"),
            Column(
                "p", hint="chance of a gap as large as this if this were the best, corrected for all configurations"
            ),
            Column("Perplexity"),
            *(Column(task, style="task") for task in tasks),
            Column("Removed", hint="share of all parameters"),
            Column("Time"),
            Column("Reason", numeric=False, style="long"),
        ],
    )
    rows: list[list[Cell]] = []
    for label, model in findings.study.models.items():
        found = findings.models.get(label)
        if found is not None:
            rows += [_trial(findings, label, row, found, tasks) for row in found.competing.to_dict("records")]
        rest = model.rows[~(model.rows["success"] & np.isfinite(model.rows["acc_mean"]))]
        rows += [_trial(findings, label, row, None, tasks) for row in rest.to_dict("records")]
    known = [any(row[index].sort is not None for row in rows) for index in range(len(columns))]
    rows = [list(compress(row, known)) for row in rows]
    stopped = any((model.rows["status"] == "stopped_early").any() for model in findings.study.models.values())
    notes = [
        "Grey numbers are of trials that do not compete; one that was stopped early has answered a part of the items."
    ]
    return Table("trials-table", "Every trial", list(compress(columns, known)), rows, notes if stopped else [])


def _trial(
    findings: Findings, label: str, row: Mapping[str, Any], found: ModelFindings | None, tasks: Sequence[str]
) -> list[Cell]:
    """A row; `found` is None for a trial that does not compete."""
    badge = ""
    if found is not None:
        is_best = row["name"] == found.best["name"]
        badge = "best" if is_best else "not told apart" if in_set(row["in_confidence_set"]) else ""
    status = STATUS_WORDS.get(row["status"], str(row["status"]))
    reason = row["reason"]
    if found is None and row["success"]:
        status, reason = "not finite", reason or f"acc_mean is {row['acc_mean']}"
    muted = "" if found is not None else "muted"
    gap, gap_stderr = row.get("difference_points"), row.get("difference_stderr_points")
    key = row.get("key")
    accuracies = [row.get(f"acc_{task}") for task in tasks]
    return [
        *_in_front(findings, label),
        words(row["name"], style="name", badge=badge, title=f"trial {key}" if key else ""),
        words(status, style=f"status-{status.replace(' ', '-')}" if status in _STATES else ""),
        words(row["pruning_method"]),
        number(row["taylor_seq_len"], messages.integer(row["taylor_seq_len"])),
        number(row["taylor_num_samples"], messages.integer(row["taylor_num_samples"])),
        number(row["acc_mean"], messages.pm(row["acc_mean"], row["acc_mean_stderr"]), style=muted),
        number(gap, messages.pm(gap, gap_stderr or None, "points")),
        number(row.get("p_best"), messages.p_value(row.get("p_best"))),
        number(row["ppl"], messages.perplexity(row["ppl"]), style=muted),
        *(number(value, messages.acc(value), style=f"task {muted}".strip()) for value in accuracies),
        number(row["removed_fraction"], messages.percent(row["removed_fraction"])),
        number(row["elapsed_time"], _time(row["elapsed_time"])),
        words(reason, style="long"),
    ]


_STATES = (*STATUS_WORDS.values(), "not finite")


def methods(findings: Findings) -> Table:
    columns = ["Runs", "Mean", "Std (n − 1)", "Std (n)", "Min", "Median", "Max"]
    hints = {"Std (n)": "divides by n, as published tables do"}
    rows = [
        [
            *_in_front(findings, label),
            words(method),
            number(row["n"], messages.integer(row["n"])),
            *(number(row[name], messages.acc(row[name])) for name in ("mean", "std", "std_n", "min", "median", "max")),
            words(row["best"], style="name"),
        ]
        for label, found in findings.models.items()
        for method, row in found.methods.iterrows()
    ]
    heads = [Column("Method", numeric=False), *(Column(name, hint=hints.get(name, "")) for name in columns)]
    heads.append(Column("Best configuration", numeric=False, style="name"))
    return Table("methods", "Methods", _with_model(findings, heads), rows)


def levels(findings: Findings, knob: str) -> Table:
    """Accuracy by a knob's levels, over all other knobs, with its trend in words."""
    short = KNOBS.get(knob, knob)
    rows = [
        [
            *_in_front(findings, label),
            number(level, messages.integer(level)),
            number(row["n"], messages.integer(row["n"])),
            *(number(row[name], messages.acc(row[name])) for name in ("mean", "stderr", "std", "min", "max")),
        ]
        for label, found in findings.models.items()
        if knob in found.levels
        for level, row in found.levels[knob].iterrows()
    ]
    heads = [Column(short), *(Column(name) for name in ("Runs", "Mean", "Std error", "Std (n − 1)", "Min", "Max"))]
    notes = [
        f"{label}: {trend_words(found.trends[knob])}"
        for label, found in findings.models.items()
        if knob in found.trends
    ]
    return Table(f"levels-{short}", f"Accuracy by {short}", _with_model(findings, heads), rows, notes)


def trend_words(trend: Trend) -> str:
    sentence = messages.format_message(messages.trend_remark(trend))
    rank = f"; rank correlation {messages.acc(trend.spearman)}, p {messages.p_value(trend.spearman_p)}"
    return sentence + ("" if messages.missing(trend.spearman) else rank)


def effects(findings: Findings) -> Table | None:
    """What each knob explains: the ANOVA where there is one, else its share of importance only."""
    rows: list[list[Cell]] = []
    for label, found in findings.models.items():
        if found.effects is not None:
            for term, row in found.effects.iterrows():
                numbers = [
                    number(row["df"], messages.integer(row["df"])),
                    number(row["share"], messages.percent(row["share"])),
                ]
                tests = [number(row[name], messages.number(row[name])) for name in ("sum_sq", "F")]
                tests.append(number(row["p"], messages.p_value(row["p"])))
                name = " × ".join(KNOBS.get(part, part) for part in str(term).split(":"))
                rows.append([*_in_front(findings, label), words(name), *numbers, *tests, words("ANOVA")])
        else:
            for knob, share in found.importance.items():
                basis = {"anova": "ANOVA", "optuna": "Optuna's evaluator"}.get(found.importance_basis, "")
                term_cell = words(KNOBS.get(knob, knob))
                cells = [
                    term_cell,
                    blank(),
                    number(share, messages.percent(share)),
                    blank(),
                    blank(),
                    blank(),
                    words(basis),
                ]
                rows.append([*_in_front(findings, label), *cells])
    if not rows:
        return None
    heads = [
        Column("Term", numeric=False),
        *(Column(n) for n in ("df", "Share of variance", "Sum of squares", "F", "p")),
    ]
    heads.append(Column("By", numeric=False))
    return Table("effects", "What the accuracy depends on", _with_model(findings, heads), rows)


def correlations(findings: Findings) -> Table | None:
    rows: list[list[Cell]] = []
    for label, found in findings.models.items():
        for item in found.correlations:
            interval = [messages.acc(item.low), messages.acc(item.high)]
            rows.append(
                [
                    *_in_front(findings, label),
                    words(item.column, style="name"),
                    number(item.r, messages.acc(item.r)),
                    number(item.n, messages.integer(item.n)),
                    number(item.n_independent, messages.integer(item.n_independent)),
                    number(item.r_independent, messages.acc(item.r_independent)),
                    blank() if messages.missing(item.low) else number(item.low, " to ".join(interval)),
                    words(_note(item), style="long"),
                ]
            )
    if not rows:
        return None
    heads = [
        Column("Column", numeric=False, style="name"),
        Column("r", hint="Pearson correlation with accuracy over the complete trials"),
        Column("Trials"),
        Column("Passes", hint="distinct gradient passes, where trials share them"),
        Column("r over passes", hint="each gradient pass once, with the mean accuracy of its trials"),
        Column("95% interval", hint="over the passes where trials share them, else over the trials"),
        Column("Note", numeric=False, style="long"),
    ]
    return Table("correlations", "Correlation with accuracy", _with_model(findings, heads), rows)


def _note(item: Correlation) -> str:
    if item.reason is not None:
        return messages.format_message(item.reason)
    if item.n_independent is None:
        return ""
    return messages.format_message(Message("shared_gradients", {"column": item.column, "passes": item.n_independent}))


def best_tasks(findings: Findings) -> Table:
    rows = [
        [
            *_in_front(findings, label),
            words(task),
            number(row["acc"], messages.pm(row["acc"], row["stderr"])),
            number(row["dense"], messages.acc(row["dense"])),
            number(row["retained"], messages.percent(row["retained"])),
            number(row["items"], messages.integer(row["items"])),
        ]
        for label, found in findings.models.items()
        for task, row in found.tasks.iterrows()
    ]
    heads = [Column("Task", numeric=False), *(Column(name) for name in ("Accuracy", "Dense", "Kept of dense", "Items"))]
    return Table("best-tasks", "The best configuration by task", _with_model(findings, heads), rows)


def transfer(findings: Findings) -> Table | None:
    """Points each model loses with another's best, and with the best single configuration; None with one model only."""
    lost = findings.transfer_points
    if lost is None or findings.transfer_stderr is None or findings.transfer_percent is None:
        return None
    for_all = findings.best_for_all if findings.best_for_all and findings.best_for_all.get("config") else None
    shared = {label: (for_all or {}).get("models", {}).get(label, {}) for label in lost.index}
    shared_points = [entry.get("loss_points") for entry in shared.values()]
    known = [value for value in [*lost.to_numpy().ravel(), *shared_points] if not messages.missing(value)]
    worst = max([0.0, *known])
    columns = [Column("Model", numeric=False), Column("Own best", numeric=False, style="name")]
    columns += [Column(f"with {label}'s best") for label in lost.columns]
    if for_all:
        columns.append(Column(f"with {for_all['config']}", hint="the best single configuration for all models"))

    def cell(value: Any, stderr: Any, share: Any) -> Cell:
        if messages.missing(value):
            return Cell("not tried", style="muted")
        text = messages.pm(value, stderr, "points") + ("" if messages.missing(share) else f" ({share:.1f}%)")
        return number(value, text, weight=max(0.0, value) / worst if worst > 0 else 0.0)

    rows = []
    for label in lost.index:
        own = findings.models[label].best
        row = [words(label), words(own["name"], style="name")]
        for other in lost.columns:
            values = (frame.loc[label, other] for frame in (lost, findings.transfer_stderr, findings.transfer_percent))
            row.append(Cell("own", 0.0, style="muted") if other == label else cell(*values))
        if for_all:
            loss = shared[label].get("loss_points")
            share = None if messages.missing(loss) else loss / own["acc_mean"]
            row.append(cell(loss, shared[label].get("loss_points_stderr"), share))
        rows.append(row)
    return Table("transfer-table", "Accuracy lost with another model's best", columns, rows)


def problems(models: Iterable[Model]) -> Table | None:
    found: list[Problem] = [problem for model in models for problem in model.problems]
    if not found:
        return None
    rows = [
        [words(p.model), words(p.kind.replace("_", " ")), words(p.what, style="long"), words(p.where, style="long")]
        for p in found
    ]
    heads = [
        Column("Model", False),
        Column("Kind", False),
        Column("What", False, "long"),
        Column("Where", False, "long"),
    ]
    return Table("problems-table", "Problems of the input", heads, rows)


def costs(findings: Findings) -> Table | None:
    """What each experiment has cost, where its cost.json is there."""
    if not findings.study.costs:
        return None
    rows = []
    for folder, cost in findings.study.costs.items():
        seconds = cost.get("seconds_per_stage", {})
        values = [
            *(
                (cost.get(name), messages.integer(cost.get(name)))
                for name in ("trials", "gradient_passes", "removal_passes")
            ),
            *((seconds.get(stage), _time(seconds.get(stage))) for stage in _STAGES),
            (cost.get("worker_seconds"), _time(cost.get("worker_seconds"))),
            (cost.get("evaluation_fraction"), messages.percent(cost.get("evaluation_fraction"))),
            (cost.get("gpu_hours"), messages.points(cost.get("gpu_hours"))),
        ]
        rows.append([words(folder.name, title=folder.as_posix()), *(number(*value) for value in values)])
    titles = ["Trials", "Gradient passes", "Removal passes", *(stage.replace("_", "-") for stage in _STAGES)]
    titles += ["Worker time", "Of it evaluation", "GPU hours"]
    return Table("costs-table", "Cost", [Column("Experiment", False), *map(Column, titles)], rows)
