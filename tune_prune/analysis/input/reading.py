"""Reads everything an analysis is given into one `Study`: experiment folders in any state, published results files.

Nothing is dropped silently: what does not compete, what is missing and what was merged is a `Problem` of its model. A
model that was measured in two ways (other items, other seed, another ratio or shape) is two models here, named apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from tune_prune.analysis.input.experiment_reader import (
    ModelRows,
    is_experiment,
    model_rows,
    read_experiment,
    read_published,
)
from tune_prune.analysis.input.rows import PUBLISHED_COLUMNS, TEXTS, config_name, frame
from tune_prune.analysis.input.study import Model, Problem, Study
from tune_prune.core.config import PruningConfig, group_labels
from tune_prune.core.errors import UserError
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import BASELINES, EXPERIMENT, LEDGER, RESULTS

_CHECKED = [name for name in PUBLISHED_COLUMNS if name not in (*TEXTS, "success")]
# label, how it was measured, pruning_ratio; and removal_divisor and shape where an experiment has one of it: of several it has
# searched, and they are compared, but experiments that differ in it are kept apart
_Key = tuple[str, str, float, int | None, str | None]
_CONSOLIDATED = re.compile(r"consolidated_(.+)_[\d.]+")


def read_study(folders: Sequence[Path], csvs: Sequence[tuple[str, Path]]) -> Study:
    """The study of experiment folders, folders of results files and (label, results file) pairs, in that order.

    A folder is an experiment (whatever is left of it), a consolidated_<Model>_<percent>/ with a results file, or the
    parent of several of either. Configurations that are there twice count once: the first complete one.

    UserError for a folder that is none of these and for a results file that cannot be read. What is damaged within an
    experiment is a Problem.
    """
    parts: list[ModelRows] = []
    experiments: dict[Path, Mapping[str, Any]] = {}
    costs: dict[Path, Mapping[str, Any]] = {}
    places = [place for folder in folders for place in _places(Path(folder))]
    places += [(label, path / RESULTS if path.is_dir() else path) for label, path in csvs]
    once: dict[tuple[str | None, Path], Path] = {}  # a place that is named twice is read once
    for label, path in places:
        once.setdefault((label, path.resolve()), path)
    for (label, _), path in once.items():
        if label is None:
            parts += read_experiment(path, experiments, costs)
        else:
            parts.append(read_published(path, label))
    return Study(_models(parts), experiments, costs)


def study_of_search(
    folder: Path, about: Mapping[str, Any], baselines: Mapping[str, TrialRecord], records: Sequence[TrialRecord]
) -> Study:
    """The study of one experiment whose `records`, dense `baselines` by label and experiment.json (`about`) were read already."""
    return Study(_models(model_rows(folder, about, baselines, frame(records, folder))), {folder: about})


def _places(folder: Path) -> list[tuple[str | None, Path]]:
    """The folder itself, or those in it that hold results: an experiment (None), or a label and a results file."""
    if not folder.is_dir():
        hint = f"; a results file is given as --csv Model={folder}" if folder.is_file() else ""
        raise UserError(f"{folder} is no folder{hint or '; name an experiment, e.g. ray_results/NAME'}")
    if is_experiment(folder):
        return [(None, folder)]
    name = folder.resolve().name
    if (folder / RESULTS).is_file():
        named = _CONSOLIDATED.fullmatch(name)
        return [(named[1] if named else name, folder / RESULTS)]
    inside = [
        place
        for place in sorted(folder.iterdir())
        if is_experiment(place) or (_CONSOLIDATED.fullmatch(place.name) and (place / RESULTS).is_file())
    ]
    if not inside:
        raise UserError(
            f"{folder} is no experiment (no {LEDGER}/, {EXPERIMENT} or {BASELINES}) and holds no {RESULTS}; name an "
            "experiment, e.g. ray_results/NAME"
        )
    return [found for place in inside for found in _places(place)]


def _models(parts: list[ModelRows]) -> dict[str, Model]:
    """Rows that may be compared with each other, merged; and each such group with a name of its own."""
    groups: dict[_Key, list[ModelRows]] = {}
    for part in parts:
        if part.measured is None:  # taken for like the others of its label
            part.measured = next((p.measured for p in parts if p.label == part.label and p.measured), "unknown")
        for index, (ratio, rows) in enumerate(part.rows.groupby("pruning_ratio")):
            divisors, shapes = (
                rows["removal_divisor"].fillna(PruningConfig.removal_divisor).unique(),
                rows["shape"].unique(),
            )
            fixed = int(divisors[0]) if len(divisors) == 1 else None, str(shapes[0]) if len(shapes) == 1 else None
            own = replace(part, rows=rows, problems=part.problems if index == 0 else [])
            groups.setdefault((part.label, part.measured, float(ratio), *fixed), []).append(own)
    for part in parts:
        if part.rows.empty:  # what is said of it belongs to any other of the same, else it stands alone
            key: _Key = (part.label, str(part.measured), math.nan, None, None)
            groups.setdefault(next((other for other in groups if other[:2] == key[:2]), key), []).append(part)
    order = list(dict.fromkeys(part.label for part in parts))
    models: dict[str, Model] = {}
    for key in sorted(groups, key=lambda key: order.index(key[0])):
        base, label = _names(key, groups, models)
        others = [part for other in groups if other[0] == key[0] and other[1] != key[1] for part in groups[other]]
        notes = []
        if others:
            where = ", ".join(dict.fromkeys(str(part.origin) for part in others))
            notes.append(Problem(label, where, f"{key[0]} was measured in another way there: kept apart", "note"))
        models[label] = _merged(base, label, groups[key], notes)
    return models


def _names(key: _Key, groups: Mapping[_Key, list[ModelRows]], taken: Mapping[str, Model]) -> tuple[str, str]:
    """The label, and what tells this group from the others of that label: first without the pruning ratio, then with it."""
    label, measured, ratio, divisor, shape = key
    same = [other for other in groups if other[0] == label]
    alike = [other for other in same if other[1] == measured]
    model = label
    if len({other[1] for other in same}) > 1:
        origin = groups[key][0]
        model += f" ({'csv' if origin.published else origin.origin.resolve().name})"
    if len({other[4] for other in alike}) > 1:
        model += f" {shape or 'several shapes'}"
    by = f"/{divisor or 'several'}" if len({other[3] for other in alike if other[2] == ratio}) > 1 else ""
    name = group_labels((model, other[2]) for other in alike)[model, ratio] + by
    number = 2
    while name in taken:
        name, number = f"{name.removesuffix(f' {number - 1}')} {number}", number + 1
    return model + by, name


def _merged(base: str, label: str, parts: list[ModelRows], problems: list[Problem]) -> Model:
    problems += [
        Problem(label, problem.where, problem.what, problem.kind) for part in parts for problem in part.problems
    ]
    filled = [part.rows for part in parts if not part.rows.empty] or [parts[0].rows]
    rows = pd.concat(filled, ignore_index=True)
    for name in TEXTS:  # a column that one place lacks
        rows[name] = rows[name].fillna("")
    rows["name"] = [config_name(row) for _, row in rows.iterrows()]
    rows["name"] = rows["name"].astype("str")
    rows["model"] = label
    rows = _without_duplicates(label, rows, problems)
    problems += _of_rows(label, rows)
    return Model(
        label=label,
        base=base,
        rows=rows.drop(columns="where"),
        baseline=next((part.baseline for part in parts if part.baseline), {}),
        source=next((part.source for part in parts if part.source), None),
        origins=tuple(dict.fromkeys(part.origin for part in parts)),
        problems=tuple(problems),
        kind="published" if all(part.published for part in parts) else "experiment",
    )


def _without_duplicates(label: str, rows: pd.DataFrame, problems: list[Problem]) -> pd.DataFrame:
    """Each configuration once: the first complete one, else the first. The others are named."""
    order = rows.sort_values("success", ascending=False, kind="stable")  # one model and ratio: names are configurations
    first = order.drop_duplicates("name").set_index("name")
    keep = order.index[~order.duplicated("name")].sort_values()
    for _, row in rows.drop(index=keep).iterrows():
        counts = first.loc[row["name"]]
        same = "the same trial as" if row["key"] and row["key"] == counts["key"] else f"{row['name']}, as"
        problems.append(Problem(label, row["where"], f"{same} {counts['where']}, which counts", "duplicate"))
    return rows.loc[keep].reset_index(drop=True)


def _of_rows(label: str, rows: pd.DataFrame) -> list[Problem]:
    """What is wrong with single rows, and which columns are empty in all."""
    problems = []
    complete = rows[rows["success"]]
    empty = [name for name in _CHECKED if complete[name].isna().all()]
    if len(complete) and empty:
        problems.append(Problem(label, "", f"no row has {', '.join(empty)}", "missing"))
    gradients = [name for name in _CHECKED if name.startswith("grad_")]
    # A method of which no trial has any took no gradients: they are not missing.
    taken = set(complete.loc[complete[gradients].notna().any(axis=1), "pruning_method"])
    for _, row in rows.iterrows():
        if not row["success"]:
            status, reason = row["status"].replace("_", " "), row["reason"]
            what = reason if reason.startswith("stopped") else f"{status}: {reason}" if reason else status
            problems.append(Problem(label, row["where"], f"{row['name']}: {what}", row["status"]))
            continue
        ignored = empty if row["pruning_method"] in taken else [*empty, *gradients]
        wrong = {name: row[name] for name in _CHECKED if name not in ignored and not _is_finite(row[name])}
        if wrong:
            what = ", ".join(f"{name} is {'nan' if pd.isna(value) else value}" for name, value in wrong.items())
            out = ": it does not compete" if "acc_mean" in wrong else ""
            problems.append(Problem(label, row["where"], f"{row['name']}: {what}{out}", "not_finite"))
    return problems


def _is_finite(value: Any) -> bool:
    return not pd.isna(value) and math.isfinite(value)
