"""What trials share, as jobs: the statistics of a model at one seq_len, computed once, and the dense model's baseline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tune_prune.core.config import ModelRun
from tune_prune.core.ledger import PassLog
from tune_prune.core.store import TRIALS
from tune_prune.pruning.statistics import Need
from tune_prune.trial import trial
from tune_prune.trial.context import TrialContext
from tune_prune.trial.statistics import by_seq_len
from tune_prune.tuning.messages import JobMessage
from tune_prune.tuning.worker import TrialSpec, WorkerSettings


@dataclass(frozen=True)
class PrepareJob:
    """The statistics of one model at one seq_len or, without a seq_len, its baseline."""

    run: ModelRun
    seq_len: int | None = None
    needs: tuple[Need, ...] = ()

    def __str__(self) -> str:
        what = "baseline" if self.seq_len is None else f"statistics at seq_len {self.seq_len}"
        return f"{what} of {self.run.label}"


Work = TrialSpec | PrepareJob  # one piece of work: what one worker has at a time


def prepare_jobs(pending: Iterable[TrialSpec], baselines: Iterable[ModelRun]) -> list[PrepareJob]:
    """The jobs that `pending` trials need, one per model and seq_len, and one per model without a baseline.

    Models stay together, and the longest job of a model comes first, so that workers end at about the same time.
    """
    specs = list(pending)
    baselines = list(baselines)
    jobs = []
    for run in dict.fromkeys([*(spec.run for spec in specs), *baselines]):
        configs = [spec.config for spec in specs if spec.run == run]
        if run in baselines:
            jobs.append(PrepareJob(run))
        jobs += [PrepareJob(run, seq_len, needs) for seq_len, needs in by_seq_len(configs).items()]
    return jobs


def run_job(job: PrepareJob, context: TrialContext, settings: WorkerSettings) -> JobMessage:
    """Do a job in the worker that has its model open; every pass is noted as soon as it is made."""
    if job.seq_len is not None:
        passes = PassLog(settings.store)
        reports = []
        for what, report in trial.prepare(context, job.seq_len, job.needs):
            passes.write(what, report)
            reports.append(report)
        return JobMessage(tuple(reports))
    store = settings.store.within(f"{TRIALS}/{context.key(None)}")
    record = trial.run_trial(None, context, store, settings.note_attempt)
    return JobMessage(baseline=replace(record, resources=settings.resources.to_ray(), search_id=settings.search_id))
