"""Which of a checkpoint's recorded numbers may stand beside newly measured ones: those that were measured in the same way."""

from __future__ import annotations

from dataclasses import dataclass, field

from tune_prune.checkpoint.manifest import Manifest
from tune_prune.core.config import ModelRun
from tune_prune.data.sources import MeasuredOn


@dataclass(frozen=True)
class Recorded:
    """Recorded numbers that can be compared; None or absent where they cannot, for the reasons in `notes`."""

    ppl: float | None
    accuracies: dict[str, float]  # by task
    acc_mean: float | None
    notes: tuple[str, ...]  # sentences
    kl: dict[str, float] = field(default_factory=dict)  # to the dense model, by "text" and "tasks"


def comparable(manifest: Manifest, run: ModelRun, measured_on: MeasuredOn) -> Recorded:
    """The recorded numbers that `run`, which measures on `measured_on` (context.measured_on), can be compared with.

    The order of items and the slices do not count: the last slice has all items.
    """
    metrics, then, before = manifest.metrics, manifest.source, manifest.measured_on
    if metrics is None:
        return _nothing("the checkpoint has no recorded numbers")
    if then is None or before is None:
        return _nothing("it is not recorded how they were measured")
    if before.protocol != measured_on.protocol:
        return _nothing(
            f"they were measured by version {before.protocol} of the protocol, these by {measured_on.protocol}"
        )
    notes = []
    ppl = metrics.get("ppl")
    windows = then.protocol.perplexity_window, run.protocol.perplexity_window
    if before.text != measured_on.text:
        ppl = None
        notes.append("the recorded perplexity is not compared: it was measured on another text")
    elif windows[0] != windows[1]:
        ppl = None
        notes.append(
            f"the recorded perplexity is not compared: its windows have {windows[0]:,} tokens, these {windows[1]:,}; measure with "
            f"--perplexity-window {windows[0]} to compare"
        )
    bounds = then.protocol.perplexity_tokens, run.protocol.perplexity_tokens
    if ppl is not None and bounds[0] != bounds[1]:
        ppl = None
        again = _again("--perplexity-tokens", bounds[0])
        notes.append(
            f"the recorded perplexity is not compared: it was measured on {_tokens(bounds[0])}, this on {_tokens(bounds[1])}; "
            f"measure {again} to compare"
        )

    kl = {"text": metrics.get("kl_text")} if ppl is not None else {}  # by the same text, cut in the same way

    accuracies: dict[str, float] = {}
    limits = then.protocol.limit, run.protocol.limit
    if limits[0] != limits[1]:
        again = _again("--limit", limits[0])
        notes.append(
            f"the recorded accuracies are not compared: they are over {_items(limits[0])}, these over {_items(limits[1])}; measure "
            f"{again} to compare"
        )
    else:
        for task, content in measured_on.tasks.items():
            accuracy = metrics.get(f"acc_{task}")
            if task not in before.tasks or accuracy is None:
                notes.append(f"{task} is not compared: it was not recorded")
            elif before.tasks[task] != content:
                notes.append(
                    f"{task} is not compared: its questions or the version of lm-eval have changed since it was recorded"
                )
            else:
                accuracies[task] = accuracy
    same = set(accuracies) == set(measured_on.tasks) == set(before.tasks)
    if accuracies and not same:
        notes.append(f"the recorded mean is not compared: it is over {', '.join(before.tasks)}")
    if same and then.protocol.tasks == run.protocol.tasks:  # items of the tasks in turn, up to some tokens
        kl["tasks"] = metrics.get("kl_tasks")
    if then.dtype != run.dtype:
        notes.append(f"recorded in {then.dtype}, measured in {run.dtype}: differences by rounding are to be expected")
    mean, kept = metrics.get("acc_mean") if same else None, {n: value for n, value in kl.items() if value is not None}
    return Recorded(ppl, accuracies, mean, tuple(notes), kept)


def _nothing(reason: str) -> Recorded:
    return Recorded(None, {}, None, (f"nothing is compared with recorded numbers: {reason}",))


def _again(flag: str, value: int | None) -> str:
    return f"without {flag}" if value is None else f"with {flag} {value}"


def _tokens(bound: int | None) -> str:
    return "the whole text" if bound is None else f"its first {bound:,} tokens"


def _items(limit: int | None) -> str:
    return "all questions" if limit is None else f"at most {limit:,} questions a task"
