"""Reads an all_methods_results.csv: ours, a published one or one like it. What is wrong is named by line and column."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import ACCURACIES, CALIBRATION, COLUMNS, INTEGERS, TEXTS, from_cell, typed
from tune_prune.analysis.input.study import Model, Problem, tasks_of
from tune_prune.core.config import TASK_ITEMS, ZERO_SHOT_TASKS, PruningConfig, check_label
from tune_prune.core.errors import UserError
from tune_prune.core.files import is_too_long, utf8_text
from tune_prune.core.hyperparameters import OLDER_NAMES
from tune_prune.core.measures import wilson_stderr
from tune_prune.core.store import RESULTS, TRIALS, Location, is_address, open_file

_LARGEST_WHOLE = 2**53  # beyond it a float is not one whole number
_LARGEST = 1e100  # beyond it figures have no ticks
_MISSING = ("", "nan", "na", "n/a", "none", "null", "<na>", "-")
_SUCCESS: dict[str, bool | None] = dict.fromkeys(("true", "1", "1.0", "yes"), True)
_SUCCESS |= dict.fromkeys(("false", "0", "0.0", "no"), False) | {"": None}
_OPTIONAL = ("model", "success", "method", *CALIBRATION, "output_dir", "pruning_ratio")  # known otherwise, too
_METHOD = r"^(?:.*[/_-])?(taylor|layerwise|blockwise|random)(?=[/_-]|$)"  # the last that a folder names
_NAMES = OLDER_NAMES | {"perplexity": "ppl"}
_DECIMAL_POINT, _DECIMAL_COMMA = re.compile(r"-?\d*\.\d+(e[+-]?\d+)?", re.I), re.compile(r"-?\d+,\d+(e[+-]?\d+)?", re.I)
_MEAN_ROUNDED = 1.5e-3  # what accuracies of three digits leave open of their mean, at most
_DENSE = ("dense", "unpruned", "baseline")  # as method: the model before it was pruned


def read_results_csv(path: Location, model: str | None) -> Model:
    """Return the trials of the results file `path`, under the label `model` (None: as its column `model` says).

    Columns may have their older names (OLDER_NAMES), as published files have them. Those may also lack some:
    seq_len, num_samples and method are then read from the name of output_dir
    (`search_Llama_layerwise_20/exp_001_taylor_seq_len16_taylor_num_samples128`). They keep the measured fraction in
    pruning_ratio: what was asked is that to two decimals, and the same for rows that fall short of it by less than 0.02.
    A row whose method is dense, unpruned or baseline is the model before pruning.

    Where there are no standard errors they are the binomial ones, sqrt(p (1 - p) / n) with the n of `core.config.TASK_ITEMS`;
    that of acc_mean is the root of the sum of their squares, over the number of tasks.

    UserError, with line and column where there is one, if the file is no results file or a value cannot be.
    """
    cells = _cells(path)
    notes = []
    if "acc_mean" not in cells:
        if missing := [name for name in ACCURACIES[1:] if name not in cells]:
            raise UserError(
                f"{path} has no column acc_mean, nor all that it is the mean of (no {', '.join(missing)}); its columns are "
                f"{', '.join(map(repr, cells))}: name one of them acc_mean, or name an {RESULTS}"
            )
        notes.append("it has no column acc_mean: the mean of its seven tasks is used")
    if "method" not in cells:
        notes.append("it has no column method: methods are read from the names in output_dir")
    cells = cells.reindex(columns=[*cells, *(name for name in _OPTIONAL if name not in cells)], fill_value="")
    rows = pd.DataFrame({name: _values(path, cells[name]) for name in cells})
    if "acc_mean" not in rows:
        rows["acc_mean"] = rows[list(ACCURACIES[1:])].mean(axis=1, skipna=False)
    ended = rows["status"] == "complete" if "status" in rows else rows["acc_mean"].notna()
    if not {"status", "reason"} & set(rows):
        rows["reason"] = np.where(rows["success"].isna() & ~ended, "it has no acc_mean", "")
    rows["success"] = rows["success"].where(rows["success"].notna(), ended)
    _name_model(path, rows, model)
    if assumed := _name_methods(path, rows):
        notes.append(f"{assumed} rows name no method, only its hyperparameters: taylor is assumed")
    _check_means(rows, notes.append)
    binomial = _add_stderrs(rows)
    dense = rows["method"].str.lower().isin(_DENSE)
    measured = [name for name in rows if name.startswith("acc_") or name in ("ppl", "params_count")]
    baseline: dict[str, float] = rows.loc[dense, measured].iloc[0].dropna().to_dict() if dense.any() else {}
    rows = rows[~dense].copy()
    for name in CALIBRATION:
        named = rows["output_dir"].str.extract(rf"{name}[_=]?(\d+)", expand=False)
        rows[name] = rows[name].fillna(named.astype("float64"))
        _require(path, rows, name, f"does not name it, as in {name}64")
    if len(rows) and rows["pruning_ratio"].isna().all():
        notes.append(f"it gives no pruning_ratio: {PruningConfig.pruning_ratio} is assumed")
    _ask_ratio(rows)
    rows["output_dir"] = [_trial_folder(path.parent, name) for name in rows["output_dir"]]
    if "status" not in rows:
        rows["status"] = np.where(rows["success"], "complete", "failed")
    rows = typed(rows, lambda line: f"{path}, line {line}")
    for line, status, success in zip(rows.index, rows["status"], rows["success"], strict=True):
        if status not in ("complete", "failed", "stopped_early") or (status == "complete") != success:
            raise _wrong(path, line, "status", f"{status!r} does not go with success {success}")
    problems = [Problem(str(path), note, "note") for note in notes]
    if rows.empty:
        problems.append(Problem(str(path), "it has no rows"))
    rows = rows.assign(where=[f"line {line} of {path}" for line in rows.index]).reset_index(drop=True)
    return Model(
        *(model or "", rows, baseline, None, None, (path,), tuple(problems), "published", binomial),
        measured=f"csv {model}",
    )


def _check_means(rows: pd.DataFrame, note: Callable[[str], None]) -> None:
    """Note where acc_mean is the mean neither of all tasks of a row nor of the seven; of some of these nothing can be said."""
    tasks = [f"acc_{task}" for task in tasks_of(rows) if rows[f"acc_{task}"].notna().any()]
    seven = [name for name in tasks if name in ACCURACIES]
    if 0 < len(seven) < len(ZERO_SHOT_TASKS):
        return
    means = [rows[names].mean(axis=1, skipna=False) for names in (tasks, seven)]
    apart = pd.concat([(rows["acc_mean"] - mean).abs() for mean in means], axis=1).min(axis=1) > _MEAN_ROUNDED
    if apart.any():
        line = apart.idxmax()
        values = f"line {line}: {rows.loc[line, 'acc_mean']:g}, and {means[0][line]:.4g} by its tasks"
        note(
            f"acc_mean of {apart.sum()} of {len(rows)} rows is not the mean of their tasks ({values}); it is taken as it is"
        )


def _trial_folder(folder: Location, name: object) -> object:
    """Return the folder of a trial, which we name relative to the file; a foreign name is left as it is. No address is followed
    that a file names, and none that no folder can have."""
    if not isinstance(name, str):
        return name
    if is_address(name) or is_too_long(name) or "\0" in name:
        return ""
    ours = (folder / name).is_dir() if isinstance(folder, Path) else name.startswith(f"{TRIALS}/")
    return (folder / name).as_posix() if ours else name


def _cells(path: Location) -> pd.DataFrame:
    """Return the text of every cell, without blanks around it; the index says in which line of the file each row begins.

    Columns are separated by what separates the names in the first line: commas, semicolons or tabs. Decimal commas are points
    where no column that must be numbers has a point. Columns without a name, as that of row numbers which pandas writes, are left
    out.
    """
    records, line = {}, 1
    try:
        with open_file(path) as file:
            text = utf8_text(file.read(), path, newline="")
        separator = max(",;\t", key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
        for record in reader:
            records[line] = [from_cell(cell.strip()) for cell in record]
            line = 1 + reader.line_num
    except csv.Error as error:
        raise UserError(f"{path}, line {line} cannot be read as CSV ({error}); correct it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read as a CSV file ({error}); name an {RESULTS}") from error
    header = records.pop(1, [])
    if not any(header):
        raise UserError(f"{path} cannot be read as a CSV file (its first line is empty); name an {RESULTS}")
    header = [_NAMES[name] if _NAMES.get(name, name) not in header else name for name in header]
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{path}, line 1 names the column {twice[0]!r} twice; keep one")
    records = {line: cells for line, cells in records.items() if any(cells)}
    for line, record in records.items():
        if len(record) != len(header):
            raise UserError(
                f"{path}, line {line} has {len(record)} columns and the first line {len(header)}; correct it (a number has a "
                "decimal point; a text with a comma stands in quotes)"
            )
    cells = pd.DataFrame.from_dict(records, orient="index", columns=header, dtype="object")
    cells = cells[[name for name in cells if name]]
    numbers = cells[[name for name in cells if _is_number(name)]]
    if numbers.map(_DECIMAL_POINT.fullmatch).notna().to_numpy().any():
        return cells
    return cells.map(lambda cell: cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell)


def _wrong(path: Location, line: object, column: str, what: str) -> UserError:
    return UserError(f"{path}, line {line}, column {column}: {what}; correct it")


def _is_number(name: str) -> bool:
    """Return whether a column must be numbers."""
    return name not in TEXTS and (name in COLUMNS or name.startswith("acc_"))


def _values(path: Location, cells: pd.Series) -> pd.Series:
    """Return a column in its type, None or NaN where a cell is empty; a column that we do not know is numbers if it can be."""
    name = str(cells.name)
    if name in TEXTS:
        return cells.where(cells != "", None).astype("str")
    accuracy = name.startswith("acc_") and not name.endswith("_stderr")
    values: list[float | bool | None] = []
    for line, cell in cells.items():
        if name == "success":
            if cell.lower() not in _SUCCESS:
                raise _wrong(path, line, name, f"{cell!r} is neither True nor False")
            values.append(_SUCCESS[cell.lower()])
            continue
        try:
            value = math.nan if cell.lower() in _MISSING else float(cell)
        except ValueError:
            if not _is_number(name):
                return cells.astype("str")
            raise _wrong(path, line, name, f"{cell!r} is not a number") from None
        if name in INTEGERS and not (math.isnan(value) or (value.is_integer() and abs(value) <= _LARGEST_WHOLE)):
            raise _wrong(path, line, name, f"{cell!r:.60} is not a whole number of up to {_LARGEST_WHOLE:,}")
        if math.isfinite(value) and abs(value) > _LARGEST:
            raise _wrong(path, line, name, f"{cell!r:.60} is beyond {_LARGEST:g}, which nothing here measures")
        if accuracy and math.isfinite(value) and not 0 <= value <= 1:
            raise _wrong(path, line, name, f"{cell!r} is not from 0 to 1 (accuracies are fractions)")
        values.append(value)
    return pd.Series(values, cells.index, dtype="object" if name == "success" else "float64")


def _require(path: Location, rows: pd.DataFrame, name: str, otherwise: str) -> None:
    if rows[name].isna().any():
        raise _wrong(path, rows[name].isna().idxmax(), name, f"it is missing, and output_dir {otherwise}")


def _name_model(path: Location, rows: pd.DataFrame, model: str | None) -> None:
    named = sorted(set(rows["model"].dropna()))
    if model is None and rows["model"].isna().any():
        raise UserError(f"{path} has no column model, or rows without one; name the model, as in --csv Llama={path}")
    if model is not None and len(named) > 1:
        raise UserError(
            f"{path} holds {len(named)} models ({', '.join(named)}), and --csv MODEL=PATH is for one; give "
            "its experiment folder instead"
        )
    for name in named:
        check_label(name, f"the model of {path}")
    rows["model"] = rows["model"] if model is None else model


def _name_methods(path: Location, rows: pd.DataFrame) -> int:
    """Fill method: its column, else the last method that output_dir names, else, where it names hyperparameters
    alone, taylor, as in the first published grids. Return the number of these."""
    folders = rows["output_dir"].fillna("")
    rest = folders.str.replace(r"taylor_(seq_len|num_samples)", "", regex=True)
    methods = rows["method"].fillna(rest.str.extract(_METHOD, expand=False))
    assumed = methods.isna() & (rest != folders)
    rows["method"] = methods.mask(assumed, "taylor")
    _require(path, rows, "method", "names no method")
    return int(assumed.sum())


def _add_stderrs(rows: pd.DataFrame) -> bool:
    """Add binomial standard errors, where the file has no column for them; of 0 and 1 those of Wilson's interval. Return whether
    any were made."""
    made = False
    for task, items in TASK_ITEMS.items():
        name = f"acc_{task}"
        if name in rows and f"{name}_stderr" not in rows:
            made, binomial = True, np.sqrt(rows[name] * (1 - rows[name]) / items)
            rows[f"{name}_stderr"] = binomial.mask(rows[name].isin([0, 1]), wilson_stderr(items))
    columns = [f"acc_{task}_stderr" for task in ZERO_SHOT_TASKS]
    if "acc_mean_stderr" not in rows and set(columns) <= set(rows):
        squares = rows[columns].astype("float64") ** 2
        rows["acc_mean_stderr"] = np.sqrt(squares.sum(axis=1, skipna=False)) / len(columns)
    return made


def _ask_ratio(rows: pd.DataFrame) -> None:
    """Fill pruning_ratio with what was asked and removed_fraction with what was measured."""
    if "removed_fraction" not in rows:
        rows["removed_fraction"] = measured = rows["pruning_ratio"]
        usual = measured.round(2).mode().get(0, math.nan)
        short = (usual - measured).between(0, 0.02, inclusive="left")
        rows["pruning_ratio"] = measured.round(2).mask(short, usual)
    rows["pruning_ratio"] = rows["pruning_ratio"].fillna(
        rows["pruning_ratio"].mode().get(0, PruningConfig.pruning_ratio)
    )
