"""The table of trained models: each beside the same configuration without training."""

from __future__ import annotations

from typing import Any

from tune_prune.analysis.input.measures import GOLD, TEXTS
from tune_prune.analysis.statistics.differences import difference, tried
from tune_prune.analysis.statistics.findings import Findings, Message
from tune_prune.analysis.tables.configurations import ACCURACY, CONFIG, MODEL, accuracy_notes, configuration
from tune_prune.analysis.tables.table import Column, Table
from tune_prune.core.config import PruningConfig


def recovery(findings: Findings) -> Table | None:
    """Every trained configuration that was measured without training, too, the most accurate first; None if there is none."""
    untrained = {
        (found.model.base, found.model.ratio): {tried(row): row for _, row in found.eligible[::-1].iterrows()}
        for found in findings.models.values()
        if found.model.recovery == PruningConfig.recovery
    }
    rows: list[dict[str, Any]] = []
    for found in findings.models.values():
        if found.model.recovery == PruningConfig.recovery:
            continue
        before = untrained.get((found.model.base, found.model.ratio), {})
        for _, row in found.eligible.iterrows():
            if (own := before.get(tried(row))) is None:
                continue
            gain = difference(row, own, findings.items)
            values = {name: own.get(name) for name in ("acc_mean", "acc_mean_stderr", "ppl", GOLD, *TEXTS)}
            rows.append(
                configuration(found, row)
                | {f"before_{name}": value for name, value in values.items()}
                | {"config": own["name"], "gain": gain.points, "gain_stderr": gain.stderr_points}
            )
    columns = [
        *(MODEL, CONFIG),
        Column("before_acc_mean", "Untrained", "acc", "before_acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("acc_mean", "Trained", "acc", "acc_mean_stderr", threshold=ACCURACY.threshold),
        Column("gain", "Gain", "points", "gain_stderr", hint="in points, on the same items"),
        Column("before_ppl", "Perplexity, untrained", "ppl"),
        Column("ppl", "Perplexity, trained", "ppl"),
        Column(f"before_{GOLD}", "Gold logprob, untrained", "nats"),
        Column(GOLD, "Gold logprob, trained", "nats"),
        Column("before_kl_text", "KL text, untrained", "nats"),
        Column("kl_text", "KL text, trained", "nats"),
        Column("before_kl_tasks", "KL tasks, untrained", "nats"),
        Column("kl_tasks", "KL tasks, trained", "nats"),
    ]
    notes = [*accuracy_notes(findings), Message("note_recovery")]
    return Table("recovery", "Training after pruning", columns, rows, notes) if rows else None
