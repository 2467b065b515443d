"""Messages of work while it is done: one per stage of a trial, one per preparation job.

Whoever follows a search (stopping rules, observers, live line, adaptive search) reads messages and nothing else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tune_prune.core.measures import fraction
from tune_prune.core.records import Slice, StageReport, TrialRecord


@dataclass(frozen=True)
class TrialMessage:
    """A trial after one of its stages, or at its end, when its record is in the ledger already."""

    record: TrialRecord
    stage: StageReport | None = None  # that was run; None where it failed
    warnings: tuple[str, ...] = ()  # that were logged in the stage

    @property
    def ended(self) -> bool:
        return self.record.ended

    @property
    def slice(self) -> Slice | None:
        """The slice of items of a zero-shot stage."""
        return None if self.stage is None else self.stage.slice

    @property
    def index(self) -> int:
        """The number of the stage in the trial, from 0."""
        return len(self.record.stages) - 1


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
    """Return the warnings that this package logs meanwhile, which in a worker would be read by nobody."""
    warnings: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    logger, handler = logging.getLogger("tune_prune"), Collect(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)
