"""Reads everything an analysis is given into one `Study`: experiment folders in any state, published results files.

Nothing is dropped silently: what is damaged, missing, not eligible or merged is a `Problem` of its model, and the rest is read. A
model that was measured in two ways (other items, other seed, another ratio or shape) is two models here, named apart.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.input.rows import PUBLISHED_COLUMNS, TEXTS, VERSIONS, frame
from tune_prune.analysis.input.study import Model, Problem, Study
from tune_prune.core.config import ZERO_SHOT_TASKS, ModelRun, PruningConfig, group_labels, trial_key
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import DamagedFile, number
from tune_prune.core.hashing import public
from tune_prune.core.ledger import Ledger, read_about, read_baselines, read_costs, stranger
from tune_prune.core.records import TrialRecord
from tune_prune.core.speed_records import readable_speeds
from tune_prune.core.store import (
    BASELINES,
    BEST_CONFIG,
    EXPERIMENT,
    ITEMS,
    LEDGER,
    RESULTS,
    Location,
    Store,
    location,
    open_store,
)
from tune_prune.core.validation import validated


def is_experiment(folder: Location) -> bool:
    """Return whether something of an experiment is there."""
    store = open_store(folder)
    return LEDGER in store.folders() or any(map(store.has, (EXPERIMENT, BASELINES)))


def read_experiment(folder: Location) -> tuple[list[Model], Mapping[str, Any], Mapping[str, Any]]:
    """Return the rows of each model of the experiment, and its experiment.json and cost.json: empty where they cannot be read."""
    store = open_store(folder)
    lost: list[Problem] = []  # of no model in particular
    about, cost = _about(store, lost), {}
    try:
        cost = read_costs(store) or {}
    except DamagedFile as error:
        lost.append(_damaged(error))
    baselines = _baselines(store, about, lost)
    ledger = Ledger(store)
    records, damaged = ledger.readable()
    lost += map(_damaged, damaged)
    rows = frame(_ours(records, ledger.path, about, lost), folder)
    if LEDGER not in store.folders() and store.has(RESULTS):
        lost.append(Problem(str(folder / LEDGER), f"it is missing: the trials are those of {RESULTS}"))
        try:
            rows = read_results_csv(folder / RESULTS, None).rows
        except UserError as error:
            lost.append(Problem(str(folder / RESULTS), str(error)))
    parts = model_rows(folder, about, baselines, rows, lost)
    if not parts:
        what = "; ".join(f"{problem.where}: {problem.what}" for problem in lost) or "its ledger is empty"
        raise UserError(f"experiment {folder} holds no trial and names no model ({what}); name another folder")
    return with_speeds(folder, parts), about, cost


def with_speeds(folder: Location, parts: Sequence[Model]) -> list[Model]:
    """Return the models of the experiment in `folder` with the speeds measured of its trials; damaged ones are a problem of
    each."""
    speeds, damaged = readable_speeds(open_store(folder))
    problems = tuple(map(_damaged, damaged))
    return [replace(part, speeds=tuple(speeds), problems=(*part.problems, *problems)) for part in parts]


def model_rows(
    folder: Location,
    about: Mapping[str, Any],
    baselines: Mapping[str, TrialRecord],
    rows: pd.DataFrame,
    lost: Sequence[Problem] = (),
) -> list[Model]:
    """Return the `rows` (`rows.frame`) of each model of the experiment in `folder`, with what its experiment.json (`about`) and
    the dense models' records by label tell, and what was `lost` of it."""
    models = about.get("models", {})
    parts = []
    for label in dict.fromkeys([*models, *rows["model"], *baselines]):
        entry, dense = models.get(label, {}), baselines.get(label)
        trials = rows[rows["model"] == label].reset_index(drop=True)
        trials["where"] = [f"trial {key} of {folder}" for key in trials["key"]]
        run, meaning = validated(ModelRun, entry["run"]) if "run" in entry else None, entry.get("meaning", {})
        # The key that the dense model has or would have is a hash of all that two trials must share to be compared
        measured = dense.key if dense else None
        if dense is None and run is not None and {"model", "data"} <= set(meaning):
            measured = trial_key(None, meaning["model"], meaning["data"], run)
        problems = [*lost, *_missing(folder, trials, about, entry)]
        if dense is None and open_store(folder).has(BASELINES):
            what = f"{BASELINES} has no original model, so accuracy retained is unknown: run the search again to measure it"
            problems.append(Problem(str(folder), what))
        part = Model(
            *(label, trials, dense.metrics if dense else {}, run.to_dict() if run else None),
            *(entry.get("perplexity_window"), (folder,), tuple(problems)),
            measured=measured,
            seedless=tuple(entry.get("seedless", ())),
            text=entry.get("perplexity_text"),
            baseline_by={name: getattr(dense, name) for name in VERSIONS} if dense else {},
        )
        parts.append(part)
    return parts


