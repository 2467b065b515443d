"""The trials of a study as Optuna studies in an SQLite file: `analysis FOLDER --export-study study.db`.

One Optuna study per model (and pruning ratio), which maximises acc_mean or, of a search with another --objective, that. Complete
trials have it as their value; those that were stopped early are pruned, with what they had reached; failed ones are failed.
Everything else that is known of a trial is among its user attributes.
"""

from __future__ import annotations

import math
import os
import sqlite3
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tune_prune.analysis.input.rows import compared, plain_value
from tune_prune.analysis.input.study import Model, Study, tasks_of
from tune_prune.analysis.statistics.rules import score_columns
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Whole
from tune_prune.core.ledger import Ledger
from tune_prune.core.measures import MEASURES, measured
from tune_prune.core.store import TRIALS, location, open_store

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_SQLITE = b"SQLite format 3\0"
_LOG_SCALE = 8  # the largest level over the smallest from which on an axis is logarithmic
_NOT_ATTRIBUTES = (*HYPERPARAMETERS, "configuration", "model", "success", "where", "started_at")
# Attributes of their own, beside the tasks' accuracies; all others are in one, `more`: Optuna takes a millisecond for each.
_ATTRIBUTES = (
    *("name", "key", "status", "reason", "failure", "ppl", "acc_mean", "acc_mean_stderr", "params_count"),
    *("removed_fraction", "elapsed_time", "peak_memory_bytes", "host", "device_name", "output_dir"),
)


def export_study(read: Callable[[], Study], path: Path, overwrite: bool = False) -> str:
    """Write the file, whole or not at all, and return what there is to say of it. UserError where it is there already, or cannot be
    written."""
    if path.exists() and not (overwrite and path.is_file()):
        step = "give --overwrite to replace it, or name another file" if path.is_file() else "name a file"
        raise UserError(f"--export-study {path} is there already; {step}")
    if path.exists() and path.open("rb").read(len(_SQLITE)) not in (_SQLITE, b""):
        raise UserError(f"--export-study {path} is no SQLite file, and only such a file is replaced; name another file")
    try:
        import optuna
    except ModuleNotFoundError as error:  # it is needed to search, not to look at results
        raise UserError(
            "--export-study needs the package optuna, which is not installed; pip install optuna"
        ) from error
    study = read()
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # or it announces every study on stderr
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        storage = optuna.storages.RDBStorage("sqlite:///:memory:")  # in a file every trial would wait for the disk
        counts = {label: _write(storage, label, model, study) for label, model in study.models.items()}
        with closing(sqlite3.connect(temporary)) as file, storage.engine.connect() as connection:
            connection.connection.driver_connection.backup(file)  # type: ignore[union-attr]
        storage.engine.dispose()
        os.replace(temporary, path)
    except (OSError, sqlite3.Error) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--export-study {path} cannot be written ({cause}); name another file") from error
    finally:
        optuna.logging.set_verbosity(verbosity)
        temporary.unlink(missing_ok=True)
    studies = "\n".join(f"study        {label}: {count:,} trials" for label, count in counts.items())
    return f"{studies}\nwrote        {path}\nview         optuna-dashboard sqlite:///{path}"


def _write(storage: optuna.storages.RDBStorage, label: str, model: Model, study: Study) -> int:
    import optuna

    # What the searches of its trials looked for, if that is one thing
    settings = [study.experiments.get(origin, {}).get("settings") or {} for origin in model.origins]
    objectives = {setting.get("objective", "accuracy") for setting in settings}
    objective = objectives.pop() if len(objectives) == 1 else "accuracy"
    sign, columns = MEASURES[objective]
    written = optuna.create_study(storage=storage, study_name=label, direction="maximize" if sign > 0 else "minimize")
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        # or optuna-dashboard calls it Objective 0
        written.set_metric_names([columns[0] if len(columns) == 1 else objective])
    written.set_user_attr("dense", {name: _json(value) for name, value in model.baseline.items()})
    written.set_user_attr("origins", [str(origin) for origin in model.origins])
    distributions = _distributions(model.rows)
    accuracy = model.rows["acc_mean"]  # equal ones are one value, the highest of them
    rows = model.rows.assign(acc_mean=accuracy.groupby(compared(accuracy)).transform("max")).to_dict("records")
    parts = score_columns(model.rows, objective)
    for row in terminal.over(rows, f"study {label}", "trials"):
        written.add_trial(_trial(row, distributions, objective, parts))
    return len(rows)


def _distributions(rows: pd.DataFrame) -> dict[str, BaseDistribution]:
    """Return a distribution for every hyperparameter, over the levels that were tried."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, BaseDistribution] = {}
    for name, hyperparameter in HYPERPARAMETERS.items():
        levels = sorted(plain_value(level) for level in rows[name].dropna().unique())
        if not levels:
            continue
        low, high = levels[0], levels[-1]
        if hyperparameter.kind.is_text:
            distributions[name] = CategoricalDistribution(levels)
        elif isinstance(hyperparameter.kind, Whole):
            distributions[name] = IntDistribution(low, high, log=0 < _LOG_SCALE * low <= high)
        else:
            distributions[name] = FloatDistribution(low, high)
    return distributions


def _trial(
    row: Mapping[Any, Any], distributions: Mapping[str, BaseDistribution], objective: str, parts: Sequence[str]
) -> optuna.trial.FrozenTrial:
    import optuna
    from optuna.trial import TrialState

    values = {str(name): plain_value(value) for name, value in row.items()}
    params = {name: values[name] for name in distributions if values[name] is not None}
    value = MEASURES[objective][0] * measured({k: v for k, v in values.items() if v is not None}, objective, parts)
    known, stopped = math.isfinite(value), values["status"] == "stopped_early"
    attributes = {k: _json(v) for k, v in values.items() if v not in (None, "") and k not in _NOT_ATTRIBUTES}
    listed = {*_ATTRIBUTES, *(f"acc_{task}" for task in tasks_of(values))} & {*attributes}
    more = {name: attributes[name] for name in attributes if name not in listed}
    complete = values["success"] and known
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE if complete else TrialState.PRUNED if stopped else TrialState.FAIL,
        value=value if complete else None,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs={name: attributes[name] for name in attributes if name in listed} | {"more": more},
        intermediate_values={_items_scored(values): value} if stopped and known else {},
    )
    if values["started_at"]:
        with suppress(ValueError, OverflowError):  # a results file may say anything
            begin = datetime.fromisoformat(values["started_at"]).astimezone().replace(tzinfo=None)  # Optuna's are local
            end = begin + timedelta(seconds=values["elapsed_time"] or 0)
            begin.astimezone(UTC), end.astimezone(UTC)  # as Optuna will
            trial.datetime_start, trial.datetime_complete = begin, end
    return trial


def _items_scored(values: Mapping[str, Any]) -> int:
    """Return how many items a trial that was stopped early had answered, by its record; 0 where that is not there."""
    folder = location(values["output_dir"] or "")
    known = values["key"] and folder.parent.name == TRIALS  # else it is one of a published file
    record = Ledger(open_store(folder.parent.parent)).read(values["key"]) if known else None
    return max((stage.items_scored for stage in record.stages), default=0) if record is not None else 0


def _json(value: Any) -> Any:
    """Return a value as JSON has it, which has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
