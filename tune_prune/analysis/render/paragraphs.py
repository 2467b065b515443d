"""paragraphs.md: draft text for the set-up, results and findings of a paper. Every number in it is computed.

A sentence that claims something is written where a test carries it: that a configuration is worse, where it is outside the
confidence set of the best; a trend where `effects.trend` found one; a difference between methods where the analysis of
variance did; a correlation where its interval leaves out zero. Elsewhere it says that the data do not show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tune_prune.analysis.render import messages
from tune_prune.analysis.render.templating import environment
from tune_prune.analysis.statistics.findings import Correlation, Findings, ModelFindings
from tune_prune.analysis.tables.configurations import ratio
from tune_prune.analysis.tables.hyperparameters import trend_message
from tune_prune.analysis.tables.trial_tables import statistics
from tune_prune.core.config import ZERO_SHOT_METRIC
from tune_prune.core.files import atomic_write_text

SIGNIFICANCE = 0.05  # level of every claim

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
    template = environment().get_template("paragraphs.md.j2")
    table = statistics(findings)
    last = table.columns[-1].key  # stands for all
    totals = {row["statistic"]: row[last] for row in table.rows if not messages.missing(row[last])}
    text = template.render(
        findings=findings,
        totals=totals,
        passes=[
            f"{messages.integer(n)} {name.replace('_', ' ')}" for name, n in totals.items() if name.endswith("_passes")
        ],
        setup=_setup(findings),
        models={label: _claims(found) for label, found in findings.models.items()},
        transfer=_transfer(findings),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text)


def _setup(findings: Findings) -> dict[str, Any]:
    found = list(findings.models.values())
    told = [entry.model.source for entry in found if entry.model.source]
    sources = [source for source in told if {"calibration", "dtype", "seed", "protocol"} <= set(source)]
    methods = dict.fromkeys(str(name) for entry in found for name in entry.eligible["pruning_method"])
    tasks = {task: row["items"] for entry in found for task, row in entry.tasks.iterrows()}
    removed = [value for entry in found for value in entry.eligible["removed_fraction"].dropna()]
    return {
        "ratios": [f"{messages.number(100 * value)}%" for value in sorted({entry.model.ratio for entry in found})],
        "shapes": sorted({entry.model.shape for entry in found}),
        "removed": list(dict.fromkeys(messages.percent(value) for value in (min(removed), max(removed))))
        if removed
        else [],
        "methods": [_METHODS.get(name, name) for name in sorted(methods)],
        "seq_lens": _levels(found, "taylor_seq_len"),
        "num_samples": _levels(found, "taylor_num_samples"),
        "tasks": [
            f"{task} ({ZERO_SHOT_METRIC.get(str(task), 'acc')}"
            + (")" if messages.missing(items) else f", {messages.integer(items)} items)")
            for task, items in tasks.items()
        ],
        "kinds": {entry.model.kind for entry in found},
        "bases": {entry.basis for entry in found},
        "calibration": sorted({Path(source["calibration"]).name for source in sources}),
        **{name: sorted({str(source[name]) for source in sources}) for name in ("dtype", "seed")},
        "windows": sorted({source["protocol"]["perplexity_window"] for source in sources}),
    }


def _levels(found: list[ModelFindings], factor: str) -> list[str]:
    return [str(level) for level in sorted({int(level) for entry in found for level in entry.eligible[factor]})]


def _claims(found: ModelFindings) -> dict[str, Any]:
    """What the statistics say of one model, for the template."""
    top = found.eligible.iloc[0]
    dense = found.model.baseline.get("acc_mean")
    return {
        "top": top,
        "others": found.tied[1:],
        "outside": len(found.eligible) - len(found.tied),
        "tested": found.basis != "unknown",
        "dense": dense,
        "retained": ratio(top["acc_mean"], dense),
        "retained_corrected": ratio(found.cross_fit.corrected, dense) if found.cross_fit else None,
        "spread_of_tasks": _retained_by_task(found),
        "methods": _methods(found),
        "trends": [messages.format_message(trend_message(trend, words=True)) for trend in found.trends.values()],
        "correlations": [_correlation(entry) for entry in found.correlations],
    }


def _retained_by_task(found: ModelFindings) -> dict[str, Any] | None:
    retained = found.tasks["retained"].dropna()
    if len(retained) < 2:
        return None
    low, high = retained.idxmin(), retained.idxmax()
    return {"low": low, "high": high, "lowest": retained[low], "highest": retained[high]}


def _methods(found: ModelFindings) -> dict[str, Any]:
    """Mean accuracy of each, and what the analysis of variance says of their difference."""
    means = [
        f"{method} {messages.acc(row['mean'])} ({_spread(row)}n = {row['n']})"
        for method, row in found.methods.iterrows()
    ]
    test = None
    if found.effects is not None and "method" in found.effects.index:
        row, residual = found.effects.loc["method"], found.effects.loc["residual"]
        if not messages.missing(row["p"]):
            size = f"F({row['df']:.0f}, {residual['df']:.0f}) = {messages.points(row['F'])}, p {_p_value(row['p'])}"
            test = {"size": size, "differ": row["p"] < SIGNIFICANCE}
    return {"means": means, "highest": found.methods["mean"].idxmax(), "test": test}


def _p_value(p: float) -> str:
    """`= .032`, `< .001`."""
    return messages.p_value(p).replace("<", "< ") if p < 0.001 else f"= {messages.p_value(p)}"


def _spread(row: Mapping[str, Any]) -> str:
    return "" if messages.missing(row["std"]) else f"std {messages.acc(row['std'])}, "


def _correlation(entry: Correlation) -> str:
    """A sentence on one correlation, never more than its interval carries."""
    name = "perplexity" if entry.column == "ppl" else f"`{entry.column}`"
    if entry.r is None:
        assert entry.reason is not None, f"no reason why the correlation with {entry.column} is missing"
        reason = messages.format_message(entry.reason)
        return reason if "column" in entry.reason.values else f"Correlation with {name}: {reason}"
    runs = f"r = {messages.acc(entry.r)} over {entry.n} runs"
    if entry.r_independent is not None:
        runs = f"r = {messages.acc(entry.r_independent)} over {entry.n_independent} gradient passes"
    elif entry.n_independent is not None:
        runs += f", which share {entry.n_independent} gradient passes: too few for an interval"
    beside = (
        ""
        if entry.r_independent is None
        else f"; {messages.acc(entry.r)} over the {entry.n} runs, which share these passes"
    )
    if entry.low is None or entry.high is None:
        return f"No correlation with {name} is established ({runs}{beside})."
    interval = f"95% interval {messages.acc(entry.low)} to {messages.acc(entry.high)}"
    if entry.low <= 0 <= entry.high:
        return f"No correlation with {name} is established ({runs}, {interval}{beside})."
    sign = "positively" if entry.r > 0 else "negatively"
    return f"Accuracy correlates {sign} with {name} ({runs}, {interval}{beside})."


def _transfer(findings: Findings) -> list[str]:
    """What each model loses with the best of each other one: a sentence each."""
    if findings.transfer_points is None or findings.transfer_stderr is None or findings.transfer_percent is None:
        return []
    sentences = []
    for label, found in findings.models.items():
        for other, owner in findings.models.items():
            if other == label:
                continue
            name = owner.best["name"]
            loss, stderr = findings.transfer_points.loc[label, other], findings.transfer_stderr.loc[label, other]
            with_it = f"With {other}'s configuration, {name}, {label}"
            if messages.missing(loss):
                sentences.append(f"{with_it} has no complete run.")
                continue
            percent = findings.transfer_percent.loc[label, other]
            ruled_out = name not in found.tied
            sentences.append(f"{with_it} {_loss(loss, stderr, percent, ruled_out)}.")
    return sentences


def _loss(points: float, stderr: float, percent: float, ruled_out: bool) -> str:
    """A loss is claimed where the configuration is ruled out as the model's best: its own best is the highest of many
    noisy values, so a test of the two alone would find losses where there are none."""
    size = f"{messages.pm(abs(points), stderr, 'points')} points"
    if ruled_out and points > 0:
        return f"loses {size}, {percent:.1f}% of its accuracy"
    return f"shows no loss beyond noise ({size} lower)" if points >= 0 else f"scores {size} higher"
