"""What a search prints at its end: its best trials, and what models lose with each other's, as plain text for the terminal."""

from __future__ import annotations

from dataclasses import replace

from tune_prune.analysis.input.rows import ranked
from tune_prune.analysis.render.messages import format_message, note_sentences
from tune_prune.analysis.render.text import fold, text_table
from tune_prune.analysis.statistics.changes import MEASURES
from tune_prune.analysis.statistics.draws import STOPPED_DRAWS
from tune_prune.analysis.statistics.findings import Findings, Message
from tune_prune.analysis.statistics.hyperparameters.factors import methods_reading
from tune_prune.analysis.tables.changes import changes
from tune_prune.analysis.tables.configurations import (
    PARAMETERS,
    RETAINED,
    accuracy_notes,
    hyperparameter_columns,
    limits,
    of_model,
    transfer,
    window_notes,
)
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.analysis.tables.trial_tables import counts, trials
from tune_prune.core.values.hyperparameters import RECIPE

_ON_SCREEN = (
    "_at_chance",
    "_devices",
    "items_in_calibration",
    "items_after_eos",
    "one_draw_leads",
    *(f"worse_{name}" for name in MEASURES),
)  # ends of kinds of warnings


def final_table(findings: Findings, top: int = 5) -> str:
    """Per model: the dense model, the best configuration of each method and the `top` best; then the models compared. Lines have
    100 columns at most."""
    every = trials(findings)
    tables = {label: _best_trials(findings, label, every.of(label), top) for label in sorted(findings.study.models)}
    blocks = []
    for label, table in tables.items():
        block = f"{table.title}\n" + (text_table(table) if table.rows else "")
        if label not in findings.models:
            model = findings.study.models[label]
            block += f"  {STOPPED_DRAWS if len(ranked(model.rows)) else 'no complete trial'}\n"
        warnings = findings.models[label].warnings if label in findings.models else ()
        block += "".join(f"  ! {format_message(m)}\n" for m in warnings if m.kind.endswith(_ON_SCREEN))
        blocks.append(block)
    if (across := _across(findings)) is not None:
        blocks.append(f"{across.title}\n{text_table(across)}")
    changed = changes(findings)
    if changed is not None and (trained := [row for row in changed.rows if row["kind"] == "training"]):
        steps = [
            column.key for column in changed.columns if column.key in RECIPE and RECIPE[column.key].of == "recovery"
        ]
        shown = changed.pick(
            "model",
            "config",
            *steps,
            "before_acc_mean",
            "acc_mean",
            "gain",
            "kl_text_change",
            "kl_tasks_change",
            "worse",
        )
        blocks.append(f"What training changes, gain in points\n{text_table(shown.with_rows(trained))}")
    notes = [note for table in tables.values() for note in note_sentences(table, best="*")]
    text = "\n".join([*blocks, " ".join(dict.fromkeys(notes))])
    return "\n".join(map(fold, text.splitlines()))


def _best_trials(findings: Findings, label: str, table: Table, top: int) -> Table:
    """The first rows of the table of its trials, below one for the dense model."""
    found = findings.models.get(label)
    model = findings.study.models[label] if found is None else found.model
    ranked = [row for row in table.rows if row["rank"] is not None]
    first = {row["method"]: row["rank"] for row in reversed(ranked)}
    shown = [row for row in ranked if row["rank"] <= top or row["rank"] == first[row["method"]]]
    title = f"{label}: {counts(model)}"
    if len(shown) < len(ranked):
        title += f"; the best of each method and the {top} best"
    names = [column.key for column in hyperparameter_columns(findings)]
    reading = {name: methods_reading(model.rows, name) for name in names}
    rows = [{"method": "dense", **model.baseline}] if model.baseline else []
    for row in shown:
        unread = [name for name, methods in reading.items() if row["method"] not in methods]
        rows.append({**row, **dict.fromkeys(unread)})
    if found is not None:
        rows = [{**row, "retained": found.retained(row.get("acc_mean")), **limits(found)} for row in rows]
    columns = [*table.pick(*names, "ppl", "draws", "acc_mean").columns, RETAINED, PARAMETERS]
    notes = [*accuracy_notes(findings), Message("note_retained"), *window_notes(findings)]
    return replace(table, title=title, columns=columns, rows=rows, notes=notes)


def _across(findings: Findings) -> Table | None:
    """The losses in points, also with the best single configuration for all; None with fewer than two models."""
    table = transfer(findings)
    if table is None or findings.transfer is None:
        return None
    for_all = findings.transfer.best_for_all
    table = replace(
        table.pick("model", "name", *map(of_model, findings.models)), title=f"{table.title}, in points; –: not tried"
    )
    if for_all["config"] is None:
        return table
    losses = [for_all["models"].get(row["model"], {}) for row in table.rows]
    losses = [{name: loss.get(name) for name in ("loss_points", "loss_points_stderr")} for loss in losses]
    column = Column("loss_points", f"Best for all: {for_all['config']}", "points", "loss_points_stderr")
    rows = [{**row, **loss} for row, loss in zip(table.rows, losses, strict=True)]
    return replace(table, columns=[*table.columns, column], rows=rows)
