"""Tables of the measures that see more than accuracy does, log-probabilities of right choices and KL to the dense model, and of
what cheaper looks at a trial tell of its final accuracy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tune_prune.analysis.input.measures import GOLD, TEXTS
from tune_prune.analysis.statistics.findings import Findings, Message
from tune_prune.analysis.tables.configurations import (
    ACCURACY,
    CONFIGURATION,
    INFORMATIVE,
    MEASURES,
    MODEL,
    PERPLEXITY,
    TRIALS,
    configuration,
    informative,
    limits,
)
from tune_prune.analysis.tables.table import Column, Table, missing


def measures(findings: Findings) -> Table | None:
    """Every configuration, the most accurate first, below the dense model: each measure with its distance to the best."""
    rows: list[dict[str, Any]] = []
    for label, found in findings.models.items():
        gaps, dense = found.measure_gaps, found.model.baseline
        if gaps.empty:
            continue
        if dense:
            zeros = {name: 0.0 for name in TEXTS if f"{name}_gap" in gaps}  # by definition
            rows.append(
                {**dense, **zeros, "model": label, "name": "dense", **informative(found, dense), **limits(found)}
            )
        rows += [configuration(found, row) | gaps.loc[index].to_dict() for index, row in found.eligible.iterrows()]
    gap_columns = (
        Column(f"{column.key}_gap", label, "nats", f"{column.key}_gap_stderr", hint="to the best of this measure")
        for column, label in zip(MEASURES, ("Gold gap", "KL text gap", "KL tasks gap"), strict=True)
    )
    pairs = [part for pair in zip(MEASURES, gap_columns, strict=True) for part in pair]
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
        for label, found in findings.models.items()
        for one in found.fidelities
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
