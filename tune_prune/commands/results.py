"""A search from its plan to its results: the trials that the ledger lacks are run, every view is written again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from tune_prune.analysis.cost import totals, write_cost
from tune_prune.analysis.export import write_views
from tune_prune.analysis.input.reading import read_study, study_of_search
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.render.report import report
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.statistics.rules import score
from tune_prune.analysis.tables.final_table import final_table
from tune_prune.analysis.verdict import verdicts
from tune_prune.commands.analysis import check_output, why_nothing, write_analysis
from tune_prune.commands.opened import Model, PrunedModel
from tune_prune.core import artifact_cache, temporary
from tune_prune.core.config import TrustingRun
from tune_prune.core.errors import UserError, refused
from tune_prune.core.files import remove_unfinished
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.ledger import Ledger, read_baselines, read_passes
from tune_prune.core.records import TrialRecord, failure_counts, may_pass
from tune_prune.core.store import COST, STATUS, Location, Store, open_store
from tune_prune.core.terminal import say
from tune_prune.tuning import experiment, rounds
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.plan import Plan
from tune_prune.tuning.ray_cluster.local import LocalRay
from tune_prune.tuning.rounds import Draws

if TYPE_CHECKING:
    from tune_prune.tuning.driver import TrialSpec, TuneOptions


class Results:
    """What a search has found. `print(results)` shows the best configuration of each model, then the best trials.

    folder    of the experiment
    findings  every number of its analysis (tune_prune/analysis/statistics/findings.py)
    cost      what it has taken (cost.json); empty where that is not there
    """

    def __init__(self, folder: Location, findings: Findings, cost: Mapping[str, Any]) -> None:
        self.folder = folder
        self.findings = findings
        self.cost = cost

    @property
    def trials(self) -> pd.DataFrame:
        """A row per trial, failed and stopped ones too, with the columns of all_methods_results.csv (ray_results/README.md) and
        `name`, the configuration's. Accuracies are fractions, durations seconds."""
        return pd.concat([model.rows for model in self.findings.study.models.values()], ignore_index=True)

    @property
    def best(self) -> pd.DataFrame:
        """The best configuration of each model, by its label (tiny-llama, or tiny-llama@0.3 where there are several pruning
        ratios): its hyperparameters; acc_mean, acc_mean_stderr, ppl and params_count as measured; retained, its accuracy over the
        dense model's (missing where that is unknown or at chance); tied, how many other configurations are statistically tied
        with the most accurate (95%). No row for a model without a complete trial."""
        names = ("acc_mean", "acc_mean_stderr", "ppl", "params_count")
        rows = {
            label: {
                **{name: found.best[name] for name in (*HYPERPARAMETERS, *names)},
                "retained": found.retained(found.best["acc_mean"]),
                "tied": len(found.tied) - 1,
            }
            for label, found in self.findings.models.items()
        }
        return pd.DataFrame.from_records(list(rows.values()), index=pd.Index(rows, name="model"))

    def prune(self, model: str | None = None, device: str = "auto", trust_tasks: bool = False) -> PrunedModel:
        """The pruned model of the best configuration, by the plan that its trial has kept, else found again.

        `model` is a label of `best`; None: the only one or, of one model with and without training, the better. `trust_tasks`: for
        `evaluate`, as for `open`. Raises UserError where there are several models, or none, and where the original model is not
        available any more.
        """
        from tune_prune.commands import prune_request
        from tune_prune.tuning import resolve

        request = prune_request.from_config(str(self.folder), model)
        resolve.searched_model(request.run, None, None)
        run = TrustingRun(**vars(request.run)) if trust_tasks else request.run
        return Model(run, device).execute(request)

    def report(self, output: str | Path | None = None, language: str = "en") -> str:
        """The report of the analysis as text, in "en" or "zh": the decision and its evidence, then the tables of each model.

        With `output`, all that `tune-prune analysis` writes goes to that folder: report.html, figures/, tables/. Raises
        UserError where no trial is complete, and where that folder cannot be written or is an experiment.
        """
        if not self.findings.models:
            raise UserError(why_nothing(self.findings.study))
        if output is not None:
            check_output(path := Path(output).expanduser())
            write_analysis(self.findings, path, language)
        return report(self.findings, language)

    def __repr__(self) -> str:
        models = self.findings.study.models.values()
        counts = ", ".join(
            f"{model.label} {(model.states == 'complete').sum()} of {len(model.rows)}" for model in models
        )
        return f"Results of {self.folder}: complete trials: {counts}"

    def __str__(self) -> str:
        best = [verdict.line for verdict in verdicts(self.findings).values()]
        return "\n".join([*best, *([""] if best else []), final_table(self.findings)])


