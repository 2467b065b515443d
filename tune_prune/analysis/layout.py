"""Writes what an analysis found in the layout in which such grids are published.

    consolidated_<Model>_<percent>/   all_methods_results.csv  global_best_config.json  method_comparison.json
    best_<Model>_<percent>/           best_config.json  evaluation/  analysis/  visualization/  README.txt
    cross_model_comparison.json       two models or more

Percent is the pruning ratio asked for. Every file replaces its older self atomically; a file of the best configuration
that cannot be made this time is removed, since an older one tells of another configuration. Other files are left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.export import SCHEMA_VERSION, best_entry, method_comparison, plain_value, plain_values
from tune_prune.analysis.figures.figures_best import draw_best
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.rerun import command
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, parse_json, to_json
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import (
    BEST_CONFIG,
    CROSS_MODEL_COMPARISON,
    GRADIENTS,
    METHOD_COMPARISON,
    PLAN_COMPARISON,
    RESULTS,
)

_PICTURES = ("gradient_analysis.png", "pruning_ratio.png", "retention_ratio.png")


def write_layout(findings: Findings, output: Path) -> list[Path]:
    """Write all of it below `output`, and return the files. OSError where that cannot be written."""
    written: list[Path] = []
    taken: set[str] = set()
    for label, model in findings.study.models.items():
        if model.rows.empty:
            continue
        name = folder_name(model, taken)
        found = findings.models.get(label)
        consolidated = output / f"consolidated_{name}"
        entry = _entry(found, consolidated) if found is not None else None
        written += _consolidated(model, entry, findings.rule, consolidated)
        if found is not None and entry is not None:
            written += _best(found, entry, output / f"best_{name}")
    across = cross_model(findings)
    if across is None:
        (output / CROSS_MODEL_COMPARISON).unlink(missing_ok=True)
    else:
        written.append(_write(output / CROSS_MODEL_COMPARISON, to_json(across)))
    return written


def folder_name(model: Model, taken: set[str]) -> str:
    """`<Model>_<percent>`, or `<Model>-<shape>_<percent>` unless that is free, in characters that every file system takes, and
    not yet in `taken`, to which it is added."""
    label = re.sub(r"[^\w.+-]+", "-", model.label.removesuffix(f"@{model.ratio:g}")).strip("-.") or "model"
    if model.shape != "free" and not label.endswith(model.shape):
        label += f"-{model.shape}"
    name = f"{label}_{100 * model.ratio:g}"
    number = 2
    while name.lower() in taken:  # some file systems take upper and lower case for the same
        name, number = f"{label}-{number}_{100 * model.ratio:g}", number + 1
    taken.add(name.lower())
    return name


def cross_model(findings: Findings) -> dict[str, Any] | None:
    """What each model loses with another model's best, as plain data; None with fewer than two models."""
    points, stderrs = findings.transfer_points, findings.transfer_stderr
    if points is None or stderrs is None:
        return None
    best = {label: found.best["name"] for label, found in findings.models.items()}

    def outcome(label: str, other: str) -> dict[str, Any]:
        found, name = findings.models[label], best[other]
        if pd.isna(points.loc[label, other]):
            return {"config": name, "evaluated": False}
        row = found.competing[found.competing["name"] == name].iloc[0]
        return {
            "config": name,
            "evaluated": True,
            **plain_values(row, "acc_mean", "acc_mean_stderr", "ppl"),
            "loss_points": plain_value(points.loc[label, other]),
            "loss_points_stderr": plain_value(stderrs.loc[label, other]),
            "loss_basis": found.basis,
        }

    return {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": findings.rule,
        "best": {label: outcome(label, label) for label in best},
        "transfer": {label: {other: outcome(label, other) for other in best if other != label} for label in best},
        "best_for_all": findings.best_for_all,
    }


def _entry(found: ModelFindings, base: Path) -> dict[str, Any]:
    """The best configuration of a model with the evidence for it; its output_dir is relative to the folder `base`."""
    model, competing = found.model, found.competing
    dense = TrialRecord("", model.label, {}, "complete", metrics=dict(model.baseline)) if model.baseline else None
    confidence_set = competing.loc[competing["in_confidence_set"], "name"].tolist()
    entry = best_entry(model.rows, competing, found.best, dense, confidence_set, found.basis)
    entry["output_dir"] = _relative(entry["output_dir"], base)
    return entry | {
        "model": model.label,
        "source": None if model.source is None else dict(model.source),
        "command": command(model, found.best),
        "selection": {
            "rule": found.rule,
            "chosen": {rule: list(names) for rule, names in found.chosen.items()},
            "confidence_set": confidence_set,
            "p_best": {row["name"]: plain_value(row["p_best"]) for _, row in competing.iterrows()},
            "basis": found.basis,
            "cross_fit": None if found.cross_fit is None else asdict(found.cross_fit),
        },
    }


