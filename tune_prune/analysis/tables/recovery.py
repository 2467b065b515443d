"""The table of trained models: each beside the same configuration without training."""

from __future__ import annotations

from typing import Any

from tune_prune.analysis.input.measures import GOLD, TEXTS
from tune_prune.analysis.statistics.differences import difference, measure_changes, tried
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
from tune_prune.core.config import PruningConfig
from tune_prune.core.values.hyperparameters import HYPERPARAMETERS


def recovery(findings: Findings) -> Table | None:
    """Every trained configuration that was measured without training, too, the most accurate first; None if there is none."""
    models = findings.models.values()
    untrained = {(found.model.base, found.model.ratio): found for found in models if not is_trained(found)}
    rows: list[dict[str, Any]] = []
    for found in filter(is_trained, models):
        if (before := untrained.get((found.model.base, found.model.ratio))) is None:
            continue
        places = {tried(row): place for place, row in before.eligible[::-1].iterrows()}
        for place, row in found.eligible.iterrows():
            if (own := places.get(tried(row))) is None:
                continue
            of_own = before.eligible.loc[own]
            gain = difference(row, of_own, findings.items)
            draws = [of.draws.get(at, of.eligible.loc[[at]]) for of, at in ((before, own), (found, place))]
            rows.append(
                configuration(found, row)
                | {f"before_{name}": of_own.get(name) for name in ("acc_mean", "acc_mean_stderr", "ppl", GOLD, *TEXTS)}
                | {"config": of_own["name"], "gain": gain.points, "gain_stderr": gain.stderr_points}
                | measure_changes(before.eligible.loc[[own]], found.eligible.loc[[place]], draws)
            )
    columns = [
        *(MODEL, CONFIG),
        *(column for column in hyperparameter_columns(findings) if HYPERPARAMETERS[column.key].of == "recovery"),
        Column("before_acc_mean", "Untrained", "acc", "before_acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("acc_mean", "Trained", "acc", "acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("gain", "Gain", "points", "gain_stderr", hint="in points, on the same items"),
        Column("before_ppl", "Perplexity, untrained", "ppl"),
        Column("ppl", "Perplexity, trained", "ppl"),
        Column(f"before_{GOLD}", "Gold logprob, untrained", "nats", detail=True),
        Column(GOLD, "Gold logprob, trained", "nats"),
        Column(f"{GOLD}_change", "Gold logprob, change", "nats", f"{GOLD}_change_stderr", hint="on the same items"),
        Column("before_kl_text", "KL text, untrained", "nats", detail=True),
        Column("kl_text", "KL text, trained", "nats"),
        Column("kl_text_change", "KL text, change", "nats", "kl_text_change_stderr", hint="on the same tokens"),
        Column("before_kl_tasks", "KL tasks, untrained", "nats", detail=True),
        Column("kl_tasks", "KL tasks, trained", "nats"),
        Column("kl_tasks_change", "KL tasks, change", "nats", "kl_tasks_change_stderr", hint="on the same tokens"),
    ]
    notes = [*accuracy_notes(findings), Message("note_recovery")]
    return Table("recovery", "Training after pruning", columns, rows, notes) if rows else None


def is_trained(found: ModelFindings) -> bool:
    """Whether these are models that were trained after pruning."""
    return found.model.recovery != PruningConfig.recovery