def load(folder: Location) -> Results:
    """Of an experiment, or of a folder of results files. Raises UserError."""
    study = read_study([folder], [])
    objectives = {(about.get("settings") or {}).get("objective", "accuracy") for about in study.experiments.values()}
    rule = _rule(study, objectives.pop()) if len(objectives) == 1 else "accuracy"
    return Results(folder, find(study, rule), next(iter(study.costs.values()), {}))


def _rule(study: Study, objective: str) -> str:
    """By which the best is chosen: the objective, or accuracy where a model has no trial of which that is known."""
    rows = [model.rows[model.rows["success"]] for model in study.models.values()]
    return objective if all(np.isfinite(score(own, objective)).any() for own in rows if len(own)) else "accuracy"


def run(
    plan: Plan,
    command: Sequence[str],
    at_end: Callable[[Results], None] | None = None,
    local_ray: LocalRay | None = None,
    observers: Sequence[Observer] = (),
) -> Results:
    """Run a plan to its end and write every view of its results; `command` is recorded with them, `local_ray` has begun to start,
    `observers` follow the trials. A view that cannot be written is a warning. `at_end` is called while no other search can change
    them. Raises UserError (also where another search runs on the experiment), KeyboardInterrupt (the ledger stays whole) or
    what stopped the preparation."""
    store = open_store(plan.experiment_dir)
    with store.lock():
        results = _run(plan, store, command, local_ray, observers)
        if at_end is not None:
            at_end(results)
    return results


def _run(
    plan: Plan, store: Store, command: Sequence[str], local_ray: LocalRay | None, observers: Sequence[Observer]
) -> Results:
    from tune_prune.tuning.driver import TrialSpec, TuneOptions, run_search  # imports optuna
    from tune_prune.tuning.observers import status

    started = time.monotonic()
    settings, folder = plan.settings, plan.experiment_dir
    ledger = Ledger(store)
    temporary.sweep()
    if isinstance(folder, Path):
        # Workers of a killed search end within half a minute, and who looks at results may write a report: a file takes no minute.
        remove_unfinished(folder, older_s=60.0)
        remove_unfinished(folder.parent / artifact_cache.FOLDER, older_s=86_400.0)  # other searches write there
    recorded, baselines = ledger.records(), read_baselines(store)
    before = totals(recorded, baselines, read_passes(store), ledger.attempts([*recorded, *baselines.values()]))
    about = experiment.write(store, plan, list(command))
    for model in plan.models:
        if model.workload.keep_suite is not None:
            model.workload.keep_suite()
    jobs = [TrialSpec(model.run, config, key) for model in plan.models for config, key in model.trials]
    options = TuneOptions(
        experiment_dir=folder,
        artifact_dir=folder.parent / artifact_cache.FOLDER,
        search="optuna" if plan.space.search == "optuna" else "grid",
        num_trials=plan.space.num_trials,
        seed=settings.seed,
        objective=settings.objective,
        scheduler=settings.scheduler,
        kl_filter=settings.kl_filter,
        inline=settings.inline,
        address=settings.address,
        local_ray=local_ray,
        resources=plan.resources,
        ways={model.run.label: model.memory.way for model in plan.models},
        gpu_ways=plan.gpu_ways,
        gpu_free=plan.gpu_free,
        trial_timeout_s=settings.trial_timeout_s,
        cost=plan.cost,
        observers=observers,
    )
    if settings.draws is None and settings.recover is None:
        run_search(jobs, options)
    else:
        try:
            _run_by_decisions(plan, store, jobs, options, about)
        except BaseException:  # between two rounds nobody else says so
            with _warned(store, STATUS):
                status.ended(store, "stopped")
            raise
    with _warned(store, STATUS):
        status.ended(store)
    records, baselines = ledger.records(), read_baselines(store)
    cost = {}
    with _warned(store, COST):
        cost = write_cost(
            store,
            records,
            baselines,
            read_passes(store),
            plan.cost.to_dict() if plan.cost is not None else None,
            before,
            time.monotonic() - started,
            ledger.attempts([*records, *baselines.values()]),
        )
    measured = study_of_search(folder, about, baselines, records, cost)
    findings = find(measured, _rule(measured, settings.objective))
    write_views(store, records, findings, lambda name: _warned(store, name))
    return Results(folder, findings, cost)


