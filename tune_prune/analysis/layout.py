"""Writes what an analysis found in the layout in which such grids are published.

    consolidated_<Model>_<percent>/   all_methods_results.csv  global_best_config.json  method_comparison.json
    best_<Model>_<percent>/           best_config.json  evaluation/  analysis/  visualization/  README.txt
    cross_model_comparison.json       two models or more

Percent is the pruning ratio asked for. Every file replaces its older self atomically; a file of the best configuration
that cannot be made this time is removed, since an older one tells of another configuration. Other files are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tune_prune.analysis.export import SCHEMA_VERSION, across_view, best_command, best_entry, relative, views
from tune_prune.analysis.figures import draw_best
from tune_prune.analysis.input.rows import plain_value, plain_values
from tune_prune.analysis.input.study import Model
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables.configurations import is_within
from tune_prune.core.errors import UserError
from tune_prune.core.files import parse_json, to_json
from tune_prune.core.ledger import trial_file
from tune_prune.core.store import BEST_OF_MODEL, GRADIENTS, PLAN_COMPARISON, FolderStore, open_store

_PICTURES = ("gradient_analysis.png", "pruning_ratio.png", "retention_ratio.png")


def write_layout(findings: Findings, output: Path) -> list[Path]:
    """Write all of it below `output`, and return the files. OSError where that cannot be written."""
    written: list[Path] = []
    taken: set[str] = set()
    for label, model in findings.study.models.items():
        if model.rows.empty:
            continue
        name = folder_name(model, taken)
        result, folder, best = findings.models.get(label), output / f"consolidated_{name}", {}
        if result is not None:
            best[label] = best_entry(result, folder) | _evidence(result, findings)
        texts = views(findings, [label], best, model.rows, folder)
        written += FolderStore(folder).put_all(texts)
        if result is not None:
            written += _best(result, best[label], output / f"best_{name}")
    return written + FolderStore(output).put_all(across_view(findings))


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


def _evidence(result: ModelFindings, findings: Findings) -> dict[str, Any]:
    """Return what stands behind a model's best configuration, and the command that runs it again."""
    p_values = map(plain_value, result.eligible["p_value"])
    selection: dict[str, Any] = {
        "rule": result.rule,
        "chosen": result.chosen,
        "confidence_set": result.tied,
        "p_value": dict(zip(result.eligible["name"], p_values, strict=True)),
        "basis": result.basis,
        "cross_fit": None if result.cross_fit is None else asdict(result.cross_fit),
    }
    if findings.rule == "smallest":
        gap, chosen = result.against_dense, findings.smallest[result.model.series] is result
        difference = {} if gap is None else plain_values(vars(gap), "points", "stderr_points", "basis")
        about = {"within_points": findings.within, "is_within": is_within(result), "smallest_of_all_ratios": chosen}
        selection |= about | {"to_dense": difference}
    return {"model": result.model.label, "command": best_command(result), "selection": selection}


def _best(result: ModelFindings, entry: Mapping[str, Any], folder: Path) -> list[Path]:
    place = result.best["output_dir"]
    best_config = {"schema_version": SCHEMA_VERSION, **entry, "output_dir": relative(place, folder)}
    texts: dict[str, str | None] = {
        BEST_OF_MODEL: to_json(best_config),
        "evaluation/evaluation_results.json": to_json(_evaluation(result, entry)),
    }
    trial = open_store(place) if place else None
    if trial is not None and not (trial.folder.is_dir() if isinstance(trial.folder, Path) else trial.names()):
        trial = None
    absent, damaged = {}, False
    for name in (GRADIENTS, PLAN_COMPARISON):
        copy = f"analysis/{name}"
        texts[copy] = None
        if trial is None:
            absent[copy] = "the trial's folder is not there (published results come without it)"
        elif not trial.has(name):
            absent[copy] = f"the trial's folder {place} does not have it"
        else:
            try:
                texts[copy] = to_json(parse_json(trial.path(name), trial_file(trial.folder, name)))
            except UserError as error:
                absent[copy], damaged = f"damaged: {error}", True
    pictures = [] if trial is None or damaged else draw_best(trial.folder, folder / "visualization")
    for name in sorted({*_PICTURES} - {path.name for path in pictures}):
        texts[f"visualization/{name}"] = None
        absent[f"visualization/{name}"] = "it is drawn from the analysis/ files that are missing"
    readme = [
        f"{result.best['name']}: the best of {len(result.eligible)} configurations of {result.model.label} by {result.rule}.",
        "",
        "best_config.json                      the configuration, the evidence for it, the command that runs it again",
        "evaluation/evaluation_results.json    its accuracies, task by task, and its perplexity",
        "analysis/, visualization/             the gradients, and what each layer lost and kept",
        *(["", "Missing:"] if absent else []),
        *(f"{name}: {reason}" for name, reason in absent.items()),
    ]
    texts["README.txt"] = "\n".join(readme) + "\n"
    return pictures + FolderStore(folder).put_all(texts)


def _evaluation(result: ModelFindings, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return accuracies as fractions; `dense` is the model before pruning, `retained` acc over that."""
    names = ("model", "name", "acc_mean", "acc_mean_stderr", "ppl", "params_count", "removed_fraction")
    fit, tasks = result.cross_fit, result.tasks.drop("mean").astype({"items": "Int64"})
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: entry[name] for name in (*names, "retained_accuracy", "baseline")},
        **plain_values(result.best, "elapsed_time"),
        "acc_mean_cross_fitted": None if fit is None else fit.corrected,
        "acc_mean_cross_fitted_stderr": None if fit is None else fit.stderr,
        "tasks": {task: plain_values(row, *row) for task, row in tasks.to_dict("index").items()},
    }
