"""The order in which a search is worked on: preparation jobs first, then every trial whose statistics are there.

Jobs and trials run on the same workers, so that no worker starts and no model is loaded twice. Nothing ever waits on a
device: what is not ready is not handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tune_prune.core.config import ModelRun, Samples
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics import by_statistic, load_statistic
from tune_prune.trial.failures import is_given_up
from tune_prune.trial.statistics import by_samples
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.sampler import OptunaSearcher
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work


def prepare_jobs(pending: Iterable[TrialSpec], baselines: Iterable[ModelRun]) -> list[PrepareJob]:
    """Return the jobs that `pending` trials need: one per model, seq_len and draw, and one per model without a baseline.

    Models stay together, and the longest job of a model comes first, so that workers end at about the same time.
    """
    specs = list(pending)
    baselines = list(baselines)
    jobs = []
    for run in dict.fromkeys([*(spec.run for spec in specs), *baselines]):
        configs = [spec.config for spec in specs if spec.run == run]
        if run in baselines:
            jobs.append(PrepareJob(run))
        jobs += [PrepareJob(run, samples, needs) for samples, needs in by_samples(configs).items()]
    return jobs


class WorkQueue:
    """Hands out `jobs`, then `specs` in their order or, with `adaptive`, what that proposes.

    Nothing more is handed out once a job has failed, unless it was given up: then its trials try by themselves, until one dies in
    the same way."""

    def __init__(
        self, jobs: Sequence[PrepareJob], specs: Sequence[TrialSpec], adaptive: OptunaSearcher | None = None
    ) -> None:
        self.jobs = tuple(jobs)  # all of them, also those that are done
        self._jobs = list(jobs)
        self._unprepared = {(job.run, job.samples) for job in jobs}
        # Jobs that memory, the death of a worker or the time limit has ended.
        self._given_up: set[tuple[ModelRun, Samples | None]] = set()
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
        """Return the next job or trial; None where all that is left waits for a job, or nothing is left."""
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

    def end(self, work: Work, last: Message | None, error: BaseException | None = None) -> list[TrialSpec]:
        """Take that a job or trial is done, was stopped or has failed after the message `last`.

        Returns the trials that are not handed out any more, as they would die of the same."""
        if isinstance(work, PrepareJob):
            self._unprepared.discard((work.run, work.samples))
            if error is not None and is_given_up(error):
                self._given_up.add((work.run, work.samples))
            else:
                refused = isinstance(last, JobMessage) and bool(last.refused)
                self.failed = self.failed or error is not None or refused
            return []
        if self._adaptive is not None:
            self._adaptive.tell(work, last if isinstance(last, TrialMessage) else None)
        elif error is not None and is_given_up(error) and (work.run, work.config.samples) in self._given_up:
            return self._drop_like(work, last)
        return []

    def _drop_like(self, spec: TrialSpec, last: Message | None) -> list[TrialSpec]:
        """Drop and return the waiting trials on the same samples that need the statistic of which the trial has died, if any."""
        done = {report.stage for report in last.record.stages} if isinstance(last, TrialMessage) else set()
        died = next((name for name in _statistics(spec) if load_statistic(name).stage not in done), None)
        dropped = [
            other
            for other in self._waiting
            if (other.run, other.config.samples) == (spec.run, spec.config.samples) and died in _statistics(other)
        ]
        self._waiting = [other for other in self._waiting if other not in dropped]
        return dropped


def _statistics(spec: TrialSpec) -> list[str]:
    """Return the names of the statistics that a trial needs, in pass order."""
    return list(by_statistic(load_method(spec.config.method).needs(spec.config).values()))
