"""Tables of what accuracy depends on: methods, levels of each hyperparameter with their trend, analysis of variance,
correlations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import CONTROL
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.statistics.draws import mean_perplexity
from tune_prune.analysis.statistics.effects import Trend
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.configurations import CONFIGURATIONS, MODEL, level_format, limits
from tune_prune.analysis.tables.table import Column, Table, missing
from tune_prune.core.hyperparameters import HYPERPARAMETERS


def accuracy(key: str, label: str = "") -> Column:
    """Return a column of mean accuracies over the tasks."""
    return Column(key, label or key.capitalize(), "acc", threshold="_threshold_mean")


def methods(findings: Findings) -> Table:
    """Return the pruning methods over all complete runs of each, highest mean first."""
    rows, notes = [], [Message("note_methods")]
    for label, result in findings.models.items():
        top, *others = result.methods.index
        if names := [method for method in others if missing(result.methods.loc[method, "p_below"])]:
            notes.append(Message("note_not_compared", {"model": label, "top": top, "names": names}))
        for method, values in result.methods.iterrows():
            best = result.named(values["best"])
            row = {"model": label, "method": method, **values}
            row |= {"best_acc": best["acc_mean"], "best_acc_stderr": best["acc_mean_stderr"]}
            rows.append(row | {"best_tied": best["name"] in result.marked} | limits(result))
    columns = [
        *(MODEL, Column("method", "Method"), CONFIGURATIONS),
        *(replace(accuracy("mean"), best="tied"), Column("std", "Std", "acc")),
        Column("std_n", "Std (n)", "acc", hint="divides by n, as published tables do", detail=True),
        *(accuracy("min"), accuracy("median")),
        replace(accuracy("best_acc", "Best"), stderr="best_acc_stderr", best="best_tied"),
        Column("best", "Best configuration", style="name"),
    ]
    return Table("methods", "Pruning methods", columns, rows, notes, best="best_method")


def method_pairs(findings: Findings) -> Table | None:
    """Return the mean difference of every two methods, with its error and whether it is distinguishable from 0."""
    rows = [
        {"model": label, "first": first, "second": second, **values, "result": _result(first, values)}
        for label, result in findings.models.items()
        for (first, second), values in result.method_pairs.iterrows()
    ]
    columns = [
        *(MODEL, Column("first", "Method"), Column("second", "Compared with"), Column("n", "Pairs", "int")),
        Column("points", "Difference", "points", "stderr_points", hint="percentage points"),
        *(Column("p_value", "p", "p"), Column("result", "Result")),
    ]
    return Table("method_pairs", "Methods compared", columns, rows, [Message("note_method_pairs")]) if rows else None


def _result(first: str, pair: Any) -> Message:
    if pair["p_value"] <= 0.05:
        return Message("pair_differs", {"first": first})
    return Message("pair_unknown" if missing(pair["p_value"]) else "pair_tied")


def levels(findings: Findings) -> list[Table]:
    """Return accuracy at each level of a hyperparameter, over all others, with its trend: a table for each that has levels."""
    names = dict.fromkeys(name for result in findings.models.values() for name in result.levels)
    return [_levels(findings, name) for name in names]


def _levels(findings: Findings, name: str) -> Table:
    rows, notes = [], [Message("note_levels")]
    for label, result in findings.models.items():
        trend, words = result.trends.get(name), None
        if trend is not None:
            words = trend_message(trend)
            values = {"model": label, "trend": words, "r": trend.spearman, "p": trend.spearman_p}
            notes.append(Message("note_trend", values))
        for level, values in result.levels.get(name, pd.DataFrame()).iterrows():
            tied = trend is not None and level in trend.tied_levels
            rows.append({"model": label, "level": level, **values, "tied": tied, "trend": words} | limits(result))
    columns = [
        *(MODEL, Column("level", name, level_format(name)), CONFIGURATIONS),
        *(replace(accuracy("mean"), stderr="stderr", best="tied"), Column("std", "Std", "acc")),
        *(accuracy("min"), accuracy("max")),
    ]
    title = f"Accuracy by {HYPERPARAMETERS[name].label.lower()}"
    return Table(name, title, columns, rows, notes, best="best_level")


def trend_message(trend: Trend, words: bool = False) -> Message:
    """Return what a trend says, as a clause without a full stop; of the hyperparameter's label in `words`."""
    name = HYPERPARAMETERS[trend.factor].label.lower() if words else trend.factor
    values = {"factor": name, "spread": trend.spread_points, "stderr": trend.stderr_points}
    return Message(f"trend_{trend.direction}", values | {"best_level": trend.best_level})


def effects(findings: Findings) -> Table | None:
    """Return what each hyperparameter explains: the analysis of variance where there is one, else its share of importance only."""
    rows, notes = [], []
    for label, result in findings.models.items():
        terms = pd.DataFrame({"share": result.importance}) if result.effects is None else result.effects
        for term, values in terms.iterrows():
            rows.append({"model": label, "term": term, "_term": term.replace(":", " × "), **values})
        shares = [f"{name} {100 * share:.1f}%" for name, share in result.importance.items()]
        notes.append(Message(f"note_importance_{result.importance_basis}", {"model": label, "shares": shares}))
    if any(result.effects is not None for result in findings.models.values()):
        notes.insert(0, Message("note_effects"))
    columns = [
        *(MODEL, Column("_term", "Term"), Column("df", "df", "int"), Column("share", "Share of variance", "percent")),
        Column("sum_sq", "Sum of squares", "number", detail=True),
        *(Column("F", "F", "points"), Column("p", "p", "p")),
    ]
    return Table("effects", "What accuracy depends on", columns, rows, notes) if rows else None


def correlations(findings: Findings) -> Table | None:
    """Return the correlations of accuracy with other measures."""
    rows = [{"model": label, **vars(item)} for label, result in findings.models.items() for item in result.correlations]
    columns = [
        *(MODEL, Column("measure", "Measure", style="name"), CONFIGURATIONS),
        *(Column("r", "r", "r"), Column("tau", "Kendall's τ", "r")),
        *(Column("passes", "Passes", "int"), Column("r_passes", "r over passes", "r")),
        Column("low", "95% interval", "r", upper="high"),
        Column("reason", "Not computable because", wrap=True),
    ]
    notes = [Message("note_correlations")]
    if any(CONTROL in result.methods.index for result in findings.models.values()):
        notes.append(Message("note_control"))
    if any(row["passes"] is not None for row in rows):
        notes.append(Message("note_passes"))
    title = "Correlation of accuracy with perplexity, gradient and pruning measures"
    return Table("correlations", title, columns, rows, notes) if rows else None


def extreme_layers(findings: Findings) -> Table | None:
    """Return accuracy by the number of layers that lose more than half of their MLP channels."""
    rows = [
        {"model": label, "layers": layers, "n": len(group), "ppl": mean_perplexity(group["ppl"])}
        | {name: getattr(group["acc_mean"], name)() for name in ("mean", "min", "max")}
        | limits(result)
        for label, result in findings.models.items()
        for layers, group in result.eligible.dropna(subset="extreme_pruning_layers").groupby("extreme_pruning_layers")
    ]
    columns = [
        *(MODEL, Column("layers", "Extreme layers", "int"), CONFIGURATIONS),
        *(*map(accuracy, ("mean", "min", "max")), Column("ppl", "Mean perplexity", "ppl")),
    ]
    title = "Accuracy by extreme pruning layers"
    return Table("extreme_layers", title, columns, rows, [Message("note_extreme")]) if rows else None
