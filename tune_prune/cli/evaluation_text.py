"""What `evaluate` prints: the checkpoint, every stage as it ends, and the result as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tune_prune.checkpoint.manifest import Manifest
from tune_prune.checkpoint.recorded import Recorded
from tune_prune.checkpoint.sizes import aligned
from tune_prune.cli.plan_text import perplexity_text_of
from tune_prune.core.records import StageReport
from tune_prune.evaluation.evaluation import Evaluation


def checkpoint_line(manifest: Manifest) -> str:
    """A line for a pruned checkpoint: what it was made from, and how."""
    return (
        f"checkpoint   {manifest.base.label} pruned by {manifest.config.name}, {manifest.plan.removed_fraction:.1%} of its "
        f"parameters removed, format {manifest.format}; config and weights are those that tune_prune.json describes"
    )


def stage_line(report: StageReport) -> str:
    """A line for a stage that is done. The error of an accuracy stands with the result (`result_text`)."""
    metrics, seconds = report.metrics, f"{report.duration_s:.1f} s"
    if report.stage == "kl":
        values = ", ".join(
            f"{name} {metrics[f'kl_{name}']:.4f}" for name in ("text", "tasks") if f"kl_{name}" in metrics
        )
        return f"KL           {values}  ({report.tokens:,} tokens, {seconds})"
    if report.stage == "perplexity":
        return f"perplexity   {_perplexity(metrics['ppl'])}  ({report.tokens:,} tokens, {seconds})"
    items = f"{report.items_scored:,} of {report.items_total:,} items"
    return f"zero-shot    {metrics['acc_mean']:.4f}  ({items}; {report.tokens:,} tokens, {seconds})"


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100_000 else f"{value:.3g}"


def result_text(found: Evaluation, earlier: Recorded | None) -> str:
    """The result as text for the screen: KL where it was measured, perplexity, a row per task, what each stage cost; the
    log-probabilities of right choices are in nats. `earlier`: numbers recorded for a pruned checkpoint, to stand beside the
    measured ones."""
    metrics = found.record.metrics
    beside = () if earlier is None else ("recorded", "difference")
    rows = [("task", "metric", "accuracy", "stderr", *beside, "chance", "items", "gold logprob", "stderr")]
    for task, row in found.tasks.iterrows():
        beside = () if earlier is None else _beside(row["accuracy"], earlier.accuracies.get(task))
        cells = (task, row["metric"], f"{row['accuracy']:.4f}", _fraction(row["stderr"]))
        rows.append((*cells, *beside, _fraction(row["chance"]), f"{row['items']:,}", *_gold(metrics, task)))
    beside = () if earlier is None else _beside(found.acc_mean, earlier.acc_mean)
    cells = ("mean", "", f"{found.acc_mean:.4f}", _fraction(found.acc_mean_stderr))
    rows.append(
        (*cells, *beside, _fraction(metrics["chance_acc_mean"]), f"{len(found.items):,}", *_gold(metrics, "mean"))
    )

    costs = [("stage", "tokens", "seconds")]
    for name in dict.fromkeys(stage["stage"] for stage in found.record.stages):
        stages = [stage for stage in found.record.stages if stage["stage"] == name]
        tokens, seconds = (sum(stage[cost] for stage in stages) for cost in ("tokens", "duration_s"))
        costs.append((name.replace("_", "-"), f"{tokens:,}", f"{seconds:.1f}"))
    text, compared = perplexity_text_of(found.run), ""
    if earlier is not None and earlier.ppl is not None:
        compared = f"; recorded {_perplexity(earlier.ppl)}, difference {_difference(found.ppl, earlier.ppl)}"
    return "\n".join(
        [
            *_kl_lines(found, earlier),
            f"perplexity {_perplexity(found.ppl)} on {text}, windows of {found.perplexity_window:,} tokens{compared}",
            "",
            *aligned(rows, left=2),
            "",
            *aligned(costs),
        ]
    )


def _kl_lines(found: Evaluation, earlier: Recorded | None) -> list[str]:
    """A line for each text that KL to the dense model was measured on."""
    on, lines = {"text": "the perplexity text", "tasks": "right answers"}, []
    for name, (value, stderr) in found.kl.items():
        recorded = None if earlier is None else earlier.kl.get(name)
        compared = "" if recorded is None else f"; recorded {recorded:.4f}, difference {_difference(value, recorded)}"
        lines.append(f"KL         {value:.4f} ± {_fraction(stderr)} nats per token on {on[name]}{compared}")
    return lines


def _gold(metrics: Mapping[str, float], task: str) -> tuple[str, str]:
    """The log-probability of the right choice in nats, and its standard error."""
    value = metrics.get(f"gold_logprob_{task}", math.nan)
    return "-" if math.isnan(value) else f"{value:.3f}", _fraction(metrics.get(f"gold_logprob_{task}_stderr", math.nan))


def _beside(measured: float, recorded: float | None) -> tuple[str, str]:
    """The cells "recorded" and "difference"."""
    return ("-", "-") if recorded is None else (f"{recorded:.4f}", _difference(measured, recorded))


def _difference(measured: float, recorded: float) -> str:
    """0 only where the two are the same number."""
    if measured == recorded or (math.isnan(measured) and math.isnan(recorded)):
        return "0"
    difference = measured - recorded
    return f"{difference:+.4f}" if 1e-4 <= abs(difference) < 1e5 else f"{difference:+.1e}"


def _fraction(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"  # one item has no error