def _damaged(error: DamagedFile) -> Problem:
    return Problem(str(error.path), f"it is {error.what}")


def _about(store: Store, lost: list[Problem]) -> dict[str, Any]:
    """Return experiment.json; nothing, and a reason among what is lost, where there are no records that it is needed for. Raises
    UserError where there are: it is not known whether they were measured alike."""
    about, what = None, "it is missing"
    try:
        about = read_about(store)
    except DamagedFile as error:
        what = f"it is {error.what}"
    if about is None and store.names(LEDGER):
        raise UserError(
            f"{store.path(EXPERIMENT)} says how the trials beside it were measured, and {what}; restore it from a copy, or analyse "
            f"the table of the last search alone: --csv NAME={store.path(RESULTS)}"
        )
    if about is None:
        what += ": what was planned, and how it was measured, is unknown"
        lost.append(Problem(str(store.path(EXPERIMENT)), what))
    return about or {}


def _baselines(store: Store, about: Mapping[str, Any], lost: list[Problem]) -> dict[str, TrialRecord]:
    """Return the dense models' records by label; why there is none is among what is lost."""
    path = store.path(BASELINES)
    try:
        dense = read_baselines(store)
    except DamagedFile as error:
        lost.append(_damaged(error))
        return {}
    if not dense:
        what = "it is missing, so what the original model scores is unknown: run the search again to measure it"
        lost.append(Problem(str(path), what))
    ours = _ours(dense.values(), lambda key: path, about, lost)
    return {label: record for label, record in dense.items() if record in ours}


def _ours(
    records: Collection[TrialRecord], place: Callable[[str], Location], about: Mapping[str, Any], lost: list[Problem]
) -> list[TrialRecord]:
    """Return the records of the experiment; what others are is among what is lost, with their `place` by key."""
    others = {record.key: what for record in records if (what := stranger(record, about))}
    lost += [Problem(str(place(key)), f"it is {what}") for key, what in others.items()]
    return [record for record in records if record.key not in others]


def _missing(folder: Location, rows: pd.DataFrame, about: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Problem]:
    """Return what the search was to try and has no record of, and trials that lost their files."""
    problems = []
    if planned := entry.get("trial_keys"):
        keys = set(rows["key"])
        missing = sorted(name for key, name in planned.items() if key not in keys)
        adaptive = about.get("search") == "optuna"  # it plans how many, not which
        count = about.get("num_trials", len(planned)) if adaptive else len(planned)
        absent = count - (len(planned) - len(missing))
        if absent > 0:
            names = "" if adaptive else f": {', '.join(missing)}"
            problems.append(Problem(str(folder), f"{absent} of {count} configurations have no record yet{names}"))
    complete = rows[rows["success"]]
    alone = [row["where"] for _, row in complete.iterrows() if not open_store(row["output_dir"]).has(ITEMS)]
    if alone and len(alone) == len(complete):
        what = "no trial has an items.parquet: configurations are compared by their standard errors, not question by question"
        return [*problems, Problem(str(folder), what)]
    what = "its items.parquet is missing: it is compared by its standard error, not question by question"
    return [*problems, *(Problem(where, what) for where in alone)]


_CHECKED = [name for name in PUBLISHED_COLUMNS if name not in (*TEXTS, "success")]
_CONSOLIDATED = re.compile(r"consolidated_(.+)_[\d.]+")


class _Key(NamedTuple):
    """The values that rows share which may be compared. Several shapes (None) were searched by one experiment, and they are
    compared, with those of an experiment that searched some of them, too; others that differ in shape are kept apart."""

    label: str
    measured: str
    ratio: float
    recovery: str
    shape: str | None = None


