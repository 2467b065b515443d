"""The driver: from a list of trial specs to a filled ledger, on Ray or in this process.

The ledger is the only state: a start runs what it does not hold, whichever way the trials before were run. Failed trials
are run again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tune_prune.core import artifact_cache
from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import seed_for
from tune_prune.core.ledger import Ledger, read_baselines, write_baselines
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import ITEMS, TENSORBOARD, TRIALS, Location, open_store
from tune_prune.core.terminal import say
from tune_prune.models import catalog, loading
from tune_prune.models.runner.residency import Residency
from tune_prune.tuning import inline
from tune_prune.tuning.cost import CostEstimate
from tune_prune.tuning.observers.lost_work import LostWork
from tune_prune.tuning.observers.observer import Observer, Observers
from tune_prune.tuning.observers.results import FailuresObserver, PrepareLines, PrepareObserver, RecordsObserver
from tune_prune.tuning.observers.status import StatusObserver
from tune_prune.tuning.observers.tensorboard import TensorBoardObserver
from tune_prune.tuning.progress import LiveLine
from tune_prune.tuning.queue import WorkQueue, prepare_jobs
from tune_prune.tuning.ray_cluster.local import LocalRay
from tune_prune.tuning.resources import TrialResources, trial_slots
from tune_prune.tuning.sampler import OptunaSearcher
from tune_prune.tuning.stopping import (
    ACCURACY,
    GOLD_LOGPROB,
    AshaRule,
    ItemValues,
    KlFilterRule,
    Measure,
    RaceRule,
    StoppingRule,
    read_outcomes,
)
from tune_prune.tuning.work import TrialSpec, labels_of_groups
from tune_prune.tuning.worker import WorkerSettings

RACES: dict[str, Measure] = {"race": ACCURACY, "race-gold": GOLD_LOGPROB}  # schedulers that race, and by what


@dataclass(frozen=True)
class TuneOptions:
    """How a search runs; nothing here changes what a trial measures."""

    experiment_dir: Location  # absolute; on a cluster a bucket, or a folder that every node mounts
    artifact_dir: Location | None = None  # likewise; shared by experiments; None: in experiment_dir
    search: Literal["grid", "optuna"] = "grid"
    num_trials: int | None = (
        None  # per model, pruning ratio and recovery, for optuna, counting those in the ledger; None: the whole space
    )
    seed: int = 0  # of the sampler
    objective: str = "accuracy"  # what it looks for: one of core.measures.MEASURES
    only: frozenset[str] | None = None  # keys of the jobs that are run now; None: all
    goes_on: bool = False  # with other jobs after these: the search has not ended with them
    scheduler: Literal["none", "asha", "race", "race-gold"] = "none"
    kl_filter: bool = False  # besides the scheduler: trials whose KL is far above that of earlier ones end after it
    inline: bool = False  # one trial after the other in this process, without Ray
    address: str | None = None  # HOST:PORT or "auto"; None: a local Ray
    num_cpus: int | None = None  # of the local Ray; None: all
    local_ray: LocalRay | None = None  # one that has begun to start; None: it does when it is needed
    resources: TrialResources = field(default_factory=TrialResources)  # of one trial
    ways: Mapping[str, Residency] = field(default_factory=dict)  # by label, how models are held; else resident
    gpu_ways: Mapping[str, Mapping[str, Residency]] = field(default_factory=dict)  # the same by kind of GPU
    gpu_free: Mapping[str, int] = field(default_factory=dict)  # bytes by kind of GPU, where trials share one
    trial_timeout_s: float | None = None
    cost: CostEstimate | None = None  # for the time left; None: it is not shown
    observers: Sequence[Observer] = ()  # besides those that every search has


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
    for a model whose preparation fails; RuntimeError for any other failure of the preparation; MachineError for what lets no
    trial go on, such as a full disk; KeyboardInterrupt as it comes; each with the ledger whole.
    """
    specs = {spec.key: spec for spec in jobs if options.only is None or spec.key in options.only}
    folder = options.experiment_dir
    if isinstance(folder, Path):
        if not folder.is_absolute():
            raise UserError(f"the experiment folder is {str(folder)!r}; workers need an absolute path")
        folder.mkdir(parents=True, exist_ok=True)
    store = open_store(folder)
    ledger = Ledger(store)
    recorded = [record for record in ledger.records() if record.key in specs]
    searcher, pending = _pending(list(specs.values()), recorded, options)
    baselines = read_baselines(store)
    runs = list(dict.fromkeys(spec.run for spec in specs.values()))
    missing = [run for run in runs if run.label not in baselines]
    if not pending and not missing:
        return SearchResult({record.key: record for record in recorded}, [], baselines)
    for run in runs:  # in no worker, where it would be a trial's time
        loading.fetch_weights(catalog.resolve(run.model, run.revision))

    with _slots(options, runs) as slots:
        artifact_dir = options.artifact_dir or folder / artifact_cache.FOLDER
        settings = WorkerSettings(
            folder,
            artifact_dir,
            options.resources,
            options.ways,
            options.trial_timeout_s,
            gpu_ways=options.gpu_ways,
            gpu_free=options.gpu_free,
        )

        finished = [record for record in recorded if record.status != "failed"]
        count = searcher.remaining if searcher is not None else len(pending)
        # An adaptive search does not know which seq_len it will visit: the first trial at one computes for the others.
        prepared = prepare_jobs(pending if searcher is None else [], missing)
        total = len(finished) + count
        used = min(slots, max(1, len(prepared) + count))  # as in the plan
        line = LiveLine(specs, total, finished, cost=options.cost, jobs=prepared, slots=used)
        status = StatusObserver(settings, total, len(finished), used, line.seconds_left, goes_on=options.goes_on)

        def warn(text: str) -> None:
            line.end()
            say(f"warning: {text}", sys.stderr)

        def keep(run: ModelRun, baseline: TrialRecord) -> None:
            baselines[run.label] = baseline
            write_baselines(store, baselines)
            settings.ledger.forget(baseline)

        rule = _rule(options, specs, finished)
        if options.scheduler in RACES or options.kl_filter:
            left = {spec.key for spec in pending}
            # Of all: what an earlier start has left goes on in the order that it had
            pending = [spec for spec in _shuffled(list(specs.values()), options.seed) if spec.key in left]
        queue = WorkQueue(prepared, pending, searcher)
        records, preparations, lost = RecordsObserver(), PrepareObserver(keep), LostWork(settings)
        tensorboard = TensorBoardObserver(folder / TENSORBOARD, labels_of_groups(jobs))
        views = [tensorboard, PrepareLines(len(prepared), line.say), line, status, *options.observers]
        observers = Observers([records, lost, preparations, FailuresObserver(rule.forget)], views, warn)
        try:
            with status:
                if options.inline:
                    inline.run(queue, specs, rule, settings, observers)
                else:
                    from tune_prune.tuning.ray_cluster import tuner  # imports ray

                    tuner.run(queue, prepared, specs, rule, settings, observers, len(prepared) + count, slots)
        except BaseException:  # which is what is told, whatever can be noted
            try:
                lost.note_all()
            except Exception as error:  # noqa: BLE001  # said
                warn(f"cost.json leaves out the work of interrupted attempts: {error}")
            raise
        finally:
            line.end()
        lost.note_all()
        if preparations.failure is not None:
            raise preparations.failure
    return SearchResult({record.key: record for record in recorded} | records.records, list(records.records), baselines)


