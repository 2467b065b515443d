"""The results of a search as an object, for notebooks and for what a command prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.render.report import report
from tune_prune.analysis.statistics.findings import Findings, find
from tune_prune.analysis.statistics.rules import best_rule
from tune_prune.analysis.verdict import final_table, verdicts
from tune_prune.commands.analysis import check_output, why_nothing, write_analysis
from tune_prune.commands.opened import Model, PrunedModel
from tune_prune.core.config import TrustingRun
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import Location
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.plan import Plan


class Results:
    """Results of a search. `print(results)` shows the best configuration of each model, then the best trials.

    folder    of the experiment
    findings  every number of its analysis (tune_prune/analysis/statistics/findings.py)
    cost      what it has taken (cost.json); empty where that is not there
    """

    def __init__(self, folder: Location, findings: Findings, cost: Mapping[str, Any]) -> None:
        self.folder, self.findings, self.cost = folder, findings, cost

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
    """Return the results of an experiment, or of a folder of results files. Raises UserError."""
    study = read_study([folder], [])
    objectives = {(about.get("settings") or {}).get("objective", "accuracy") for about in study.experiments.values()}
    objective = objectives.pop() if len(objectives) == 1 else "accuracy"
    rule = best_rule([model.rows for model in study.models.values()], objective)
    return Results(folder, find(study, rule), next(iter(study.costs.values()), {}))


def run(
    plan: Plan,
    command: Sequence[str],
    at_end: Callable[[Results], None] | None = None,
    observers: Sequence[Observer] = (),
) -> Results:
    """Run a plan to its end (`tune_prune.tuning.run`); `at_end` gets its results while no other search can change them."""
    from tune_prune.tuning import run as of_search  # imports optuna

    def ended(findings: Findings, cost: Mapping[str, Any]) -> None:
        if at_end is not None:
            at_end(Results(plan.experiment_dir, findings, cost))

    return Results(plan.experiment_dir, *of_search.run(plan, command, ended, observers))