def read_study(
    folders: Sequence[Location], csvs: Sequence[tuple[str, Location]], baselines: Sequence[tuple[str, float]] = ()
) -> Study:
    """Return the study of experiment folders, folders of results files and (label, results file) pairs, in that order.
    `baselines`: label and accuracy of dense models that were not measured here.

    A folder is an experiment (whatever is left of it), a consolidated_<Model>_<percent>/ with a results file, or the
    parent of several of either. Configurations that are there twice count once: the first complete one.

    UserError for a folder that is none of these, for a results file that cannot be read and for a baseline of no model or of one
    that was measured. What is damaged within an experiment is a Problem.
    """
    parts: list[Model] = []
    experiments: dict[Location, Mapping[str, Any]] = {}
    costs: dict[Location, Mapping[str, Any]] = {}
    places = [place for folder in folders for place in _places(location(folder))]
    places += [(label, path / RESULTS if isinstance(path, Path) and path.is_dir() else path) for label, path in csvs]
    once: dict[tuple[str | None, Location], Location] = {}  # a place that is named twice is read once
    for label, path in places:
        once.setdefault((label, Path(os.path.realpath(path)) if isinstance(path, Path) else path), path)
    for (label, _), path in once.items():
        if label is not None:
            parts.append(_with_best_config(read_results_csv(path, label)))
            continue
        models, about, cost = read_experiment(path)
        parts += models
        experiments |= {path: about} if about else {}
        costs |= {path: cost} if cost else {}
    return Study(_with_baselines(_models(parts), baselines), experiments, costs)


def study_of_search(
    folder: Location,
    about: Mapping[str, Any],
    baselines: Mapping[str, TrialRecord],
    records: Sequence[TrialRecord],
    cost: Mapping[str, Any] | None = None,
) -> Study:
    """Return the study of one experiment whose `records`, dense `baselines` by label, experiment.json (`about`) and cost.json
    (`cost`) were read already."""
    parts = with_speeds(folder, model_rows(folder, about, baselines, frame(records, folder)))
    return Study(_models(parts), {folder: about}, {folder: cost} if cost else {})


def _places(folder: Location) -> list[tuple[str | None, Location]]:
    """Return the folder itself, or those in it that hold results: an experiment (None), or a label and a results file."""
    if isinstance(folder, Path) and not folder.is_dir():
        hint = f"a results file is given as --csv Model={folder}" if folder.is_file() else ""
        raise UserError(f"{folder} is not a folder; {hint or 'name an experiment, e.g. ray_results/NAME'}")
    for candidates in ([folder], [folder / name for name in open_store(folder).folders()]):
        places: list[tuple[str | None, Location]] = []
        for path in candidates:
            name = path.resolve().name
            consolidated = _CONSOLIDATED.fullmatch(name)
            if is_experiment(path):
                places.append((None, path))
            elif (consolidated or path == folder) and open_store(path).has(RESULTS):
                places.append((consolidated[1] if consolidated else name, path / RESULTS))
        if places:
            return places
    raise UserError(
        f"{folder} is not an experiment (no {LEDGER}/, {EXPERIMENT} or {BASELINES}) and holds no {RESULTS}; name an "
        "experiment, e.g. ray_results/NAME"
    )


def _with_best_config(part: Model) -> Model:
    """Return the part with the dense model and what it takes to run it again, from the best configuration that an analysis or a
    search has written beside the results file, where there is one."""
    path = part.origins[0].with_name(BEST_CONFIG)
    try:
        if (about := open_store(path.parent).read(BEST_CONFIG)) is None:
            return part
        models = about["models"]
        entry = models.get(part.label) or (next(iter(models.values())) if len(models) == 1 else {})
        dense = {
            {"params": "params_count"}.get(name, name): number(value)  # as schema 2 names it
            for name, value in (entry.get("baseline") or {}).items()
            if value is not None
        }
        source = validated(ModelRun, entry["source"]).to_dict() if entry.get("source") else None
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it cannot be read ({error}), so the original model is unknown: restore it from a copy"
        return replace(part, problems=(*part.problems, Problem(str(path), what)))
    window, text = entry.get("perplexity_window"), entry.get("perplexity_text")
    return replace(part, baseline=part.baseline or dense, source=source, window=window, text=text)


