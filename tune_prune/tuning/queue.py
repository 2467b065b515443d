"""In which order a search is worked on: preparation jobs first, then every trial whose statistics are there.

Jobs and trials run on the same workers, so that no worker starts and no model is loaded twice. Nothing ever waits on a
device: what is not ready is not handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tune_prune.pruning.methods import load_method
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.preparation import PrepareJob, Work
from tune_prune.tuning.searcher import OptunaSearcher
from tune_prune.tuning.worker import TrialSpec


class WorkQueue:
    """Hands out `jobs`, then `specs` in their order or, with `adaptive`, what that proposes. Nothing more once a job has
    failed."""

    def __init__(
        self, jobs: Sequence[PrepareJob], specs: Sequence[TrialSpec], adaptive: OptunaSearcher | None = None
    ) -> None:
        self._jobs = list(jobs)
        self._unprepared = {(job.run, job.samples) for job in jobs}
        self._waiting = [] if adaptive is not None else list(specs)
        methods = dict.fromkeys(spec.config.method for spec in self._waiting)
        self._needing = {method for method in methods if load_method(method).statistics}
        self._adaptive = adaptive
        self.failed = False

    @property
    def empty(self) -> bool:
        """Whether nothing more will be handed out."""
        adaptive = self._adaptive.remaining if self._adaptive is not None else 0
        return self.failed or not (self._jobs or self._waiting or adaptive)

    def next(self) -> Work | None:
        """The next job or trial; None where all that is left waits for a job, or nothing is left."""
        if self.failed:
            return None
        if self._jobs:
            return self._jobs.pop(0)
        if self._adaptive is not None:
            return self._adaptive.ask()
        for spec in self._waiting:
            waits = spec.config.method in self._needing
            if not waits or (spec.run, spec.config.samples) not in self._unprepared:
                self._waiting.remove(spec)
                return spec
        return None

    def report(self, work: Work, message: Message) -> None:
        """A trial has come so far, and goes on."""
        if self._adaptive is not None and isinstance(work, TrialSpec) and isinstance(message, TrialMessage):
            self._adaptive.report(work, message)

    def end(self, work: Work, last: Message | None, error: bool = False) -> None:
        """A job or trial is done, was stopped or has failed after the message `last`."""
        if isinstance(work, PrepareJob):
            self._unprepared.discard((work.run, work.samples))
            self.failed = self.failed or error or (isinstance(last, JobMessage) and bool(last.refused))
        elif self._adaptive is not None:
            self._adaptive.tell(work, last if isinstance(last, TrialMessage) else None, error)
