"""The table of refits and trainings: each configuration beside the same one without it."""

from __future__ import annotations

from typing import Any

from tune_prune.analysis.input.measures import GOLD
from tune_prune.analysis.statistics.changes import Change
from tune_prune.analysis.statistics.findings import Findings, Message, ModelFindings
from tune_prune.analysis.tables.configurations import (
    ACCURACY,
    CONFIG,
    MODEL,
    accuracy_notes,
    configuration,
    hyperparameter_columns,
)
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.core.hyperparameters import HYPERPARAMETERS

_WORSE = {"kl_text": "text", "kl_tasks": "questions", GOLD: "right choices"}


def changes(findings: Findings) -> Table | None:
    """Every configuration with a refit or a training that was measured without it, too, the most accurate first; None if there is
    none."""
    rows = [_row(found, change) for found in findings.models.values() for change in found.changes]
    columns = [
        *(MODEL, CONFIG, Column("kind", "Change")),
        *(c for c in hyperparameter_columns(findings) if HYPERPARAMETERS[c.key].of in ("recovery", "compensation")),
        Column("draws", "Runs", "int", hint="how often both were run, each time with other sample text", detail=True),
        Column("own_text", "Own text", "percent", hint="error that is left on held-out parts of its sample text"),
        Column("before_acc_mean", "Without", "acc", "before_acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("acc_mean", "With", "acc", "acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("gain", "Gain", "points", "gain_stderr", hint="in points, on the same questions"),
        Column("before_ppl", "Perplexity, without", "ppl", detail=True),
        Column("ppl", "Perplexity, with", "ppl", detail=True),
        Column(f"before_{GOLD}", "Gold logprob, without", "nats", detail=True),
        Column(GOLD, "Gold logprob, with", "nats", detail=True),
        Column(f"{GOLD}_change", "Gold logprob, change", "nats", f"{GOLD}_change_stderr", hint="on the same questions"),
        Column("before_kl_text", "KL text, without", "nats", detail=True),
        Column("kl_text", "KL text, with", "nats", detail=True),
        Column("kl_text_change", "KL text, change", "nats", "kl_text_change_stderr", hint="on the same tokens"),
        Column("before_kl_tasks", "KL tasks, without", "nats", detail=True),
        Column("kl_tasks", "KL tasks, with", "nats", detail=True),
        Column("kl_tasks_change", "KL tasks, change", "nats", "kl_tasks_change_stderr", hint="on the same tokens"),
        Column("worse", "Worse on", hint="significantly (95%, all of a model together)"),
    ]
    notes = [*accuracy_notes(findings), Message("note_changes")]
    return Table("changes", "What repair and training change", columns, rows, notes) if rows else None


def _row(found: ModelFindings, change: Change) -> dict[str, Any]:
    before, after = change.before, change.after
    row = configuration(found, after)
    row |= {f"before_{name}": before.get(name) for name in ("acc_mean", "acc_mean_stderr", "ppl")}
    for name, shift in change.shifts.items():
        row |= {f"before_{name}": shift.before, name: shift.after}
        row |= {f"{name}_change": shift.change, f"{name}_change_stderr": shift.stderr}
    worse = ", ".join(_WORSE[name] for name in change.worse)
    return row | {
        "config": before["name"],
        "kind": change.kind,
        "draws": change.draws,
        "own_text": change.own_text,
        "gain": change.gain,
        "gain_stderr": change.gain_stderr,
        "worse": worse or ("nothing" if change.shifts else ""),
    }
