"""What trials share, as jobs: the statistics of a model on the samples of one seq_len and draw, made once, and its baseline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tune_prune.core.config import ModelRun, Samples
from tune_prune.core.ledger import PassLog
from tune_prune.core.store import TRIALS
from tune_prune.pruning.statistics import Need
from tune_prune.trial import trial
from tune_prune.trial.context import TrialContext
from tune_prune.trial.statistics import by_samples
from tune_prune.tuning.messages import JobMessage
from tune_prune.tuning.worker import TrialSpec, WorkerSettings


@dataclass(frozen=True)
class PrepareJob:
    """The statistics of one model on some samples or, without samples, its baseline."""

    run: ModelRun
    samples: Samples | None = None
    needs: tuple[Need, ...] = ()

    @property
    def name(self) -> str:
        """Short, and one of those of its model."""
        return self.samples.name if self.samples is not None else "baseline"

    def __str__(self) -> str:
        if self.samples is None:
            return f"baseline of {self.run.label}"
        return f"sample text at {self.samples} through {self.run.label}"


Work = TrialSpec | PrepareJob  # one piece of work: what one worker has at a time


def prepare_jobs(pending: Iterable[TrialSpec], baselines: Iterable[ModelRun]) -> list[PrepareJob]:
    """The jobs that `pending` trials need, one per model, seq_len and draw, and one per model without a baseline.

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


def run_job(job: PrepareJob, context: TrialContext, settings: WorkerSettings) -> JobMessage:
    """Do a job in the worker that has its model open; every pass is noted as soon as it is made."""
    if job.samples is not None:
        passes = PassLog(settings.store)
        reports = []
        for what, report in trial.prepare(context, job.samples, job.needs):
            passes.write(what, report)
            reports.append(report)
        return JobMessage(tuple(reports))
    store = settings.store.within(f"{TRIALS}/{context.key(None)}")
    record = trial.run_trial(None, context, store, settings.note_attempt)
    return JobMessage(baseline=replace(record, resources=settings.resources.to_ray(), search_id=settings.search_id))
