"""Paper tables of what accuracy depends on: levels of each knob with their trend, analysis of variance, correlations."""

from __future__ import annotations

from typing import Any

from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.table_data import KNOBS, MODEL, Column, PaperTable, p_words, paper_table, trend_words


def seq_len(findings: Findings) -> PaperTable | None:
    """Accuracy by calibration sequence length."""
    return _levels(findings, "taylor_seq_len", "seq_len", "Sequence length")


def num_samples(findings: Findings) -> PaperTable | None:
    """Accuracy by number of calibration samples."""
    return _levels(findings, "taylor_num_samples", "num_samples", "Samples")


def _levels(findings: Findings, knob: str, name: str, header: str) -> PaperTable | None:
    rows, trends = [], []
    for label, found in findings.models.items():
        trend = found.trends.get(knob)
        said = trend_words(trend) if trend else None
        if trend and said:
            rank = f" (Spearman {messages.acc(trend.spearman)}, {p_words(trend.spearman_p)})"
            trends.append(f"{label}: {said}{'' if messages.missing(trend.spearman_p) else rank}.")
        levels = found.levels.get(knob)
        if levels is not None:
            for level, values in levels.iterrows():
                highest = trend is not None and trend.direction != "flat" and level == trend.best_level
                rows.append({"model": label, "level": level, **values, "highest": highest, "trend": said})
    if not rows:
        return None
    columns = [
        *(MODEL, Column(header, "level", messages.integer), Column("Runs", "n", messages.integer)),
        Column("Mean", "mean", messages.acc, "stderr", bold="highest"),
        *(Column("Std", "std", messages.acc), Column("Min", "min", messages.acc), Column("Max", "max", messages.acc)),
    ]
    note = "Accuracy over the complete runs at each level; ± is std (n - 1) over the root of runs. "
    note += "Bold: the best level, where levels differ by more than noise. Trends, with the other settings taken out: "
    note += f"{' '.join(trends) or 'one level only.'}"
    return paper_table(name, f"Effect of {KNOBS[knob]}", note, rows, columns)


def effects(findings: Findings) -> PaperTable | None:
    """Analysis of variance, where a model's complete trials are a full grid."""
    rows = [
        {"model": label, "term": term, **values}
        for label, found in findings.models.items()
        if found.effects is not None
        for term, values in found.effects.iterrows()
    ]
    columns = [
        *(MODEL, Column("Term", "term", lambda term: term.replace(":", " × "), align="l")),
        Column("df", "df", messages.integer),
        Column("Share of variance", "share", messages.percent),
        *(Column("F", "F", messages.points, optional=True), Column("p", "p", messages.p_value, optional=True)),
    ]
    note = "Analysis of variance of the accuracies of a full grid with one run a cell; the highest interaction is the residual."
    return paper_table("effects", "What accuracy depends on", note, rows, columns) if rows else None


def correlations(findings: Findings) -> PaperTable | None:
    """Correlations of accuracy with other measures."""
    rows: list[dict[str, Any]] = []
    for label, found in findings.models.items():
        for entry in found.correlations:
            row = {
                "model": label,
                "measure": entry.column,
                "n": entry.n,
                "r": entry.r,
                "low": entry.low,
                "high": entry.high,
            }
            row |= {"passes": entry.n_independent, "r_passes": entry.r_independent}
            row["interval"] = None if entry.low is None else f"{messages.acc(entry.low)} to {messages.acc(entry.high)}"
            rows.append(row | {"reason": messages.format_message(entry.reason) if entry.reason else ""})
    columns = [
        *(MODEL, Column("Measure", "measure", align="l"), Column("Runs", "n", messages.integer)),
        Column("r", "r", messages.acc),
        Column("Passes", "passes", messages.integer, optional=True),
        Column("r over passes", "r_passes", messages.acc, optional=True),
        Column("95% interval", "interval"),
        Column("Not computable because", "reason", align="p", optional=True),
    ]
    note = "Pearson's r with accuracy over the complete runs. Runs of one gradient pass share its measures: where passes are "
    note += "given, each counts once, with the mean accuracy of its runs, and the interval is that of r over passes."
    title = "Correlation of accuracy with perplexity, gradient and pruning measures"
    return paper_table("correlations", title, note, rows, columns) if rows else None