def _consolidated(model: Model, entry: Mapping[str, Any] | None, rule: str, folder: Path) -> list[Path]:
    rows = model.rows.drop(columns="name")
    rows["output_dir"] = [_relative(name, folder) for name in rows["output_dir"]]
    best = {
        "schema_version": SCHEMA_VERSION,
        "selection_rule": rule,
        "models": {} if entry is None else {model.label: entry},
        "models_without_complete_trial": [model.label] if entry is None else [],
    }
    texts = {
        RESULTS: rows.to_csv(index=False, lineterminator="\n"),
        BEST_CONFIG: to_json(best),
        METHOD_COMPARISON: to_json(method_comparison(model.rows)),
    }
    return [_write(folder / name, text) for name, text in texts.items()]


def _best(found: ModelFindings, entry: Mapping[str, Any], folder: Path) -> list[Path]:
    own = {"schema_version": SCHEMA_VERSION, **entry, "output_dir": _relative(found.best["output_dir"], folder)}
    written = [
        _write(folder / "best_config.json", to_json(own)),
        _write(folder / "evaluation" / "evaluation_results.json", to_json(_evaluation(found, entry))),
    ]
    place = found.best["output_dir"]
    trial = Path(place) if place and Path(place).is_dir() else None
    absent: dict[str, str] = {}
    for name in (GRADIENTS, PLAN_COMPARISON):
        copy, reason = folder / "analysis" / name, _copy(trial, name, folder / "analysis")
        if reason:
            copy.unlink(missing_ok=True)
            absent[f"analysis/{name}"] = reason
        else:
            written.append(copy)
    damaged = [reason for reason in absent.values() if reason.startswith("damaged")]
    pictures = [] if trial is None or damaged else draw_best(found, trial, _made(folder / "visualization"))
    for name in _PICTURES:
        if name not in {path.name for path in pictures}:
            (folder / "visualization" / name).unlink(missing_ok=True)
            absent[f"visualization/{name}"] = "it is drawn from the files above"
    readme = [
        f"{found.best['name']}: the best of {len(found.competing)} configurations of {found.model.label} by {found.rule}.",
        "",
        "best_config.json                      the configuration, the evidence for it, the command that runs it again",
        "evaluation/evaluation_results.json    its accuracies, task by task, and its perplexity",
        "analysis/, visualization/             the gradients, and what each layer lost and kept",
        *(["", "Not here:"] if absent else []),
        *(f"{name}: {reason}" for name, reason in absent.items()),
    ]
    return [*written, *pictures, _write(folder / "README.txt", "\n".join(readme) + "\n")]


def _copy(trial: Path | None, name: str, folder: Path) -> str:
    """Copy a JSON file of the trial into `folder`; if that cannot be, the reason why."""
    if trial is None:
        return "the trial's folder is not there (published results come without it)"
    if not (trial / name).is_file():
        return f"the trial's folder {trial} does not have it"
    try:
        values = parse_json(trial / name)
    except UserError as error:
        return f"damaged: {error}"
    _write(folder / name, to_json(values))
    return ""


def _evaluation(found: ModelFindings, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracies as fractions; `dense` is the model before pruning, `retained` acc over that."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": found.model.label,
        "name": entry["name"],
        **plain_values(
            found.best, "acc_mean", "acc_mean_stderr", "ppl", "params_count", "removed_fraction", "elapsed_time"
        ),
        "acc_mean_cross_fitted": None if found.cross_fit is None else found.cross_fit.corrected,
        "acc_mean_cross_fitted_stderr": None if found.cross_fit is None else found.cross_fit.stderr,
        "retained_accuracy": entry["retained_accuracy"],
        "baseline": entry["baseline"],
        "tasks": {str(task): _task(row) for task, row in found.tasks.iterrows()},
    }


def _task(row: pd.Series) -> dict[str, Any]:
    """Plain data; the number of items is a whole one."""
    values = {str(name): plain_value(value) for name, value in row.items()}
    return values | {"items": None if values["items"] is None else int(values["items"])}


def _relative(folder: str | None, base: Path) -> str | None:
    """A folder that is there relative to `base`, so that both can be moved together; any other name as it is."""
    if not folder or not Path(folder).is_dir():
        return folder
    return Path(os.path.relpath(folder, base)).as_posix()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: Path, text: str) -> Path:
    _made(path.parent)
    atomic_write_text(path, text)
    return path
