"""The trials of a study as Optuna studies in an SQLite file: `analysis FOLDER --export-study study.db`.

One Optuna study per model (and pruning ratio), which maximises acc_mean or, of a search with another --objective, that. Complete
trials have it as their value; those that were stopped early are pruned, with what they had reached; failed ones are failed.
Everything else that is known of a trial is among its user attributes: ppl, the accuracy of every task, standard errors, sizes,
where it ran, why it failed.
"""

from __future__ import annotations

import math
import os
import sqlite3
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
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
    *(
        "name",
        "key",
        "status",
        "reason",
        "failure",
        "ppl",
        "acc_mean",
        "acc_mean_stderr",
        "params_count",
        "removed_fraction",
    ),
    *("elapsed_time", "peak_memory_bytes", "host", "device_name", "output_dir"),
)


def export_study(read: Callable[[], Study], path: Path, overwrite: bool = False) -> str:
    """Write the file, whole or not at all, and return what there is to say of it. UserError where it is there already, or cannot be
    written."""
    if path.exists() and not (overwrite and path.is_file()):
        step = "give --overwrite to replace it, or name another file" if path.is_file() else "name a file"
        raise UserError(f"--export-study {path} is there already; {step}")
    if path.exists() and path.open("rb").read(len(_SQLITE)) not in (_SQLITE, b""):
        raise UserError(f"--export-study {path} is no SQLite file, and only such a file is replaced; name another file")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"--export-study {path} cannot be written: {path.absolute().parent} is no folder; make it first"
        )
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
        counts = {
            label: _write(storage, label, model, _objective(study, model)) for label, model in study.models.items()
        }
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


def _objective(study: Study, model: Model) -> str:
    """Return what the searches of its trials looked for, if that is one thing; else accuracy."""
    settings = [study.experiments.get(origin, {}).get("settings") or {} for origin in model.origins]
    objectives = {setting.get("objective", "accuracy") for setting in settings}
    return objectives.pop() if len(objectives) == 1 else "accuracy"


def _write(storage: optuna.storages.RDBStorage, label: str, model: Model, objective: str) -> int:
    import optuna

    sign, columns = MEASURES[objective]
    direction = optuna.study.StudyDirection.MAXIMIZE if sign > 0 else optuna.study.StudyDirection.MINIMIZE
    study = optuna.create_study(storage=storage, study_name=label, direction=direction)
    with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
        study.set_metric_names(
            [columns[0] if len(columns) == 1 else objective]
        )  # or optuna-dashboard calls it Objective 0
    study.set_user_attr("dense", {name: _json(value) for name, value in model.baseline.items()})
    study.set_user_attr("origins", [str(origin) for origin in model.origins])
    distributions = _distributions(model.rows)
    accuracy = model.rows["acc_mean"]  # equal ones are one value, the highest of them
    rows = model.rows.assign(acc_mean=accuracy.groupby(compared(accuracy)).transform("max")).to_dict("records")
    parts = score_columns(model.rows, objective)
    for row in terminal.over(rows, f"study {label}", "trials"):
        study.add_trial(_trial(row, distributions, objective, parts))
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
    known = math.isfinite(value)
    stopped = values["status"] == "stopped_early"
    known_values = {k: _json(v) for k, v in values.items() if v not in (None, "") and k not in _NOT_ATTRIBUTES}
    listed = {*_ATTRIBUTES, *(f"acc_{task}" for task in tasks_of(values))}
    attributes = {name: value for name, value in known_values.items() if name in listed}
    attributes["more"] = {name: value for name, value in known_values.items() if name not in listed}
    complete = values["success"] and known
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE if complete else TrialState.PRUNED if stopped else TrialState.FAIL,
        value=value if complete else None,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs=attributes,
        intermediate_values={_items_scored(values): value} if stopped and known else {},
    )
    if started := values["started_at"]:
        try:
            begin = datetime.fromisoformat(started).astimezone().replace(tzinfo=None)  # Optuna's are local
            end = begin + timedelta(seconds=values["elapsed_time"] or 0)
            begin.astimezone(UTC), end.astimezone(UTC)  # as Optuna will
        except (ValueError, OverflowError) as error:
            raise UserError(
                f"{values['model']} {values['name']} has started_at {started!r:.60} and elapsed_time {values['elapsed_time']}, "
                "which are no times; correct its results file, or leave the two columns out"
            ) from error
        trial.datetime_start, trial.datetime_complete = begin, end
    return trial


def _items_scored(values: Mapping[str, Any]) -> int:
    """Return how many items a trial that was stopped early had answered, by its record; 0 where that is not there."""
    folder = location(values["output_dir"] or "")
    known = values["key"] and folder.parent.name == TRIALS  # else it is one of a published file
    record = Ledger(open_store(folder.parent.parent)).read(values["key"]) if known else None
    return max((stage.items_scored for stage in record.stages), default=0) if record is not None else 0


def _json(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
