"""The tables that a search prints at its end: its best trials, and what models lose with each other's, as plain text for the
terminal."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from tune_prune.analysis.input.rows import ranked
from tune_prune.analysis.render.messages import format_message, note_sentences
from tune_prune.analysis.render.text import fold, text_table
from tune_prune.analysis.statistics.differences import JUDGED
from tune_prune.analysis.statistics.draws import STOPPED_DRAWS
from tune_prune.analysis.statistics.effects import methods_reading
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.configurations import (
    PARAMETERS,
    RETAINED,
    accuracy_notes,
    changes,
    hyperparameter_columns,
    limits,
    of_model,
    transfer,
    window_notes,
)
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.analysis.tables.trial_tables import counts, trials
from tune_prune.analysis.verdict import Verdict, verdicts
from tune_prune.core.hyperparameters import RECIPE

_OF_ORIGINAL = replace(RETAINED, label="Of original")  # its accuracy; short, as tables on the screen have 100 columns
_ON_SCREEN = (
    "_at_chance",
    "_devices",
    "items_in_calibration",
    "items_after_eos",
    "one_draw_leads",
    *(f"worse_{name}" for name in JUDGED),
)  # ends of kinds of warnings


def final_table(findings: Findings, top: int = 5) -> str:
    """Per model, trained or not: the original, the best configuration of each method and the `top` best; then the models compared.
    Lines have 100 columns at most."""
    every, by_label = trials(findings), verdicts(findings)
    tables = {label: _best_trials(findings, verdict, every, top) for label, verdict in by_label.items()}
    blocks = []
    for label in sorted({*tables, *findings.without}):
        if label in findings.without:
            model = findings.study.models[label]
            nothing = STOPPED_DRAWS if len(ranked(model.rows)) else "no complete trial"
            blocks.append(f"{label}: {counts(model)}\n  {nothing}\n")
            continue
        warnings = [m for one in by_label[label].members for m in one.warnings if m.kind.endswith(_ON_SCREEN)]
        said = dict.fromkeys(f"  ! {format_message(message)}\n" for message in warnings)
        blocks.append(f"{tables[label].title}\n{text_table(tables[label])}{''.join(said)}")
    if (across := _across(findings, [verdict.winner.model.label for verdict in by_label.values()])) is not None:
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


def _best_trials(findings: Findings, verdict: Verdict, every: Table, top: int) -> Table:
    """The first rows of the table of its trials, below one for the original."""
    rows: list[dict[str, Any]] = []
    ranks = {name: place for place, name in enumerate(verdict.rows["name"], 1)}
    for result in verdict.members:
        own = [row for row in every.of(result.model.label).rows if row["rank"] is not None]
        kind = "yes" if result.model.trained else "–"
        rows += [
            {**row, "rank": ranks[row["name"]], "tied": row["name"] in verdict.marked, "training": kind} for row in own
        ]
    rows.sort(key=lambda row: row["rank"])
    first = {(row["method"], row["training"]): row["rank"] for row in reversed(rows)}
    few = len(rows) <= 2 * top
    shown = [row for row in rows if few or row["rank"] <= top or row["rank"] == first[row["method"], row["training"]]]
    result, parts = verdict.members[0], [counts(one.model) for one in verdict.members]
    title = f"{verdict.model}: {'; trained: '.join(parts)}"
    if len(shown) < len(rows):
        title += f"; the best of each method and the {top} best"
    names = [column.key for column in hyperparameter_columns(findings)]
    reading = {name: methods_reading(result.model.rows, name) for name in names}
    made: list[dict[str, Any]] = [{"method": "original", **result.model.baseline}] if result.model.baseline else []
    for row in shown:
        unread = [name for name, methods in reading.items() if row["method"] not in methods]
        made.append({**row, **dict.fromkeys(unread)})
    made = [{**row, "retained": result.retained(row.get("acc_mean")), **limits(result)} for row in made]
    columns = [*every.pick(*names, "ppl", "draws", "acc_mean").columns, _OF_ORIGINAL, PARAMETERS]
    if len(parts) > 1:
        columns.insert(len(names), Column("training", "Training", style="setting"))
    notes = [*accuracy_notes(findings), *window_notes(findings)]
    return replace(every, title=title, columns=columns, rows=made, notes=notes)


def _across(findings: Findings, labels: Collection[str]) -> Table | None:
    """Return what the models of these labels lose with each other's best, in points, also with the best single configuration for
    all; None with fewer than two."""
    table = transfer(findings)
    if table is None or findings.transfer is None or len(labels) < 2:
        return None
    for_all = findings.transfer.best_for_all
    table = replace(
        table.pick("model", "name", *map(of_model, labels)), title=f"{table.title}, in points; –: not tried"
    )
    table = table.with_rows([row for row in table.rows if row["model"] in labels])
    losses = [for_all["models"].get(row["model"], {}) if for_all["config"] else {} for row in table.rows]
    if not any(losses):
        return table
    columns = [
        *table.columns,
        Column("loss_points", f"Best for all: {for_all['config']}", "points", "loss_points_stderr"),
    ]
    values = [{name: loss.get(name) for name in ("loss_points", "loss_points_stderr")} for loss in losses]
    return replace(table, columns=columns, rows=[{**row, **loss} for row, loss in zip(table.rows, values, strict=True)])
