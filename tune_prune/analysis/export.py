"""The views of trials, from their findings: the results table, the best configurations, the methods, the models compared; and the
shell commands that run a configuration again. Stopped and failed trials stay in the table with their status; they are never
eligible. A trial's folder is named relative to that of the view, so that both can be moved together.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import CALIBRATION, as_cell, frame, plain_value, plain_values, ranked
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.verdict import winners
from tune_prune.core.files import to_json
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import (
    BEST_CONFIG,
    CROSS_MODEL_COMPARISON,
    METHOD_COMPARISON,
    RESULTS,
    Location,
    Store,
    location,
)

SCHEMA_VERSION = 3  # of the JSON files


def write_views(
    store: Store,
    records: Sequence[TrialRecord],
    findings: Findings,
    within: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> None:
    """Write the views of an experiment, each whole or not at all, and each by itself, in what `within` gives for its name.

    `findings` are those of its `records`.
    """
    best = {label: best_entry(result, store.folder) for label, result in findings.models.items()}
    rows = frame(records, store.folder)
    texts = views(findings, findings.study.models, best, rows, store.folder) | across_view(findings)
    for name, text in texts.items():
        with within(name):
            store.put_all({name: text})


def views(
    findings: Findings, labels: Collection[str], best: Mapping[str, Any], rows: pd.DataFrame, folder: Location
) -> dict[str, str]:
    """Return the texts of the views in `folder` of the models `labels`: of their `best` entries and of all trials, which are
    `rows`."""
    best_config = {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": findings.rule,
        "models": best,
        # by the label without training: which of `models` has won, that or its training
        "winners": {label: winner for label, winner in winners(findings).items() if winner in best},
        "models_without_complete_trial": sorted(set(labels) - set(best)),
    }
    methods = {label: _methods(findings, label) for label in labels if not findings.study.models[label].rows.empty}
    differences = {
        label: [plain_values(pair, *pair) for pair in result.method_pairs.reset_index().to_dict("records")]
        for label, result in findings.models.items()
        if label in labels
    }
    comparison = {"schema_version": SCHEMA_VERSION, "metric": "acc_mean", "models": methods, "differences": differences}
    rows = rows.drop(columns=["name", "configuration"], errors="ignore")
    rows = rows.assign(output_dir=[relative(name, folder) for name in rows["output_dir"]])
    return {
        RESULTS: rows.map(as_cell).rename(columns=as_cell).to_csv(index=False, lineterminator="\n"),
        BEST_CONFIG: to_json(best_config),
        METHOD_COMPARISON: to_json(comparison),
    }


def relative(folder: str | None, base: Location) -> str | None:
    """Return a folder that is there, or would be below `base`, relative to that; any other name as it is."""
    if not folder:
        return folder
    place = location(folder)
    if place.is_relative_to(base):
        return place.relative_to(base).as_posix()
    both_here = isinstance(place, Path) and isinstance(base, Path) and place.is_dir()
    return Path(os.path.relpath(folder, base)).as_posix() if both_here else folder


def best_entry(result: ModelFindings, folder: Location) -> dict[str, Any]:
    """Return the best configuration of a model as one that can be run again, with the evidence for it, in a file of `folder`."""
    best, dense = result.best, result.model.baseline
    return {
        **best["configuration"].to_dict(),
        "source": None if result.model.source is None else dict(result.model.source),
        **plain_values(best, "name", "removed_fraction", "params_count", "acc_mean", "acc_mean_stderr", "ppl", "key"),
        "output_dir": relative(plain_value(best["output_dir"]), folder),
        "draws": plain_value(best["draws"]),
        "tasks": {task: plain_values(row, "acc", "stderr") for task, row in result.tasks.drop("mean").iterrows()},
        "baseline": plain_values(dense, *dense) or None,
        "perplexity_text": result.model.text,
        "perplexity_window": result.model.window,
        "retained_accuracy": result.retained(best["acc_mean"]),
        "num_complete_trials": len(result.trials),
        "within_noise": [name for name in result.tied if name != best["name"]],
        "within_noise_basis": result.basis,
        "edges": [{"hyperparameter": factor, "value": value, "edge": side} for factor, value, side in result.edges],
    }


def _methods(findings: Findings, label: str) -> dict[str, Any]:
    """Return acc_mean of each method over its eligible configurations: n, mean, std (n - 1), min, max, best configuration."""
    result = findings.models.get(label)
    methods = {}
    for method, trials in findings.study.models[label].rows.groupby("method", sort=False):
        row, n, best = {}, 0, None
        failed = len(trials) - len(ranked(trials))  # of the trials: complete ones may be draws of one configuration
        if result is not None and method in result.methods.index:
            row = result.methods.loc[method]
            n = int(row["n"])
            names = ("name", *CALIBRATION, "acc_mean", "acc_mean_stderr", "ppl", "key")
            best = plain_values(result.named(row["best"]), *names)
        values = plain_values(row, "mean", "std", "min", "max")
        methods[str(method)] = {"n": n, "n_failed_or_stopped": failed, **values, "best": best}
    return methods


def across_view(findings: Findings) -> dict[str, str | None]:
    """Return what each model loses with the best configuration of each other one, and the best single configuration for all.

    Losses are acc_mean points below the model's own best. No text with fewer than two models that have a complete trial.
    """
    if findings.transfer is None:
        return {CROSS_MODEL_COMPARISON: None}
    losses = findings.transfer.losses
    comparison = {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": findings.rule,
        "best": {label: row[label] for label, row in losses.items()},
        "transfer": {label: {o: loss for o, loss in row.items() if o != label} for label, row in losses.items()},
        "best_for_all": findings.transfer.best_for_all,
    }
    return {CROSS_MODEL_COMPARISON: to_json(comparison)}


def best_command(result: ModelFindings) -> str | None:
    """`command` of the best configuration, on each of the draws that its accuracy is the mean of."""
    source, draws = result.model.source, result.draws.get(result.best.name)
    if source is None or draws is None:
        return command(result.model, result.best)
    seeds = map(plain_value, draws["seed"])  # None: the run's
    return command(result.model, result.best, sorted(int(source["seed"] if seed is None else seed) for seed in seeds))


def command(model: Model, row: Mapping[str, Any], seeds: Sequence[int] = ()) -> str | None:
    """Lines for a shell: write a search space of the one configuration of `row`, and search it on what its trial was run on, or on
    the draws of several `seeds`.

    None where it is not known what that was (rows of a results file).
    """
    source = model.source
    if not source:
        return None
    config = row["configuration"]
    file = shlex.quote(f"{config.name}.yaml")
    # A shape's default goes by the model's size.
    space = {"search": "grid"} | config.settings() | {"shape": config.shape} | ({"seeds": list(seeds)} if seeds else {})
    lines = " ".join(shlex.quote(f"{name}: {value}") for name, value in space.items())
    protocol = source["protocol"]
    values = {**protocol, **source, "search_space": f"{config.name}.yaml", "tasks": ",".join(protocol["tasks"])}
    if config.calibration is not None:  # the space says it
        values["calibration"] = None
    names = (
        *("model", "revision", "search_space", "calibration", "data_dir", "tasks", "limit", "perplexity_window"),
        *("perplexity_tokens", "dtype", "seed"),
    )
    given = {name.replace("_", "-"): values[name] for name in names if values.get(name) is not None}
    flags = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in given.items())
    return f"printf '%s\\n' {lines} > {file}\ntune-prune search {flags}"
