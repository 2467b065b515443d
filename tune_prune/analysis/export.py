"""Writes the views of an experiment: the results table, the best configurations, the methods and the models compared.

Everything here is derived from the ledger and can be written again at any time. Stopped and failed trials stay in the
table with their status; they never compete.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.input.load import config_name, config_of, difference, frame, ranked, read_items
from tune_prune.analysis.statistics.outcomes import compare_rows
from tune_prune.core.config import PruningConfig
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import BEST_CONFIG, CROSS_MODEL_COMPARISON, METHOD_COMPARISON, RESULTS

# 2: within_noise is a confidence set, within_noise_basis one word; the analysis adds `selection` and `command`
SCHEMA_VERSION = 2
SELECTION_RULE = "accuracy"  # analysis.load.ranked

Items = Callable[[str], "pd.Series | None"]  # output_dir -> item scores


@dataclass(frozen=True)
class Views:
    """What the views say, as they are on disk (an infinity is the text "inf" there)."""

    results: pd.DataFrame
    global_best_config: dict[str, Any]
    method_comparison: dict[str, Any]
    cross_model_comparison: dict[str, Any] | None  # None with fewer than two models that have a complete trial
    paths: tuple[Path, ...]


def write_views(
    experiment_dir: Path,
    records: Sequence[TrialRecord],
    baselines: Mapping[str, TrialRecord],
    sources: Mapping[str, dict[str, Any]] | None = None,
) -> Views:
    """Write the views of `records` into `experiment_dir`, each atomically.

    `baselines` are the dense models' records and `sources` what it takes to run a model again (ModelRun as a dict),
    both by label; a model may be missing from either. In the files, trial folders below `experiment_dir` are named relative to
    it, so that an experiment can be moved.
    """
    results = frame(records, experiment_dir)
    items = functools.cache(read_items)
    best = global_best_config(results, baselines, sources or {}, items)
    for entry in best["models"].values():
        entry["output_dir"] = _below(entry["output_dir"], experiment_dir)
    methods = method_comparison(results)
    across = cross_model_comparison(results, items)
    experiment_dir.mkdir(parents=True, exist_ok=True)
    texts = {
        RESULTS: results.assign(output_dir=[_below(folder, experiment_dir) for folder in results["output_dir"]]).to_csv(
            index=False, lineterminator="\n"
        ),
        BEST_CONFIG: to_json(best),
        METHOD_COMPARISON: to_json(methods),
    }
    if across is not None:
        texts[CROSS_MODEL_COMPARISON] = to_json(across)
    for name, text in texts.items():
        atomic_write_text(experiment_dir / name, text)
    return Views(results, best, methods, across, tuple(experiment_dir / name for name in texts))


def _below(folder: str | None, output_dir: Path) -> str | None:
    if folder is None or pd.isna(folder) or not Path(folder).is_relative_to(output_dir):
        return folder
    return Path(folder).relative_to(output_dir).as_posix()


def global_best_config(
    results: pd.DataFrame,
    baselines: Mapping[str, TrialRecord],
    sources: Mapping[str, dict[str, Any]],
    items: Items = read_items,
) -> dict[str, Any]:
    """The best configuration of each model, with the evidence for it; models without a complete trial are listed."""
    models = {}
    without = []
    for label, rows in results.groupby("model"):
        competing = ranked(rows)
        if competing.empty:
            without.append(label)
        else:
            competing = competing.assign(name=[config_name(row) for _, row in competing.iterrows()])
            comparison, _, _ = compare_rows(competing, str(label), items)
            same = competing.loc[comparison.in_confidence_set, "name"].tolist()
            entry = best_entry(rows, competing, competing.iloc[0], baselines.get(label), same, comparison.basis)
            models[label] = entry | {"source": sources.get(label)}
    return {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": SELECTION_RULE,
        "models": models,
        "models_without_complete_trial": without,
    }


def best_entry(
    rows: pd.DataFrame,
    competing: pd.DataFrame,
    best: pd.Series,
    dense: TrialRecord | None,
    confidence_set: Sequence[str],
    basis: str,
) -> dict[str, Any]:
    """The row `best` of the `competing` ones as a configuration that can be run again, and what cannot be told from the best.

    `rows` are all trials of the model; what they range over says whether the best is at an edge. `confidence_set` (names) and
    `basis` are those of `outcomes.Comparison`.
    """
    name = config_name(best)
    tasks = [
        column.removeprefix("acc_")
        for column in competing.columns
        if column.startswith("acc_")
        and not column.endswith("_stderr")
        and column != "acc_mean"
        and not pd.isna(best[column])
    ]
    baseline = None
    if dense is not None:
        metrics = dense.metrics
        baseline = {metric: plain_value(metrics.get(metric)) for metric in ("acc_mean", "acc_mean_stderr", "ppl")}
        baseline["params"] = plain_value(metrics.get("params_count"))
    return {
        **asdict(config_of(best)),
        "pruning_method": best["pruning_method"],  # as the published files call `method`
        "name": name,
        **plain_values(
            best, "removed_fraction", "params_count", "acc_mean", "acc_mean_stderr", "ppl", "key", "output_dir"
        ),
        "tasks": {
            task: {"acc": best[f"acc_{task}"], "stderr": plain_value(best.get(f"acc_{task}_stderr"))} for task in tasks
        },
        "baseline": baseline,
        "retained_accuracy": retained_accuracy(best["acc_mean"], dense),
        "num_complete_trials": len(competing),
        "within_noise": [other for other in confidence_set if other != name],
        "within_noise_basis": basis,
        "edges": _edges(rows, best),
    }


def retained_accuracy(acc_mean: float, dense: TrialRecord | None) -> float | None:
    """The part of the dense model's acc_mean that is left; None if that is not known."""
    dense_acc = dense.metrics.get("acc_mean", math.nan) if dense is not None else math.nan
    return acc_mean / dense_acc if math.isfinite(dense_acc) and dense_acc > 0 else None


