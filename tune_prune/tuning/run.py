"""The driver: from a list of trial specs to a filled ledger.

A start is always a fresh Tuner over what the ledger does not hold; Ray Tune's own restore is never used, because it runs
finished trials again and loses early-stopping state. Failed trials are run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ray import tune
from ray.tune.experiment import Trial as RayTrial

from tune_prune.errors import UserError
from tune_prune.ledger import Ledger
from tune_prune.records import TrialRecord
from tune_prune.tuning import cluster, prepare
from tune_prune.tuning.callbacks import LedgerCallback, LiveLine, TensorBoardCallback
from tune_prune.tuning.resources import TrialResources, trial_slots
from tune_prune.tuning.scheduler import AshaPerModel
from tune_prune.tuning.searcher import OptunaSearcher
from tune_prune.tuning.trainable import PruneTrainable, TrialSpec, WorkerSettings

CRASHES_PER_TRIAL = 1  # worker killed, node lost, or an exception: tried again once in a fresh process


@dataclass(frozen=True)
class TuneOptions:
    """How a search runs; nothing here changes what a trial measures."""

    experiment_dir: Path  # absolute; on a cluster a folder that every node mounts
    search: Literal["grid", "optuna"] = "grid"
    num_trials: int | None = None  # per model, for optuna, counting those in the ledger; None: the whole space
    seed: int = 0  # of the sampler
    scheduler: Literal["none", "asha"] = "none"
    address: str | None = None  # HOST:PORT or "auto"; None: a local Ray
    num_cpus: int | None = None  # of the local Ray; None: all
    resources: TrialResources = field(default_factory=TrialResources)  # of one trial
    trial_timeout_s: float | None = None


@dataclass
class SearchResult:
    """What a start found, ran and left behind."""

    records: dict[str, TrialRecord]  # every record of the jobs, by key, old and new
    ran: list[str]  # keys that this start ran
    baselines: dict[str, TrialRecord]  # dense models by label

    def count(self, status: str) -> int:
        return sum(record.status == status for record in self.records.values())


def run_search(jobs: Sequence[TrialSpec], options: TuneOptions) -> SearchResult:
    """Run every job (grid) or a sample of them (optuna) that the ledger of `options.experiment_dir` does not hold.

    A failed trial is a failed record, not an exception. Raises UserError for what cannot work before anything starts, or
    for a model whose preparation fails; RuntimeError for any other failure of the preparation; KeyboardInterrupt as it
    comes, with the ledger whole.
    """
    specs = {spec.key: spec for spec in jobs}
    folder = options.experiment_dir
    if not folder.is_absolute():
        raise UserError(f"the experiment folder is {str(folder)!r}; workers need an absolute path")
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "ledger")
    known = [record for key in specs if (record := ledger.read(key)) is not None]
    searcher, pending = _pending(list(specs.values()), known, options)
    baselines = prepare.read_baselines(folder / "baseline.json")
    missing = [run for run in dict.fromkeys(spec.run for spec in specs.values()) if run.label not in baselines]
    if not pending and not missing:
        return SearchResult({record.key: record for record in known}, [], baselines)

    with cluster.connected(options.address, options.num_cpus):
        nodes = cluster.node_resources()
        slots = trial_slots(options.resources, nodes)
        cluster.check_shared_storage(folder)
        failures = {record.key: record for record in known if record.status == "failed"}
        settings = WorkerSettings(folder, options.resources, options.trial_timeout_s, failures)

        finished = [record for record in known if record.status != "failed"]
        count = searcher.remaining if searcher is not None else len(pending)
        line = LiveLine(specs, len(finished) + count, finished)
        prepared = prepare.run_jobs(prepare.prepare_jobs(pending, missing), settings, slots, line.say)
        new = {result.job.run.label: result.baseline for result in prepared if result.baseline is not None}
        if new:
            baselines |= new
            prepare.write_baselines(folder / "baseline.json", baselines)

        ran = _tune(specs, pending, searcher, settings, options, slots, line) if pending else {}
    return SearchResult({record.key: record for record in known} | ran, list(ran), baselines)


def _pending(
    specs: list[TrialSpec], known: list[TrialRecord], options: TuneOptions
) -> tuple[OptunaSearcher | None, list[TrialSpec]]:
    """The adaptive searcher, if one is asked for, and the specs that may still run (none when it has nothing to ask)."""
    finished = {record.key for record in known if record.status != "failed"}
    pending = [spec for spec in specs if spec.key not in finished]
    if options.search == "grid":
        return None, pending
    searcher = OptunaSearcher(specs, options.num_trials or len(specs), options.seed, known)
    return searcher, [spec for spec in pending if spec.run.label in searcher.open_models]


def _tune(
    specs: dict[str, TrialSpec],
    pending: list[TrialSpec],
    searcher: OptunaSearcher | None,
    settings: WorkerSettings,
    options: TuneOptions,
    slots: int,
    line: LiveLine,
) -> dict[str, TrialRecord]:
    """The trials themselves; returns the records of those that ended, by key."""
    folder = settings.experiment_dir
    ledger = LedgerCallback(specs, settings)

    def name(trial: RayTrial) -> str:
        spec = specs[trial.config["key"]]
        return f"{spec.run.label}-{spec.config.name}-{spec.key[:6]}"

    trainable = tune.with_parameters(PruneTrainable, specs=specs, settings=settings)
    space: dict[str, Any] = {"key": tune.grid_search([spec.key for spec in pending])} if searcher is None else {}
    tuner = tune.Tuner(
        tune.with_resources(trainable, settings.resources.to_ray()),
        param_space=space,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            num_samples=1 if searcher is None else searcher.remaining,
            scheduler=AshaPerModel(specs) if options.scheduler == "asha" else None,
            max_concurrent_trials=None if searcher is None else slots,
            reuse_actors=True,
            trial_name_creator=name,
            trial_dirname_creator=lambda trial: f"{name(trial)}-{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=f"{datetime.now():%Y%m%d-%H%M%S}",
            storage_path=str(folder / "tune"),
            callbacks=[ledger, TensorBoardCallback(folder / "tensorboard", specs), line],
            failure_config=tune.FailureConfig(max_failures=CRASHES_PER_TRIAL),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    finally:
        line.end()
    return ledger.records
