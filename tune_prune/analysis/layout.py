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

from tune_prune.analysis.export import (
    SCHEMA_VERSION,
    best_entry,
    cross_model_comparison,
    csv_text,
    global_best_config,
    method_comparison,
)
from tune_prune.analysis.figures.figures_best import draw_best
from tune_prune.analysis.input.rows import plain_value, plain_values
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.rerun import command
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, parse_json, to_json
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
        written += _consolidated(findings, model, entry, consolidated)
        if found is not None and entry is not None:
            written += _best(found, entry, output / f"best_{name}")
    across = cross_model_comparison(findings)
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


def _entry(found: ModelFindings, base: Path) -> dict[str, Any]:
    """The best configuration of a model with the evidence for it; its output_dir is relative to the folder `base`."""
    entry = best_entry(found)
    entry["output_dir"] = _relative(entry["output_dir"], base)
    return entry | {
        "model": found.model.label,
        "command": command(found.model, found.best),
        "selection": {
            "rule": found.rule,
            "chosen": {rule: list(names) for rule, names in found.chosen.items()},
            "confidence_set": found.tied,
            "p_best": {row["name"]: plain_value(row["p_best"]) for _, row in found.eligible.iterrows()},
            "basis": found.basis,
            "cross_fit": None if found.cross_fit is None else asdict(found.cross_fit),
        },
    }


def _consolidated(findings: Findings, model: Model, entry: Mapping[str, Any] | None, folder: Path) -> list[Path]:
    rows = model.rows.drop(columns="name")
    entries, without = ({}, [model.label]) if entry is None else ({model.label: entry}, [])
    texts = {
        RESULTS: csv_text(rows, [_relative(name, folder) for name in rows["output_dir"]]),
        BEST_CONFIG: to_json(global_best_config(findings.rule, entries, without)),
        METHOD_COMPARISON: to_json(method_comparison(findings, [model.label])),
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
    pictures = [] if trial is None or damaged else draw_best(trial, folder / "visualization")
    for name in _PICTURES:
        if name not in {path.name for path in pictures}:
            (folder / "visualization" / name).unlink(missing_ok=True)
            absent[f"visualization/{name}"] = "it is drawn from the files above"
    readme = [
        f"{found.best['name']}: the best of {len(found.eligible)} configurations of {found.model.label} by {found.rule}.",
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