def _edges(rows: pd.DataFrame, best: pd.Series) -> list[dict[str, Any]]:
    """The knobs whose best value is the smallest or largest tried: the optimum may be outside the range."""
    edges = []
    for knob in ("taylor_seq_len", "taylor_num_samples"):
        low, high, value = int(rows[knob].min()), int(rows[knob].max()), int(best[knob])
        if low < high and value in (low, high):
            edges.append({"knob": knob, "value": value, "edge": "lower" if value == low else "upper"})
    return edges


def method_comparison(results: pd.DataFrame) -> dict[str, Any]:
    """acc_mean per model and method over its complete trials: n, mean, std (n - 1), min, max, best configuration."""
    models: dict[str, dict[str, Any]] = {}
    for (label, method), rows in results.groupby(["model", "pruning_method"]):
        competing = ranked(rows)
        accuracy = competing["acc_mean"]
        summary = {name: plain_value(getattr(accuracy, name)()) for name in ("mean", "std", "min", "max")}
        best = None
        if not competing.empty:
            row = competing.iloc[0]
            best = {"name": config_name(row), **plain_values(row, *_KNOBS, "acc_mean", "acc_mean_stderr", "ppl", "key")}
        n = {"n": len(competing), "n_failed_or_stopped": len(rows) - len(competing)}
        models.setdefault(label, {})[method] = {**n, **summary, "best": best}
    return {"schema_version": SCHEMA_VERSION, "metric": "acc_mean", "models": models}


_KNOBS = ("taylor_seq_len", "taylor_num_samples")


def cross_model_comparison(results: pd.DataFrame, items: Items = read_items) -> dict[str, Any] | None:
    """What each model loses with the best configuration of each other one, and the best single configuration for all.

    Losses are acc_mean points below the model's own best. None with fewer than two models that have a complete trial.
    """
    by_model: dict[str, dict[PruningConfig, pd.Series]] = {}  # rows of each model, best first
    for label, rows in results.groupby("model"):
        for _, row in ranked(rows).iterrows():
            by_model.setdefault(label, {}).setdefault(config_of(row), row)
    if len(by_model) < 2:
        return None
    best = {label: next(iter(rows)) for label, rows in by_model.items()}

    def outcome(label: str, config: PruningConfig) -> dict[str, Any]:
        row = by_model[label].get(config)
        if row is None:
            return {"config": config.name, "evaluated": False}
        loss = difference(by_model[label][best[label]], row, items)
        loss_fields = {
            "loss_points": loss.points,
            "loss_points_stderr": plain_value(loss.stderr_points),
            "loss_basis": loss.basis,
        }
        own = plain_values(row, "acc_mean", "acc_mean_stderr", "ppl")
        return {"config": config.name, "evaluated": True, **own, **loss_fields}

    return {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": SELECTION_RULE,
        "best": {label: outcome(label, config) for label, config in best.items()},
        "transfer": {
            label: {other: outcome(label, best[other]) for other in by_model if other != label} for label in by_model
        },
        "best_for_all": _best_for_all(by_model, outcome),
    }


def _best_for_all(
    by_model: dict[str, dict[PruningConfig, pd.Series]], outcome: Callable[[str, PruningConfig], dict[str, Any]]
) -> dict[str, Any]:
    """The configuration with the highest mean acc_mean over the models, among those complete on every one.

    The models answer the same items, so their errors go together: the mean of their standard errors is an upper bound
    of the mean's.
    """
    shared = set.intersection(*(set(rows) for rows in by_model.values()))
    if not shared:
        return {"config": None, "num_candidates": 0}

    def rank(config: PruningConfig) -> tuple[float, float, int, str]:
        rows = [models[config] for models in by_model.values()]
        ppl = sum(math.inf if pd.isna(row["ppl"]) else row["ppl"] for row in rows)
        tokens = config.taylor_seq_len * config.taylor_num_samples
        return -math.fsum(row["acc_mean"] for row in rows), ppl, tokens, config.name

    config = min(shared, key=rank)
    models = {label: outcome(label, config) for label in by_model}
    stderrs = [models[label]["acc_mean_stderr"] for label in by_model]
    known = all(stderr is not None for stderr in stderrs)
    return {
        "config": config.name,
        **asdict(config),
        "num_candidates": len(shared),
        "acc_mean": math.fsum(models[label]["acc_mean"] for label in by_model) / len(by_model),
        "acc_mean_stderr": math.fsum(stderrs) / len(by_model) if known else None,
        "models": models,
    }


def plain_values(row: Mapping[str, Any] | pd.Series, *names: str) -> dict[str, Any]:
    """Cells of a row by name, as plain data."""
    return {name: plain_value(row.get(name)) for name in names}


def plain_value(value: Any) -> Any:
    """A cell as plain data: None if missing, NumPy and pandas scalars as Python ones."""
    if value is None or pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
