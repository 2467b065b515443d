"""paragraphs.md: draft text for the set-up, results and findings of a paper. Every number in it is computed.

A sentence states something where a test carries it: that a configuration is worse, where it is outside the
confidence set of the best; a trend where `effects.trend` found one; a difference of two methods where `method_pairs` did; a
correlation where its interval leaves out zero. Elsewhere it says that the data do not show it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.render.templating import environment
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.tables.hyperparameters import pair_message, trend_message
from tune_prune.analysis.tables.table import missing
from tune_prune.analysis.tables.trial_tables import statistics
from tune_prune.core.config import ZERO_SHOT_METRIC
from tune_prune.core.files import atomic_write_text

_METHODS = {
    "taylor": "taylor (first-order Taylor importance)",
    "layerwise": "layerwise (Taylor importance weighted by the loss increase without the whole layer)",
    "blockwise": "blockwise (Taylor importance weighted by the loss increase without the attention or MLP block)",
    "wanda_sp": "wanda_sp (absolute weights times the norms of their inputs)",
    "magnitude": "magnitude (mean absolute weight)",
    "random": "random (control)",
}


def write_paragraphs(findings: Findings, path: Path) -> None:
    """Write the draft to `path` (Markdown)."""
    table = statistics(findings)
    last = table.columns[-1].key  # stands for all
    totals = {row["statistic"]: row[last] for row in table.rows if not missing(row[last])}
    template = environment().get_template("paragraphs.md.j2")
    text = template.render(
        findings=findings,
        totals=totals,
        setup=_setup(findings),
        metrics=ZERO_SHOT_METRIC,
        pair_message=pair_message,
        trend_message=trend_message,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text)


def _setup(findings: Findings) -> dict[str, Any]:
    """What was searched and how it was measured, over all models."""
    models = [found.model for found in findings.models.values()]
    eligible = pd.concat([found.eligible for found in findings.models.values()])
    sources = [source for model in models if (source := model.source) and {"calibration", "dtype", "seed", "protocol"} <= set(source)]
    return {
        "ratios": sorted({model.ratio for model in models}),
        "shapes": sorted({model.shape for model in models}),
        "kinds": {model.kind for model in models},
        "bases": {found.basis for found in findings.models.values()},
        "removed": eligible["removed_fraction"].dropna(),
        "methods": [_METHODS.get(name, name) for name in sorted(eligible["method"].unique())],
        "seq_lens": sorted(eligible["seq_len"].unique()),
        "num_samples": sorted(eligible["num_samples"].unique()),
        "tasks": dict(pd.concat([found.tasks["items"] for found in findings.models.values()]).items()),
        "calibration": sorted({Path(source["calibration"]).name for source in sources}),
        "dtype": sorted({source["dtype"] for source in sources}),
        "seed": sorted({str(source["seed"]) for source in sources}),
        "windows": sorted({source["protocol"]["perplexity_window"] for source in sources}),
    }
