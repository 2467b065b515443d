"""Outcomes of zero-shot items: what is kept of each, the metrics they add up to, their table. No torch needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tune_prune.core.config import ZERO_SHOT_METRIC
from tune_prune.core.measures import chance


@dataclass(frozen=True)
class ItemScore:
    """Holds the outcome of one item: lm-eval's accuracies (0 or 1) and what they came from."""

    task: str
    doc_id: int  # position in the task's evaluation split
    slice: int  # the first slice that covers it
    acc: float
    acc_norm: float | None  # by log-likelihood per character; None where the task does not define it
    loglikelihoods: tuple[float, ...]  # nats, one per choice
    gold: int  # index of the right choice; -1 where the task has no single one

    @property
    def score(self) -> float:
        """Return the accuracy by which this task is reported."""
        if metric_of(self.task) == "acc":
            return self.acc
        assert self.acc_norm is not None, f"{self.task} was built without acc_norm"
        return self.acc_norm


def metric_of(task: str) -> str:
    """Return the metric by which a task is reported; acc for tasks other than the seven."""
    return ZERO_SHOT_METRIC.get(task, "acc")


def summarize(items: Iterable[ItemScore]) -> dict[str, float]:
    """Return the metrics of items: accuracies as fractions, log-probabilities of right choices in nats, with standard errors.

    They are acc_<task>, acc_<task>_stderr, acc_mean, acc_mean_stderr, gold_logprob_<task> and so on.

    A task's standard error is lm-eval's: of a mean of n outcomes with the n - 1 variance, sqrt(p (1 - p) / (n - 1)),
    nan for a single item. acc_mean is the plain mean of the k tasks; its error sqrt(sum of squared errors) / k takes
    them as independent. chance_acc_mean: what picking choices blindly would give, by the same mean; nan
    where an item has several right ones.

    gold_logprob: the log-probability of an item's right choice, the sum over its tokens, averaged in the same way. Items without
    a single right choice (gold -1) are left out, and so is a task that has no others.
    """
    items = list(items)
    scores: dict[str, list[float]] = {}
    chances: dict[str, list[float]] = {}
    for item in items:
        scores.setdefault(item.task, []).append(item.score)
        chances.setdefault(item.task, []).append(chance(len(item.loglikelihoods), item.gold))
    means = {task: sum(values) / len(values) for task, values in scores.items()}
    errors = {
        task: math.sqrt(means[task] * (1 - means[task]) / (len(values) - 1)) if len(values) > 1 else math.nan
        for task, values in scores.items()
    }
    metrics: dict[str, float] = {}
    for task in scores:
        metrics |= {f"acc_{task}": means[task], f"acc_{task}_stderr": errors[task]}
    metrics["chance_acc_mean"] = sum(sum(values) / len(values) for values in chances.values()) / len(chances)
    metrics["acc_mean"] = sum(means.values()) / len(means)
    metrics["acc_mean_stderr"] = math.sqrt(sum(error**2 for error in errors.values())) / len(errors)
    return metrics | _gold_logprobs(gold_logprobs_by_task(items))


def _gold_logprobs(golds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the metrics of `summarize` from the log-probabilities of each task's right choices; none without any."""
    by_task = {task: mean_and_stderr(values) for task, values in golds.items()}
    if by_task:
        means, errors = zip(*by_task.values(), strict=True)
        by_task["mean"] = sum(means) / len(means), math.sqrt(sum(error**2 for error in errors)) / len(errors)
    names = {f"gold_logprob_{task}": pair for task, pair in by_task.items()}
    return {
        f"{name}{end}": value for name, pair in names.items() for end, value in zip(("", "_stderr"), pair, strict=True)
    }


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and its standard error with the n - 1 variance: nan for a single value."""
    count, mean = len(values), sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(spread / (count - 1) / count) if count > 1 else math.nan


def outcomes_by_task(items: Iterable[ItemScore]) -> dict[str, str]:
    """Return the scores of each task's items in the order given, a "0" or "1" each."""
    outcomes: dict[str, list[str]] = {}
    for item in items:
        outcomes.setdefault(item.task, []).append("1" if item.score else "0")
    return {task: "".join(scores) for task, scores in outcomes.items()}


def gold_logprobs_by_task(items: Iterable[ItemScore]) -> dict[str, tuple[float, ...]]:
    """Return the log-probability, in nats, of the right choice of each task's items in the order given.

    Items without a single right choice are left out, and so is a task that has no others.
    """
    golds: dict[str, list[float]] = {}
    for item in items:
        if item.gold >= 0:
            golds.setdefault(item.task, []).append(item.loglikelihoods[item.gold])
    return {task: tuple(values) for task, values in golds.items()}


def to_parquet(items: Iterable[ItemScore]) -> bytes:
    """Return the content of a Parquet file with one row per item: the fields of ItemScore and `score`."""
    import pyarrow.parquet  # not above: a machine that only measures speed, as scripts/bench_gpu.py, may lack it

    schema = pyarrow.schema(
        [
            ("task", pyarrow.string()),
            ("doc_id", pyarrow.int32()),
            ("slice", pyarrow.int8()),
            ("acc", pyarrow.float32()),
            ("acc_norm", pyarrow.float32()),
            ("score", pyarrow.float32()),
            ("gold", pyarrow.int32()),
            ("loglikelihoods", pyarrow.list_(pyarrow.float64())),
        ]
    )
    content = pyarrow.BufferOutputStream()
    rows = [vars(item) | {"score": item.score} for item in items]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), content)
    return content.getvalue().to_pybytes()