@contextmanager
def _warned(store: Store, name: str) -> Iterator[None]:
    """Within it the view `name` is written. What a file system or a storage refuses is a warning: the other views are written,
    and the same command writes all of them anew. Anything else is raised."""
    try:
        yield
    except (OSError, UserError) as error:
        reason = str(error)  # a sentence
        if isinstance(error, OSError):
            said = refused(error)
            reason = said[0] if said else f"{store.path(name)} cannot be written ({error}); run the same command again"
        say(f"warning: {name}: not written: {reason}", sys.stderr)


def _run_by_decisions(
    plan: Plan, store: Store, jobs: Sequence[TrialSpec], options: TuneOptions, about: dict[str, Any]
) -> None:
    """What no decision is made for, then draw by draw those that may still be the best (`tuning.rounds`), then with training the
    best of them (`tuning.rounds`). What has failed for a reason that may pass is tried once more before a decision, and left
    out if it fails again. Only the first trials may be stopped early: a mean over draws needs all of them."""
    from tune_prune.tuning.driver import connected, run_search

    def study(records: Sequence[TrialRecord]) -> Study:
        return study_of_search(plan.experiment_dir, about, read_baselines(store), records)

    def tell(name: str, decisions: Sequence[object]) -> None:
        for one in decisions:
            say(f"{name:<12} {one}")

    ledger = Ledger(store)
    failed_before = {record.key for record in ledger.records() if record.status == "failed"}
    draws, before = Draws(plan, study), set[str]()
    options = replace(options, goes_on=True)
    with connected(options):  # one Ray for all rounds, each of which would start its own
        while draws.given > before:
            run_search(jobs, replace(options, only=frozenset(draws.given - before)))
            records = [record for record in ledger.records() if record.key in draws.given]
            if again := {one.key: one.failure for one in records if may_pass(one) and one.key not in failed_before}:
                say(f"again        {failure_counts(again.values())}: tried once more before anything is decided")
                failed_before |= again.keys()
                finished = {
                    record.key for record in records if record.status != "failed"
                }  # what a race judges it beside
                run_search(jobs, replace(options, only=frozenset(finished | again.keys())))
            options = replace(options, scheduler="none", kl_filter=False)
            before, told = set(draws.given), len(draws.rounds)
            measured = [record for record in ledger.records() if record.key in draws.given]
            if plan.settings.draws is not None:
                draws.decide(measured)
                experiment.write_given(store, plan, about, draws.given, draws=draws.rounds)
                tell("draws", draws.rounds[told:])
        if plan.settings.recover is not None:
            trained, keys = rounds.choose(plan, find(study(measured)), draws.given)
            experiment.write_given(store, plan, about, draws.given | keys, recovered=trained)
            tell("recovery", trained)
            run_search(jobs, replace(options, only=frozenset(keys)))
