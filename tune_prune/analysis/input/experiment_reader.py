"""Reads one input of an analysis, an experiment folder in any state or a results file, as the `ModelRows` of each model.

Of an experiment whatever is left counts: what is damaged or missing is a `Problem`, and the rest is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from tune_prune.analysis.input.results_csv import read_results_csv
from tune_prune.analysis.input.rows import frame
from tune_prune.analysis.input.study import Problem
from tune_prune.core.config import PROTOCOL_VERSION, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import digest
from tune_prune.core.ledger import Ledger, parse_record
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import BASELINES, COST, EXPERIMENT, ITEMS, LEDGER, RESULTS, FolderStore

_TELLS = {
    EXPERIMENT: "what was planned, and how it was measured,",
    BASELINES: "what the dense model scores",
}


@dataclass
class ModelRows:
    """The trials of one model from one experiment or file."""

    label: str
    measured: str | None  # equal for what was measured alike: a key; None if that is lost
    rows: pd.DataFrame  # as `rows.frame`, and `where`
    origin: Path
    baseline: Mapping[str, float] = field(default_factory=dict)
    source: Mapping[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)
    published: bool = False

    def note(self, what: str, kind: Literal["missing", "note"] = "missing", where: str = "") -> None:
        self.problems.append(Problem(self.label, where or str(self.origin), what, kind))


def is_experiment(folder: Path) -> bool:
    """Whether something of an experiment is there."""
    return (folder / LEDGER).is_dir() or any((folder / name).is_file() for name in (EXPERIMENT, BASELINES))


def read_published(path: Path, label: str) -> ModelRows:
    """The trials of a results file under that label. UserError if it cannot be read."""
    file = read_results_csv(path, label)
    part = ModelRows(label, f"csv {label}", file.rows, path, file.baseline, published=True)
    part.rows["where"] = [f"line {line} of {path}" for line in file.lines]
    for text in file.notes:
        part.note(text, "note")
    if file.rows.empty:
        part.note("it has no rows")
    return part


def read_experiment(
    folder: Path, experiments: dict[Path, Mapping[str, Any]], costs: dict[Path, Mapping[str, Any]]
) -> list[ModelRows]:
    """The rows of each model of the experiment, and its experiment.json and cost.json where they can be read."""
    lost: list[tuple[str, str]] = []  # where, what: of no model in particular
    store = FolderStore(folder)
    about = _object(store, EXPERIMENT, lost)
    if about:
        experiments[folder] = about
    if (folder / COST).is_file() and (cost := _object(store, COST, lost)):
        costs[folder] = cost
    baselines = _baselines(store, lost)
    records = _records(Ledger(store), lost)
    if not (folder / LEDGER).is_dir() and (folder / RESULTS).is_file():
        lost.append((str(folder / LEDGER), f"it is missing: the trials are those of {RESULTS}"))
        try:
            rows = read_results_csv(folder / RESULTS, None).rows
        except UserError as error:
            lost.append((str(folder / RESULTS), str(error)))
            rows = frame([], folder)
    else:
        rows = frame(records, folder)
    found = model_rows(folder, about, baselines, rows, lost)
    if not found:
        raise UserError(f"experiment {folder} holds no trial and names no model ({_joined(lost)}); name another folder")
    return found


def model_rows(
    folder: Path,
    about: Mapping[str, Any],
    baselines: Mapping[str, TrialRecord],
    rows: pd.DataFrame,
    lost: Sequence[tuple[str, str]] = (),
) -> list[ModelRows]:
    """The `rows` (`rows.frame`) of each model of the experiment in `folder`, with what its experiment.json (`about`) and the
    dense models' records by label tell, and what was `lost` of it (where, what)."""
    known = about.get("models")
    models: dict[str, Any] = {k: v for k, v in known.items() if isinstance(v, dict)} if isinstance(known, dict) else {}
    found = []
    for label in dict.fromkeys([*models, *rows["model"], *baselines]):
        own, entry = rows[rows["model"] == label].reset_index(drop=True), models.get(label, {})
        own["where"] = [f"trial {key} of {folder}" for key in own["key"]]
        dense = baselines.get(label)
        part = ModelRows(label, _measured(entry, dense), own, folder, dense.metrics if dense else {}, _source(entry))
        for where, what in lost:
            part.note(what, where=where)
        if dense is None and (folder / BASELINES).is_file():
            part.note(f"{BASELINES} has no dense model: nothing says what pruning has cost")
        _note_missing(part, about, entry)
        found.append(part)
    return found


