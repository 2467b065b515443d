"""Tables of what accuracy depends on: methods, levels of each hyperparameter with their trend, analysis of variance,
correlations."""

from __future__ import annotations

import pandas as pd

from tune_prune.analysis.statistics.findings import Findings, Message, Trend
from tune_prune.analysis.tables.configurations import MODEL, RUNS, marks
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.core.config import HYPERPARAMETERS


def methods(findings: Findings) -> Table:
    """Pruning methods over all complete runs of each, highest mean first."""
    rows = []
    for label, found in findings.models.items():
        for method, values in found.methods.iterrows():
            best = found.named(values["best"])
            row = {"model": label, "method": method, **values}
            row |= {"best_acc": best["acc_mean"], "best_acc_stderr": best["acc_mean_stderr"]}
            row |= {"highest_mean": values["mean"] == found.methods["mean"].max()}
            row |= {"highest": values["max"] == found.methods["max"].max()}
            rows.append(row | {"not_told_apart": marks(found, best)["not_told_apart"]})
    columns = [
        *(MODEL, Column("method", "Method"), RUNS),
        *(Column("mean", "Mean", "acc", best="highest_mean"), Column("std", "Std", "acc")),
        Column("std_n", "Std (n)", "acc", hint="divides by n, as published tables do", detail=True),
        *(Column("min", "Min", "acc"), Column("median", "Median", "acc")),
        Column("best_acc", "Best", "acc", "best_acc_stderr", best="highest", tied="not_told_apart"),
        Column("best", "Best configuration", style="name"),
    ]
    return Table("methods", "Pruning methods", columns, rows, [Message("note_methods")], best="best_method")


def levels(findings: Findings) -> list[Table]:
    """Accuracy at each level of a hyperparameter, over all others, with its trend: a table for each that has levels."""
    names = dict.fromkeys(name for found in findings.models.values() for name in found.levels)
    return [_levels(findings, name) for name in names]


def _levels(findings: Findings, name: str) -> Table:
    rows, notes = [], [Message("note_levels")]
    for label, found in findings.models.items():
        trend = found.trends.get(name)
        said = trend_message(trend) if trend is not None else None
        if trend is not None:
            values = {"model": label, "trend": said, "r": trend.spearman, "p": trend.spearman_p}
            notes.append(Message("note_trend", values))
        for level, values in found.levels.get(name, pd.DataFrame()).iterrows():
            highest = trend is not None and trend.direction != "flat" and level == trend.best_level
            rows.append({"model": label, "level": level, **values, "highest": highest, "trend": said})
    known = HYPERPARAMETERS[name]
    columns = [
        *(MODEL, Column("level", known.name, "int"), RUNS, Column("mean", "Mean", "acc", "stderr", best="highest")),
        *(Column(key, key.capitalize(), "acc") for key in ("std", "min", "max")),
    ]
    return Table(known.name, f"Accuracy by {known.label.lower()}", columns, rows, notes, best="best_level")


def trend_message(trend: Trend, words: bool = False) -> Message:
    """What a trend says, as a clause without a full stop; of the hyperparameter's label in `words`."""
    name = HYPERPARAMETERS[trend.factor].label.lower() if words else trend.factor
    values = {"factor": name, "spread": trend.spread_points, "stderr": trend.stderr_points}
    return Message(f"trend_{trend.direction}", values | {"best_level": trend.best_level})


def effects(findings: Findings) -> Table | None:
    """What each hyperparameter explains: the analysis of variance where there is one, else its share of importance only."""
    rows, notes = [], []
    for label, found in findings.models.items():
        terms = pd.DataFrame({"share": found.importance}) if found.effects is None else found.effects
        for term, values in terms.iterrows():
            rows.append({"model": label, "term": term, "_term": term.replace(":", " × "), **values})
        basis = found.importance_basis if found.importance else "none"
        shares = [f"{name} {100 * share:.1f}%" for name, share in sorted(found.importance.items(), key=lambda i: -i[1])]
        notes.append(Message(f"note_importance_{basis}", {"model": label, "shares": shares}))
    if not rows:
        return None
    if any(found.effects is not None for found in findings.models.values()):
        notes.insert(0, Message("note_effects"))
    columns = [
        *(MODEL, Column("_term", "Term"), Column("df", "df", "int"), Column("share", "Share of variance", "percent")),
        Column("sum_sq", "Sum of squares", "number", detail=True),
        *(Column("F", "F", "points"), Column("p", "p", "p")),
    ]
    return Table("effects", "What accuracy depends on", columns, rows, notes)


def correlations(findings: Findings) -> Table | None:
    """Correlations of accuracy with other measures."""
    rows = [
        {
            "model": label,
            "measure": item.column,
            "n": item.n,
            "r": item.r,
            "low": item.low,
            "high": item.high,
            "passes": item.n_independent,
            "r_passes": item.r_independent,
            "reason": item.reason,
        }
        for label, found in findings.models.items()
        for item in found.correlations
    ]
    columns = [
        *(MODEL, Column("measure", "Measure", style="name"), RUNS, Column("r", "r", "acc")),
        *(Column("passes", "Passes", "int"), Column("r_passes", "r over passes", "acc")),
        Column("low", "95% interval", "acc", upper="high"),
        Column("reason", "Not computable because", wrap=True),
    ]
    notes = [Message("note_correlations")]
    if any(row["passes"] is not None for row in rows):
        notes.append(Message("note_passes"))
    title = "Correlation of accuracy with perplexity, gradient and pruning measures"
    return Table("correlations", title, columns, rows, notes) if rows else None


def extreme_layers(findings: Findings) -> Table | None:
    """Accuracy by the number of layers that lose more than half of their MLP channels."""
    rows = [
        {"model": label, "layers": layers, "n": len(group), "ppl": group["ppl"].mean()}
        | {name: getattr(group["acc_mean"], name)() for name in ("mean", "min", "max")}
        for label, found in findings.models.items()
        for layers, group in found.eligible.dropna(subset="extreme_pruning_layers").groupby("extreme_pruning_layers")
    ]
    columns = [
        *(MODEL, Column("layers", "Extreme layers", "int"), RUNS),
        *(Column(name, name.capitalize(), "acc") for name in ("mean", "min", "max")),
        Column("ppl", "Mean perplexity", "ppl"),
    ]
    title = "Accuracy by extreme pruning layers"
    return Table("extreme_layers", title, columns, rows, [Message("note_extreme")]) if rows else None