def _with_baselines(models: dict[str, Model], baselines: Sequence[tuple[str, float]]) -> dict[str, Model]:
    """Return the models with the accuracies of their dense models, of all pruning ratios."""
    for name, accuracy in baselines:
        labels = [label for label, model in models.items() if name in (label, model.base, model.series)]
        if not labels:
            raise UserError(
                f"--baseline names the model {name!r}, of which no trial was read; {did_you_mean(name, models)}"
            )
        for label in labels:
            model = models[label]
            if "acc_mean" in model.baseline:
                raise UserError(
                    f"--baseline {name}={accuracy:g} is for an original model that was not measured, and that of {label} has an "
                    f"accuracy of {model.baseline['acc_mean']:.4f}; leave it out"
                )
            what = f"the original model's accuracy is {100 * accuracy:g}%, as given"
            problems = (*model.problems, Problem("--baseline", what, "note", label))
            models[label] = replace(model, baseline={"acc_mean": accuracy}, problems=problems)
    return models


def _models(parts: list[Model]) -> dict[str, Model]:
    """Return rows that may be compared with each other, merged; and each such group with a name of its own."""
    pieces, empty = [], []
    for part in parts:
        # Where it is lost how it was measured, it is taken for like the others of its label
        keys = (other.measured for other in parts if other.label == part.label and other.measured)
        measured = part.measured or next(keys, "unknown")
        for index, ((ratio, recovery), rows) in enumerate(part.rows.groupby(["pruning_ratio", "recovery"])):
            subset = replace(part, rows=rows, problems=part.problems if index == 0 else ())
            pieces.append((_Key(part.label, measured, float(ratio), recovery), set(rows["shape"]), subset))
        if part.rows.empty:
            empty.append((part, measured))
    groups: dict[_Key, list[Model]] = {}
    for key, shapes, subset in pieces:
        alike = [other for this, other, _ in pieces if this._replace(ratio=key.ratio) == key]
        several = any(len(others) > 1 and shapes <= others for others in alike)
        groups.setdefault(key if several else key._replace(shape=next(iter(shapes))), []).append(subset)
    for part, measured in empty:  # what is said of it belongs to any other of the same, else it stands alone
        alone = _Key(part.label, measured, math.nan, "")
        groups.setdefault(next((key for key in groups if key[:2] == alone[:2]), alone), []).append(part)
    order = list(dict.fromkeys(part.label for part in parts))
    models: dict[str, Model] = {}
    for key in sorted(groups, key=lambda key: (order.index(key.label), key.recovery != PruningConfig.recovery)):
        base, label = _names(key, groups, models)
        others = [other for other in groups if other.label == key.label and other.measured != key.measured]
        notes = []
        if others:
            what = f"{key.label} was measured there by other settings or data: it is a model of its own"
            where = ", ".join(dict.fromkeys(str(part.origins[0]) for other in others for part in groups[other]))
            notes.append(Problem(where, what, "note"))
        models[label] = _merged(base, label, f"{key.label} {key.measured}", groups[key], notes)
    return models


def _names(key: _Key, groups: Mapping[_Key, list[Model]], taken: Mapping[str, Model]) -> tuple[str, str]:
    """Return what tells this group from the others of that label without the pruning ratio, and the label, which has it."""
    same = [other for other in groups if other.label == key.label]
    alike = [other for other in same if other.measured == key.measured]
    model = key.label
    if len(same) > len(alike):
        first = groups[key][0]
        model += f" ({'csv' if first.kind == 'published' else first.origins[0].resolve().name})"
    if len({other.shape for other in alike if other.recovery == key.recovery}) > 1:
        model += f" {key.shape or 'several shapes'}"
    name = group_labels((model, other.ratio, other.recovery) for other in alike)[model, key.ratio, key.recovery]
    numbered = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
    return model, next(name for name in numbered if name not in taken)


def _merged(base: str, label: str, kin: str, parts: list[Model], notes: list[Problem]) -> Model:
    filled = [part.rows for part in parts if not part.rows.empty] or [parts[0].rows]
    rows = pd.concat(filled, ignore_index=True)
    if rows["removal_divisor"].notna().any():  # where no row of a results file has one, none is shown
        rows["removal_divisor"] = rows["removal_divisor"].fillna(PruningConfig.removal_divisor)
    rows = rows.assign(name=pd.Series([c.name for c in rows["configuration"]], dtype="str"), model=label)
    unlike = _by_other_code(rows)  # the same trials may be among the others
    rows, duplicates = _without_duplicates(rows)
    source = next((part.source for part in parts if part.source), None)
    dense_by = next((part.baseline_by for part in parts if part.baseline), {})
    problems = [*notes, *(problem for part in parts for problem in part.problems)]
    problems += [*unlike, *_by_other_versions(rows, dense_by), *duplicates, *_of_rows(rows, source)]
    return replace(
        parts[0],
        label=label,
        base=base,
        kin=kin,
        rows=rows.drop(columns="where"),
        baseline=next((part.baseline for part in parts if part.baseline), {}),
        baseline_by=dense_by,
        source=source,
        window=next((part.window for part in parts if part.window), None),
        text=next((part.text for part in parts if part.text), None),
        speeds=tuple({(one.key, one.conditions): one for part in parts for one in part.speeds}.values()),
        seedless=tuple({method for part in parts for method in part.seedless}),
        origins=tuple(dict.fromkeys(part.origins[0] for part in parts)),
        problems=tuple(replace(problem, model=label) for problem in problems),
        kind="published" if all(part.kind == "published" for part in parts) else "experiment",
        binomial=any(part.binomial for part in parts),
    )