@contextmanager
def _slots(options: TuneOptions, runs: Sequence[ModelRun]) -> Iterator[int]:
    """How many trials run at once, on the Ray that is started or joined for them or in this process."""
    if options.inline:
        yield 1
        return
    from tune_prune.tuning.ray_cluster import nodes  # imports ray

    with connected(options):
        slots = trial_slots(options.resources, [node.resources for node in nodes.alive()])
        if options.address is not None:
            nodes.fetch_weights(runs, options.resources)
        yield slots


@contextmanager
def connected(options: TuneOptions) -> Iterator[None]:
    """The Ray of these options, if they want one; within it every `run_search` works with that one and leaves it up."""
    if options.inline:
        yield
        return
    from tune_prune.tuning.ray_cluster import cluster  # imports ray

    with cluster.connected(options.address, options.num_cpus, options.local_ray):
        yield


def _pending(
    specs: list[TrialSpec], recorded: list[TrialRecord], options: TuneOptions
) -> tuple[OptunaSearcher | None, list[TrialSpec]]:
    """The adaptive searcher, if one is asked for, and the specs that may still run (none when it has nothing to ask)."""
    finished = {record.key for record in recorded if record.status != "failed"}
    pending = [spec for spec in specs if spec.key not in finished]
    if options.search == "grid":
        return None, pending
    num_trials = options.num_trials or len(specs)
    searcher = OptunaSearcher(specs, num_trials, options.seed, recorded, options.objective)
    return searcher, pending if searcher.remaining else []


def _rule(options: TuneOptions, specs: dict[str, TrialSpec], finished: list[TrialRecord]) -> StoppingRule:
    rule = _scheduler(options, specs, finished)
    return KlFilterRule(specs, finished, rule) if options.kl_filter else rule


def _scheduler(options: TuneOptions, specs: dict[str, TrialSpec], finished: list[TrialRecord]) -> StoppingRule:
    if options.scheduler == "asha":
        return AshaRule(specs)
    if options.scheduler in RACES:
        measure = RACES[options.scheduler]
        return RaceRule(specs, _known_outcomes(options.experiment_dir, specs, finished, measure), measure=measure)
    return StoppingRule()


def _shuffled(specs: list[TrialSpec], seed: int) -> list[TrialSpec]:
    """Every model's trials in random order: in the grid's, a race whose best come last would stop few, and the first medians of KL
    would be of one method."""
    result = []
    for run in dict.fromkeys(spec.run for spec in specs):
        own = [spec for spec in specs if spec.run == run]
        random.Random(seed_for(seed, f"race order {run.label}")).shuffle(own)
        result += own
    return result


def _known_outcomes(
    folder: Location, specs: dict[str, TrialSpec], finished: list[TrialRecord], measure: Measure
) -> dict[str, list[dict[str, ItemValues]]]:
    """The items' scores of complete trials, slice by slice: they go on eligible when a race is started again."""
    found = {}
    for record in finished:
        if record.status == "complete":
            path, num_slices = folder / TRIALS / record.key / ITEMS, len(specs[record.key].run.protocol.slices)
            found[record.key] = read_outcomes(path, num_slices, measure)
    return found
