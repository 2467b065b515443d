"""What is heard of the work while it is done: one message per stage of a trial, one per preparation job.

Whoever follows a search (stopping rules, observers, live line, adaptive search) reads messages and nothing else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tune_prune.core.measures import fraction
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.trial.trial import TrialProgress


@dataclass(frozen=True)
class Slice:
    """What a slice of the zero-shot items has added to a trial."""

    index: int
    fraction: float  # of all items, as the protocol says it: stopping levels are met exactly, whatever the rounding
    outcomes: Mapping[str, str]  # task -> "0" or "1" per item that it adds, in the order that is the same for all
    items_per_task: Mapping[str, int]  # in the protocol
    # Task -> log-probability in nats of the right choice, of those of its items that have a single one, in the same order.
    gold_logprobs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    gold_items_per_task: Mapping[str, int] = field(default_factory=dict)  # those in the protocol; no task without any


@dataclass(frozen=True)
class TrialMessage:
    """A trial after one of its stages, or at its end."""

    progress: TrialProgress
    stage: StageReport | None = None  # that was run; None where it failed
    index: int = 0  # of the stage in the trial
    slice: Slice | None = None  # of a zero-shot stage
    record: TrialRecord | None = None  # of a trial that has ended; it is in the ledger already
    warnings: tuple[str, ...] = ()  # that were logged in the stage

    @property
    def status(self) -> str:
        return "running" if self.record is None else self.record.status

    @property
    def ended(self) -> bool:
        return self.record is not None

    @property
    def accuracy(self) -> float | None:
        """acc_mean over the items seen so far; None before the first, and where it is not finite."""
        value = self.progress.metrics.get("acc_mean", math.nan)
        return value if math.isfinite(value) else None


@dataclass(frozen=True)
class JobMessage:
    """A job's result: a baseline's record, or one report per pass that was made (none: all was cached), or why it cannot be
    done."""

    reports: tuple[StageReport, ...] = ()
    baseline: TrialRecord | None = None
    refused: str = ""
    given_up: str = ""  # why its trials, which need not fail as it did, are to try by themselves
    warnings: tuple[str, ...] = ()  # that were logged meanwhile

    @property
    def ended(self) -> bool:
        return True

    def __str__(self) -> str:
        if self.given_up:
            return self.given_up
        if self.baseline is not None:
            accuracy, ppl = (self.baseline.metrics.get(name, math.nan) for name in ("acc_mean", "ppl"))
            return f"accuracy {fraction(accuracy)}, perplexity {ppl:.2f}"
        if not self.reports:
            return "found in the cache"
        return f"{sum(report.duration_s for report in self.reports):.1f} s"


Message = TrialMessage | JobMessage


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """The warnings that this package logs meanwhile, which in a worker would be read by nobody."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("tune_prune"), Collect(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