def _joined(lost: list[tuple[str, str]]) -> str:
    return "; ".join(f"{where}: {what}" for where, what in lost) or "its ledger is empty"


def _object(store: FolderStore, name: str, lost: list[tuple[str, str]]) -> dict[str, Any]:
    """A JSON object; nothing, and a reason among what is lost, where it is missing or damaged."""
    try:
        values = store.read(name)
        if values is not None:
            return values
        lost.append((str(store.path(name)), f"it is missing: {_TELLS[name]} is unknown"))
    except DamagedFile as error:
        lost.append((str(error.path), f"it is {error.what}"))
    return {}


def _baselines(store: FolderStore, lost: list[tuple[str, str]]) -> dict[str, TrialRecord]:
    baselines = {}
    for label, values in _object(store, BASELINES, lost).items():
        try:
            baselines[label] = parse_record(values, store.path(BASELINES))
        except DamagedFile as error:
            lost.append((str(error.path), f"it is {error.what}"))
    return baselines


def _records(ledger: Ledger, lost: list[tuple[str, str]]) -> list[TrialRecord]:
    """The records that can be read; a file that cannot is lost, and says why."""
    readable, damaged = ledger.readable()
    lost += [(str(error.path), f"it is {error.what}") for error in damaged]
    records = []
    for record in readable:
        try:
            PruningConfig.from_dict(record.config)
            records.append(record)
        except (UserError, TypeError) as error:
            lost.append((str(ledger.path(record.key)), f"its configuration cannot be ({error})"))
    return records


def _source(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What it takes to run the model's trials again, if experiment.json still holds all of it."""
    given = entry.get("run")
    run: dict[str, Any] = given if isinstance(given, dict) else {}
    protocol = run.get("protocol")
    whole = (
        {f.name for f in fields(ModelRun)} <= set(run)
        and isinstance(protocol, dict)
        and {"tasks", "limit"} <= set(protocol)
    )
    return run if whole else None


def _measured(entry: Mapping[str, Any], dense: TrialRecord | None) -> str | None:
    """The key that the dense model has or would have: a hash of all that two trials must share to be compared."""
    if dense is not None:
        return dense.key
    meaning = entry.get("meaning")
    if not isinstance(meaning, dict) or not {"model", "data", "protocol", "seed", "dtype"} <= set(meaning):
        return None
    shared = {name: meaning[name] for name in ("model", "data", "seed", "dtype")}
    return digest({"config": {}, **shared, "protocol": meaning["protocol"] | {"version": PROTOCOL_VERSION}})


def _note_missing(part: ModelRows, about: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Name what the search was to try and has no record of, and trials that lost their files."""
    planned = entry.get("trial_keys")
    if isinstance(planned, dict):
        missing = [name for key, name in planned.items() if key not in set(part.rows["key"])]
        count = about.get("num_trials") if about.get("search") == "optuna" else len(planned)
        absent = (count if isinstance(count, int) else len(planned)) - (len(planned) - len(missing))
        if absent > 0:
            names = "" if about.get("search") == "optuna" else f": {', '.join(sorted(missing))}"
            part.note(f"{absent} of {count} configurations have no record yet{names}")
    complete = part.rows[part.rows["success"]]
    alone = [row for _, row in complete.iterrows() if not (Path(row["output_dir"]) / ITEMS).is_file()]
    if alone and len(alone) == len(complete):
        part.note("no trial has its items.parquet: configurations are compared by their standard errors alone")
    else:
        for row in alone:
            part.note("its items.parquet is missing: it is compared by its standard error alone", where=row["where"])
