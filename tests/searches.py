"""Searches of trials that are given, without the checks of a plan and the views of its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tune_prune.core.ledger import Experiment
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import open_store
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.methods import load_method
from tune_prune.tuning.driver import run_batch
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.plan import Plan, SearchSettings
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.rounds import Batch
from tune_prune.tuning.space import SearchSpace
from tune_prune.tuning.work import TrialSpec


def plan_of(
    trials: Sequence[TrialSpec],
    folder: Path,
    *,
    search: str = "grid",
    num_trials: int | None = None,
    resources: TrialResources | None = None,
    gpu_free: dict[str, int] | None = None,
    **settings: Any,
) -> Plan:
    """A plan of just these trials in the experiment `folder`; `settings` are fields of SearchSettings."""
    runs = dict.fromkeys(spec.run for spec in trials)
    models = [
        SimpleNamespace(
            run=run,
            trials=tuple(spec for spec in trials if spec.run == run),
            memory=SimpleNamespace(way=RESIDENT),
            workload=SimpleNamespace(keep_suite=None),
        )
        for run in runs
    ]
    return Plan(
        SearchSettings(tuple(run.label for run in runs), **settings),
        SearchSpace("given", folder, search, num_trials, {}, (), {}),
        folder,
        tuple(models),  # type: ignore[arg-type]
        Experiment.read(open_store(folder)),
        resources=resources or TrialResources(),
        gpu_free=gpu_free or {},
    )


def finished(spec: TrialSpec) -> TrialRecord:
    """The record of a complete trial that has measured nothing."""
    code = load_method(spec.config.method).code
    return TrialRecord(spec.key, spec.run.label, spec.config, "complete", method_code=code)


@dataclass
class Started:
    """The trials that a start has run, and what the ledger holds of them."""

    records: dict[str, TrialRecord]  # by key
    ran: list[str]  # keys of what this start ran, as they began
    baselines: dict[str, TrialRecord]  # by label

    def count(self, status: str) -> int:
        return sum(record.status == status for record in self.records.values())


def start(trials: Sequence[TrialSpec], folder: Path, observers: Sequence[Observer] = (), **options: Any) -> Started:
    """Run what the ledger in `folder` lacks of these trials; `options`: as of `plan_of`. The folder beside it, artifacts, is the
    cache."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(trials, folder, **options)
    with ExitStack() as machines:
        run_batch(plan, Batch(plan.trials), plan.held, machines, observers)
    held = plan.held.refreshed()
    before = {record.key: record.search_id for record in plan.held.records}
    new = [record for record in held.records if record.search_id != before.get(record.key)]
    keys = {spec.key for spec in trials}
    return Started(
        {record.key: record for record in held.records if record.key in keys},
        [record.key for record in sorted(new, key=lambda record: record.started_at)],
        dict(held.baselines),
    )
