"""What comes before the trials: the statistics that trials share, computed once each, and the dense models' baselines.

It runs in Ray actors with a trial's resources, never inside a trial: a trial that holds a GPU and waits for another task
that needs one would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import ActorPool

from tune_prune import trial
from tune_prune.config import ModelRun
from tune_prune.errors import UserError
from tune_prune.ledger import atomic_write_text, parse_json, parse_record, to_json
from tune_prune.pruning.methods import load_method
from tune_prune.records import StageReport, TrialRecord
from tune_prune.tuning.trainable import ContextCache, TrialSpec, WorkerSettings


@dataclass(frozen=True)
class PrepareJob:
    """The statistics of one model at one seq_len or, without a seq_len, its baseline."""

    run: ModelRun
    seq_len: int | None = None
    num_samples: tuple[int, ...] = ()
    removals: dict[str, int] = field(default_factory=dict)  # kind of removal -> samples

    def __str__(self) -> str:
        what = "baseline" if self.seq_len is None else f"statistics at seq_len {self.seq_len}"
        return f"{what} of {self.run.label}"


@dataclass(frozen=True)
class Prepared:
    """A job's result: a baseline's record, or one report per pass that was made (none: all was cached)."""

    job: PrepareJob
    reports: list[StageReport] = field(default_factory=list)
    baseline: TrialRecord | None = None


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
        for seq_len in sorted({config.taylor_seq_len for config in configs}, reverse=True):
            here = [config for config in configs if config.taylor_seq_len == seq_len]
            removals: dict[str, int] = {}
            for config in here:
                for kind in load_method(config.method).removals:
                    removals[kind] = max(removals.get(kind, 0), config.num_removal_samples)
            jobs.append(PrepareJob(run, seq_len, tuple(sorted({c.taylor_num_samples for c in here})), removals))
    return jobs


def run_jobs(
    jobs: Sequence[PrepareJob], settings: WorkerSettings, slots: int, say: Callable[[str], None]
) -> list[Prepared]:
    """Run `jobs` on up to `slots` actors; `say` gets a line for each that is done.

    Raises the first failure: a UserError as it is, anything else as RuntimeError with the cause.
    """
    resources = settings.resources
    actor: Any = ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus)(_PrepareWorker)
    actors: list[Any] = [actor.remote(settings) for _ in range(min(slots, len(jobs)))]
    prepared: list[Prepared] = []
    try:
        for result in ActorPool(actors).map_unordered(lambda worker, job: worker.run.remote(job), list(jobs)):
            prepared.append(result)
            say(f"[prepare {len(prepared)}/{len(jobs)}] {_summary(result)}")
    except RayTaskError as error:
        raise _cause(error) from error
    except RayError as error:
        raise RuntimeError(f"a worker of the preparation died, perhaps for lack of memory: {error}") from error
    finally:
        for worker in actors:
            ray.kill(worker)
    return prepared


class _PrepareWorker:
    """An actor that keeps its model from one job to the next."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._contexts = ContextCache(settings)

    def run(self, job: PrepareJob) -> Prepared:
        try:
            return self._run(job)
        except UserError:
            raise
        except Exception as error:
            raise RuntimeError(f"{job} failed: {type(error).__name__}: {error}") from error

    def _run(self, job: PrepareJob) -> Prepared:
        context = self._contexts.open(job.run)
        if job.seq_len is not None:
            return Prepared(job, trial.prepare(context, job.seq_len, job.num_samples, job.removals))
        folder = self._settings.experiment_dir / "trials" / context.key(None)
        record = trial.run_trial(None, context, folder)
        record.resources = self._settings.resources.to_ray()
        return Prepared(job, baseline=record)


def read_baselines(path: Path) -> dict[str, TrialRecord]:
    """The dense models' records by label; empty when there is no file yet. UserError if it is damaged."""
    if not path.exists():
        return {}
    return {label: parse_record(values, path) for label, values in parse_json(path).items()}


def write_baselines(path: Path, baselines: dict[str, TrialRecord]) -> None:
    values: dict[str, Any] = {label: record.to_dict() for label, record in baselines.items()}
    atomic_write_text(path, to_json(values))


def _cause(error: RayTaskError) -> Exception:
    """The exception as the worker raised it."""
    cause = error.cause
    return cause if isinstance(cause, UserError) else RuntimeError(str(cause))


def _summary(result: Prepared) -> str:
    if result.baseline is not None:
        metrics = result.baseline.metrics
        return (
            f"{result.job}: acc {metrics.get('acc_mean', float('nan')):.4f}, ppl {metrics.get('ppl', float('nan')):.2f}"
        )
    passes = len(result.reports)
    return f"{result.job}: {f'{passes} passes' if passes else 'cached'}"
