"""Reads an experiment folder in any state, as a part of each `Model`.

Whatever is left counts: what is damaged or missing is a `Problem`, and the rest is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.input.rows import VERSIONS, frame
from tune_prune.analysis.input.study import Model, Problem
from tune_prune.core.config import ModelRun, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.ledger import Ledger, read_about, read_baselines, read_costs, stranger
from tune_prune.core.records import TrialRecord
from tune_prune.core.speed_records import readable_speeds
from tune_prune.core.store import BASELINES, COST, EXPERIMENT, ITEMS, LEDGER, RESULTS, Location, Store, open_store
from tune_prune.core.validation import validated


def is_experiment(folder: Location) -> bool:
    """Return whether something of an experiment is there."""
    store = open_store(folder)
    return LEDGER in store.folders() or any(map(store.has, (EXPERIMENT, BASELINES)))


def read_experiment(folder: Location) -> tuple[list[Model], Mapping[str, Any], Mapping[str, Any]]:
    """The rows of each model of the experiment, and its experiment.json and cost.json: empty where they cannot be read."""
    store = open_store(folder)
    lost: list[Problem] = []  # of no model in particular
    about, cost = _about(store, lost), _cost(store, lost)
    baselines = _baselines(store, about, lost)
    rows = frame(_records(Ledger(store), about, lost), folder)
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
    """The `rows` (`rows.frame`) of each model of the experiment in `folder`, with what its experiment.json (`about`) and the
    dense models' records by label tell, and what was `lost` of it."""
    listed = about.get("models")
    models = {k: entry for k, entry in listed.items() if isinstance(entry, dict)} if isinstance(listed, dict) else {}
    parts = []
    for label in dict.fromkeys([*models, *rows["model"], *baselines]):
        entry, dense = models.get(label, {}), baselines.get(label)
        trials = rows[rows["model"] == label].reset_index(drop=True)
        trials["where"] = [f"trial {key} of {folder}" for key in trials["key"]]
        try:  # what it takes to run the model's trials again, if experiment.json still holds all of it
            run = validated(ModelRun, entry.get("run"))
        except ValueError:
            run = None
        # The key that the dense model has or would have is a hash of all that two trials must share to be compared
        measured, meaning = dense.key if dense else None, entry.get("meaning")
        if dense is None and run is not None and isinstance(meaning, dict) and {"model", "data"} <= set(meaning):
            measured = trial_key(None, meaning["model"], meaning["data"], run)
        problems = [*lost, *_missing(folder, trials, about, entry)]
        if dense is None and open_store(folder).has(BASELINES):
            problems.append(
                Problem(
                    str(folder),
                    f"{BASELINES} has no original model, so accuracy retained is unknown: run the search again to measure it",
                )
            )
        metrics, source = dense.metrics if dense else {}, run.to_dict() if run else None
        by = {} if dense is None else {name: getattr(dense, name) for name in VERSIONS}
        part = Model(
            *(label, trials, metrics, source, entry.get("perplexity_window"), (folder,), tuple(problems)),
            measured=measured,
            seedless=tuple(entry.get("seedless", ())),
            text=entry.get("perplexity_text"),
            baseline_by=by,
        )
        parts.append(part)
    return parts


def _damaged(error: DamagedFile) -> Problem:
    return Problem(str(error.path), f"it is {error.what}")


def _about(store: Store, lost: list[Problem]) -> dict[str, Any]:
    """experiment.json; nothing, and a reason among what is lost, where there are no records that it is needed for. Raises UserError
    where there are: it is not known whether they were measured alike."""
    try:
        about = read_about(store)
        what = "it is missing"
    except DamagedFile as error:
        about, what = None, f"it is {error.what}"
    if about is None and store.names(LEDGER):
        raise UserError(
            f"{store.path(EXPERIMENT)} says how the trials beside it were measured, and {what}; restore it from a copy, or analyse "
            f"the table of the last search alone: --csv NAME={store.path(RESULTS)}"
        )
    if about is None:
        lost.append(
            Problem(str(store.path(EXPERIMENT)), f"{what}: what was planned, and how it was measured, is unknown")
        )
    return about or {}


def _cost(store: Store, lost: list[Problem]) -> dict[str, Any]:
    """cost.json; nothing where it is missing or, with a reason among what is lost, damaged."""
    try:
        values = read_costs(store) or {}
        validated(dict[str, int], {name: n for name, n in values.items() if re.fullmatch(r"(?!shared).*_passes", name)})
    except DamagedFile as error:
        lost.append(_damaged(error))
    except ValueError as error:
        lost.append(Problem(str(store.path(COST)), f"it is not an account of costs ({error})"))
    else:
        return values
    return {}


def _baselines(store: Store, about: Mapping[str, Any], lost: list[Problem]) -> dict[str, TrialRecord]:
    """The dense models' records by label; a record that is damaged or of another search is lost, and says why."""
    path = store.path(BASELINES)
    try:
        dense = read_baselines(store)
    except DamagedFile as error:
        lost.append(_damaged(error))
        return {}
    if not dense:
        lost.append(
            Problem(
                str(path),
                "it is missing, so what the original model scores is unknown: run the search again to measure it",
            )
        )
    baselines = {}
    for label, record in dense.items():
        if other := stranger(record, about):
            lost.append(Problem(str(path), f"it is {other}"))
        else:
            baselines[label] = record
    return baselines


def _records(ledger: Ledger, about: Mapping[str, Any], lost: list[Problem]) -> list[TrialRecord]:
    """The records that can be read and are of the experiment; a file that is not is lost, and says why."""
    readable, damaged = ledger.readable()
    lost += map(_damaged, damaged)
    others = {record.key: what for record in readable if (what := stranger(record, about))}
    lost += [Problem(str(ledger.path(key)), f"it is {what}") for key, what in others.items()]
    return [record for record in readable if record.key not in others]


def _missing(folder: Location, rows: pd.DataFrame, about: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Problem]:
    """Return what the search was to try and has no record of, and trials that lost their files."""
    problems = []
    planned, keys = entry.get("trial_keys"), set(rows["key"])
    if isinstance(planned, dict):
        missing = sorted(name for key, name in planned.items() if key not in keys)
        adaptive = about.get("search") == "optuna"  # it plans how many, not which
        count = about.get("num_trials") if adaptive else len(planned)
        count = count if isinstance(count, int) else len(planned)
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
