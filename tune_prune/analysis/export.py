"""The views of an experiment, from its findings: the results table, the best configurations, the methods, the models compared.

Everything here can be written again at any time. Stopped and failed trials stay in the table with their status; they are
never eligible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.input.rows import config_of, frame, plain_value, plain_values
from tune_prune.analysis.statistics.factors import CALIBRATION
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.core.files import to_json
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import BEST_CONFIG, CROSS_MODEL_COMPARISON, METHOD_COMPARISON, RESULTS, FolderStore

# 2: within_noise is a confidence set, within_noise_basis one word; the analysis adds `selection` and `command`
SCHEMA_VERSION = 2


def write_views(store: FolderStore, records: Sequence[TrialRecord], findings: Findings) -> tuple[str, ...]:
    """Write the views of an experiment, each whole or not at all, and return their names.

    `findings` are those of its `records`. Trial folders in the experiment are named relative to it, so that it can be moved.
    """
    rows = frame(records, store.folder)
    best = {label: best_entry(found) for label, found in findings.models.items()}
    for entry in best.values():
        entry["output_dir"] = _below(entry["output_dir"], store.folder)
    texts = {
        RESULTS: csv_text(rows, [_below(folder, store.folder) for folder in rows["output_dir"]]),
        BEST_CONFIG: to_json(global_best_config(findings.rule, best, findings.without)),
        METHOD_COMPARISON: to_json(method_comparison(findings, findings.study.models)),
    }
    if (across := cross_model_comparison(findings)) is not None:
        texts[CROSS_MODEL_COMPARISON] = to_json(across)
    for name, text in texts.items():
        store.put(name, text)
    return tuple(texts)


def _below(folder: str, output_dir: Path) -> str:
    return Path(folder).relative_to(output_dir).as_posix() if Path(folder).is_relative_to(output_dir) else folder


def csv_text(rows: pd.DataFrame, folders: Sequence[str | None]) -> str:
    """An all_methods_results.csv of `rows`, whose trials' folders are called `folders` in it."""
    return rows.assign(output_dir=folders).to_csv(index=False, lineterminator="\n")


def global_best_config(rule: str, entries: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """The best configuration of each model (`best_entry`), and the models without a complete trial."""
    return {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": rule,
        "models": dict(entries),
        "models_without_complete_trial": sorted(without),
    }


def best_entry(found: ModelFindings) -> dict[str, Any]:
    """The best configuration of a model as one that can be run again, with the evidence for it."""
    best, dense = found.best, found.model.baseline
    baseline = plain_values(dense, "acc_mean", "acc_mean_stderr", "ppl") | {
        "params": plain_value(dense.get("params_count"))
    }
    return {
        **asdict(config_of(best)),
        "pruning_method": best["pruning_method"],  # as the published files call `method`
        "source": None if found.model.source is None else dict(found.model.source),
        **plain_values(best, "name", "removed_fraction", "params_count", "acc_mean", "acc_mean_stderr", "ppl", "key"),
        "output_dir": plain_value(best["output_dir"]),
        "tasks": {
            task: {"acc": best[f"acc_{task}"], "stderr": plain_value(best.get(f"acc_{task}_stderr"))}
            for task in found.model.tasks
            if not pd.isna(best[f"acc_{task}"])
        },
        "baseline": baseline if dense else None,
        "retained_accuracy": retained_accuracy(best["acc_mean"], dense),
        "num_complete_trials": len(found.eligible),
        "within_noise": [name for name in found.tied if name != best["name"]],
        "within_noise_basis": found.basis,
        "edges": [{"knob": factor, "value": value, "edge": side} for factor, value, side in found.edges],
    }


def retained_accuracy(acc_mean: float, dense: Mapping[str, float]) -> float | None:
    """The part of the dense model's acc_mean that is left; None if that is not known."""
    dense_acc = dense.get("acc_mean", math.nan)
    return acc_mean / dense_acc if math.isfinite(dense_acc) and dense_acc > 0 else None


def method_comparison(findings: Findings, labels: Iterable[str]) -> dict[str, Any]:
    """acc_mean per model and method over its complete trials: n, mean, std (n - 1), min, max, best configuration."""
    models = {label: _methods(findings, label) for label in labels}
    models = {label: methods for label, methods in models.items() if methods}
    return {"schema_version": SCHEMA_VERSION, "metric": "acc_mean", "models": models}


def _methods(findings: Findings, label: str) -> dict[str, Any]:
    found = findings.models.get(label)
    methods = {}
    for method, trials in findings.study.models[label].rows["pruning_method"].value_counts().items():
        values: dict[str, Any] = dict.fromkeys(("mean", "std", "min", "max", "best"))
        n = 0
        if found is not None and method in found.methods.index:
            row = found.methods.loc[method]
            best, n = found.named(row["best"]), int(row["n"])
            values = plain_values(row, "mean", "std", "min", "max")
            values["best"] = plain_values(best, "name", *CALIBRATION, "acc_mean", "acc_mean_stderr", "ppl", "key")
        methods[str(method)] = {"n": n, "n_failed_or_stopped": int(trials) - n, **values}
    return methods


def cross_model_comparison(findings: Findings) -> dict[str, Any] | None:
    """What each model loses with the best configuration of each other one, and the best single configuration for all.

    Losses are acc_mean points below the model's own best. None with fewer than two models that have a complete trial.
    """
    if findings.transfer is None:
        return None
    losses = findings.transfer.losses
    return {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": findings.rule,
        "best": {label: row[label] for label, row in losses.items()},
        "transfer": {label: {o: loss for o, loss in row.items() if o != label} for label, row in losses.items()},
        "best_for_all": findings.transfer.best_for_all,
    }