def _by_other_code(rows: pd.DataFrame) -> list[Problem]:
    """Return a note for each method whose trials were chosen by several states of its code."""
    known = rows[rows["success"] & (rows["method_code"] != "")]
    codes = known.groupby("method")["method_code"].nunique()
    what = (
        "the code of method {}, or of a statistic of it, was changed between its trials: they may not be of one method"
    )
    return [Problem("", what.format(method), "note") for method in codes.index[codes > 1]]


def _by_other_versions(rows: pd.DataFrame, dense: Mapping[str, str]) -> list[Problem]:
    """Return a note for each library of which several versions have measured what is compared here: the trials, and the `dense`
    model."""
    notes = []
    for column in VERSIONS:
        trials = rows.loc[rows["success"], column].map(public).value_counts()
        shown = {version: f"{count} trial{'s' * (count > 1)}" for version, count in trials.items() if version}
        if version := public(dense.get(column, "")):
            shown[version] = ", ".join(filter(None, ("the original model", shown.get(version))))
        if len(shown) > 1:
            each = "; ".join(f"{version}: {what}" for version, what in sorted(shown.items()))
            what = f"measured with several versions of {column.removesuffix('_version')}, which may give other numbers ({each})"
            notes.append(Problem("", what, "note"))
    return notes


def _without_duplicates(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[Problem]]:
    """Return each configuration once: the first complete one, else the first; and the others."""
    order = rows.sort_values("success", ascending=False, kind="stable")  # one model and ratio: names are configurations
    first_ones = order.drop_duplicates("name")
    by_name = first_ones.set_index("name")
    problems = []
    for _, row in rows.drop(index=first_ones.index).iterrows():
        counts = by_name.loc[row["name"]]
        same = "the same trial as" if row["key"] and row["key"] == counts["key"] else f"{row['name']} again, as in"
        problems.append(Problem(row["where"], f"{same} {counts['where']}, which is used", "duplicate"))
    return first_ones.sort_index().reset_index(drop=True), problems


def _of_rows(rows: pd.DataFrame, source: Mapping[str, Any] | None) -> list[Problem]:
    """Return what is wrong with single rows, and which columns are empty in all; not those of tasks that `source` does not ask
    for."""
    complete = rows[rows["success"]]
    asked = ZERO_SHOT_TASKS if source is None else source["protocol"]["tasks"]
    unasked = {f"acc_{task}" for task in ZERO_SHOT_TASKS if task not in asked}
    checked = [name for name in _CHECKED if name not in unasked]
    empty = [name for name in checked if complete[name].isna().all()]
    problems = [Problem("", f"no row has {', '.join(empty)}")] if len(complete) and empty else []
    gradients = [name for name in checked if name.startswith("grad_")]
    # A method of which no trial has any took no gradients: they are not missing.
    taken = set(complete.loc[complete[gradients].notna().any(axis=1), "method"])
    values = rows[checked].astype("float64")
    finite = np.isfinite(values) | np.isin(checked, empty)
    finite.loc[~rows["method"].isin(taken), gradients] = True
    for index, row in rows[~rows["success"] | ~finite.all(axis="columns")].iterrows():
        if row["success"]:
            wrong = values.loc[index][~finite.loc[index]]
            what = ", ".join(f"{name} is {value}" for name, value in wrong.items())
            what += ": it is not compared" if "acc_mean" in wrong else ""
        else:
            reason, ended = row["reason"], row["status"].replace("_", " ")
            what = reason if reason.startswith("stopped") else f"{ended}: {reason}" if reason else ended
        what = f"{row['name']}: {what}"
        problems.append(Problem(row["where"], what, "not_finite" if row["success"] else row["status"]))
    return problems
