"""Runs a batch of trials, with the baselines and passes that they need, on the workers of Ray Tune or in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from tune_prune.core.config import ModelRun
from tune_prune.core.ledger import Experiment, write_baselines
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import TENSORBOARD
from tune_prune.core.terminal import say
from tune_prune.models import catalog, loading
from tune_prune.tuning import inline, set_up_ray
from tune_prune.tuning.observers.observer import Observer, Observers
from tune_prune.tuning.observers.results import FailuresObserver, PrepareLines, PrepareObserver
from tune_prune.tuning.observers.status import StatusObserver
from tune_prune.tuning.observers.tensorboard import TensorBoardObserver
from tune_prune.tuning.plan import Plan
from tune_prune.tuning.progress import LiveLine
from tune_prune.tuning.queue import WorkQueue, prepare_jobs
from tune_prune.tuning.resources import trial_slots
from tune_prune.tuning.rounds import Batch
from tune_prune.tuning.sampler import OptunaSearcher
from tune_prune.tuning.stopping import RACES, in_random_order, rule_of
from tune_prune.tuning.work import TrialSpec, labels_of_groups
from tune_prune.tuning.worker import WorkerSettings


def run_batch(
    plan: Plan,
    batch: Batch,
    held: Experiment,
    machines: ExitStack,
    observers: Sequence[Observer] = (),
) -> None:
    """Run what the experiment has not `held` so far of a batch: baselines, passes and trials, on the `machines` of the plan."""
    trials = {spec.key: spec for spec in batch.trials}
    runs = list(dict.fromkeys(spec.run for spec in batch.trials))
    recorded = [record for record in held.records if record.key in trials]
    finished = [record for record in recorded if record.status != "failed"]
    pending, sampler = _pending(plan, batch, recorded)
    unmeasured = [run for run in runs if run.label not in held.baselines]
    if not pending and not unmeasured:
        return
    for model in plan.models:
        if model.workload.keep_suite is not None:
            model.workload.keep_suite()
    for run in runs:  # in no worker, where it would be a trial's time
        loading.fetch_weights(catalog.resolve(run.model, run.revision))
    slots = _join(plan, runs, machines)
    # An adaptive search does not know which seq_len it will visit: the first trial at one computes for the others.
    jobs = prepare_jobs(pending if sampler is None else [], unmeasured)
    count = sampler.remaining if sampler is not None else len(pending)
    settings = WorkerSettings(
        plan.experiment_dir,
        plan.artifact_dir,
        plan.resources,
        {model.run.label: model.memory.way for model in plan.models},
        plan.settings.trial_timeout_s,
        gpu_ways=plan.gpu_ways,
        gpu_free=plan.gpu_free,
    )
    rule = rule_of(plan.settings, trials, finished, plan.experiment_dir, batch.may_stop)
    queue = WorkQueue(jobs, pending, sampler)

    used = min(slots, max(1, len(jobs) + count))  # as in the plan
    line = LiveLine(trials, len(finished) + count, finished, cost=plan.cost, jobs=jobs, slots=used)
    told = StatusObserver(settings, len(finished) + count, len(finished), used, line.seconds_left)
    preparations = PrepareObserver(_keeper(held, settings))
    curves = TensorBoardObserver(plan.experiment_dir / TENSORBOARD, labels_of_groups(plan.trials))

    def warn(text: str) -> None:
        line.end()
        say(f"warning: {text}", sys.stderr)

    followers = Observers(
        keepers=[preparations, FailuresObserver(rule.forget)],
        views=[curves, PrepareLines(len(jobs), line.say), line, told, *observers],
        warn=warn,
    )
    try:
        with told:
            if plan.settings.inline:
                inline.run(queue, trials, rule, settings, followers)
            else:
                from tune_prune.tuning import ray  # imports ray

                ray.run(queue, trials, rule, settings, followers)
    finally:
        line.end()
    if preparations.failure is not None:
        raise preparations.failure


def _pending(
    plan: Plan, batch: Batch, recorded: Sequence[TrialRecord]
) -> tuple[list[TrialSpec], OptunaSearcher | None]:
    """Return which trials may still run, in their order, and who chooses among them, if the search is adaptive."""
    finished = {record.key for record in recorded if record.status != "failed"}
    specs, settings = list(batch.trials), plan.settings
    if plan.space.search == "optuna":
        number = plan.space.num_trials or len(specs)
        sampler = OptunaSearcher(specs, number, settings.seed, recorded, settings.objective)
        return [spec for spec in specs if spec.key not in finished] if sampler.remaining else [], sampler
    if batch.may_stop and (settings.kl_filter or settings.scheduler in RACES):
        # All are shuffled: what an earlier start has left goes on in the order that it had.
        specs = in_random_order(specs, settings.seed)
    return [spec for spec in specs if spec.key not in finished], None


def _join(plan: Plan, runs: Sequence[ModelRun], machines: ExitStack) -> int:
    """Have the Ray of a plan among the `machines`, if it wants one, and return how many trials run at once."""
    if plan.settings.inline:
        return 1
    set_up_ray(plan.settings.address)
    from tune_prune.tuning import nodes, ray  # imports ray

    # A Ray that an earlier batch has joined is used again.
    machines.enter_context(ray.connected(plan.settings.address))
    slots = trial_slots(plan.resources, [node.resources for node in nodes.alive()])
    if plan.settings.address is not None:
        nodes.fetch_weights(runs, plan.resources)
    return slots


def _keeper(held: Experiment, settings: WorkerSettings) -> Callable[[ModelRun, TrialRecord], None]:
    """Return what keeps the record of a dense model beside those that are there."""
    # Ray pickles what follows a search, and so not all that the experiment holds.
    baselines, store = dict(held.baselines), held.store

    def keep(run: ModelRun, baseline: TrialRecord) -> None:
        baselines[run.label] = baseline
        write_baselines(store, baselines)
        settings.ledger.forget(baseline)

    return keep
