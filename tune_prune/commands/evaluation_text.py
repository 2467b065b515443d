"""Text of `evaluate`: the checkpoint, every stage as it ends, and the result as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tune_prune.analysis.render.messages import acc, pm
from tune_prune.checkpoint.layers import aligned
from tune_prune.checkpoint.manifest import MANIFEST, Manifest, Recorded
from tune_prune.commands.plan_page import perplexity_text_of
from tune_prune.core.config import BEGUN
from tune_prune.core.records import StageReport
from tune_prune.evaluation.evaluation import Evaluation
from tune_prune.pruning.methods import read_by


def checkpoint_line(manifest: Manifest) -> str:
    """Return a line for a pruned checkpoint: what it was made from, and how."""
    return (
        f"checkpoint   {manifest.base.label}, {manifest.plan.removed_fraction:.1%} of its parameters removed by "
        f"{manifest.config.in_words(read_by(manifest.config))}; its files are those that {MANIFEST} lists"
    )


def stage_line(report: StageReport) -> str:
    """Return a line for a stage that is done. The error of an accuracy stands with the result (`result_text`)."""
    metrics, seconds = report.metrics, f"{report.duration_s:.1f} s"
    if report.stage == "kl":
        values = ", ".join(
            f"{name} {metrics[f'kl_{name}']:.4f}" for name in ("text", "tasks") if f"kl_{name}" in metrics
        )
        return f"KL           {values}  ({report.tokens:,} tokens, {seconds})"
    if report.stage == "perplexity":
        return f"perplexity   {_perplexity(metrics['ppl'])}  ({report.tokens:,} tokens, {seconds})"
    questions = f"{report.items_scored:,} of {report.items_total:,} questions"
    return f"accuracy     {acc(metrics['acc_mean'])}  ({questions}; {report.tokens:,} tokens, {seconds})"


def _perplexity(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100_000 else f"{value:.3g}"


def result_text(
    evaluation: Evaluation, earlier: Recorded | None, baseline: Mapping[str, float | None] | None = None
) -> str:
    """Return the result as text for the screen: what it comes to, KL where it was measured, perplexity, a row per task; the
    log-probabilities of right answers are in nats. `earlier`: numbers recorded for a pruned checkpoint, to stand beside the
    measured ones; `baseline`: those of its original."""
    metrics = evaluation.record.metrics
    beside = () if earlier is None else ("recorded", "difference")
    rows = [("task", "metric", "accuracy", *beside, "chance", "questions", "log-prob of right")]
    for task, row in evaluation.tasks.iterrows():
        beside = () if earlier is None else _beside(row["accuracy"], earlier.accuracies.get(task))
        accuracy = _accuracy(row["accuracy"], row["stderr"])
        rows.append(
            (task, row["metric"], accuracy, *beside, acc(row["chance"]), f"{row['items']:,}", _gold(metrics, task))
        )
    beside = () if earlier is None else _beside(evaluation.acc_mean, earlier.acc_mean)
    accuracy, chance = _accuracy(evaluation.acc_mean, evaluation.acc_mean_stderr), acc(metrics["chance_acc_mean"])
    rows.append(("mean", "", accuracy, *beside, chance, f"{len(evaluation.items):,}", _gold(metrics, "mean")))
    text, compared = perplexity_text_of(evaluation.run), ""
    if earlier is not None and earlier.ppl is not None:
        compared = f"; recorded {_perplexity(earlier.ppl)}, difference {_difference(evaluation.ppl, earlier.ppl)}"
    return "\n".join(
        [
            f"result       accuracy {accuracy}, perplexity {_perplexity(evaluation.ppl)}"
            + _known(evaluation, earlier, baseline or {}),
            "",
            *_kl_lines(evaluation, earlier),
            f"perplexity {_perplexity(evaluation.ppl)} on {text}, windows of {evaluation.perplexity_window:,} tokens"
            f"{f'; {BEGUN}' * evaluation.run.protocol.bos}{compared}",
            "",
            *aligned(rows, left=2),
        ]
    )


def _known(evaluation: Evaluation, earlier: Recorded | None, baseline: Mapping[str, float | None]) -> str:
    """Say the original's accuracy and what was recorded of this model, as far as both can be compared with the result."""
    if earlier is None or earlier.acc_mean is None:
        return ""
    pairs = [(evaluation.acc_mean, earlier.acc_mean), *([] if earlier.ppl is None else [(evaluation.ppl, earlier.ppl)])]
    same = all(_difference(*pair) == "0" for pair in pairs)
    said = ", recorded otherwise"
    if same:
        said = ", accuracy as recorded" if earlier.ppl is None else ", both as recorded"
    original = baseline.get("acc_mean")
    return said if original is None else f"{said}; the original's accuracy is {acc(original)}"


def _kl_lines(evaluation: Evaluation, earlier: Recorded | None) -> list[str]:
    """Return a line for each text that KL to the original was measured on."""
    on, lines = {"text": "the perplexity text", "tasks": "right answers"}, []
    for name, (value, stderr) in evaluation.kl.items():
        recorded = None if earlier is None else earlier.kl.get(name)
        compared = "" if recorded is None else f"; recorded {recorded:.4f}, difference {_difference(value, recorded)}"
        error = "" if math.isnan(stderr) else f" ± {stderr:.4f}"
        lines.append(f"KL         {value:.4f}{error} nats per token on {on[name]}{compared}")
    return lines


def _gold(metrics: Mapping[str, float], task: str) -> str:
    """Write the log-probability of the right answer in nats, with its standard error."""
    value, stderr = (metrics.get(f"gold_logprob_{task}{end}", math.nan) for end in ("", "_stderr"))
    return pm(value, stderr, "nats")


def _accuracy(value: float, stderr: float) -> str:
    """Write an accuracy as the final table of a search does, with the error of one that is all right or all wrong, too."""
    return acc(value) if math.isnan(stderr) else f"{acc(value)} ± {acc(stderr)}"


def _beside(measured: float, recorded: float | None) -> tuple[str, str]:
    """Return the cells "recorded" and "difference"."""
    return ("–", "–") if recorded is None else (acc(recorded), _difference(measured, recorded))


def _difference(measured: float, recorded: float) -> str:
    """Write a difference; 0 only where the two are the same number."""
    if measured == recorded or (math.isnan(measured) and math.isnan(recorded)):
        return "0"
    difference = measured - recorded
    return f"{difference:+.4f}" if 1e-4 <= abs(difference) < 1e5 else f"{difference:+.1e}"
