"""Reads an all_methods_results.csv: ours, a published one or one like it. What is wrong is named by line and column."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.rows import ACCURACIES, INTEGERS, TASK_ITEMS, TEXTS, config_of, typed
from tune_prune.core.config import ZERO_SHOT_TASKS, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.store import RESULTS

_MISSING = ("", "nan", "na", "n/a", "none", "null", "<na>", "-")
_BOOLEANS = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}
_METHOD = re.compile(r"(?:^|[/_-])(taylor|layerwise|blockwise|random)(?=[/_-]|$)")
_KNOB = {name: re.compile(rf"{name}[_=]?(\d+)") for name in ("taylor_seq_len", "taylor_num_samples")}
_DENSE = ("dense", "unpruned", "baseline")  # as pruning_method: the model before it was pruned


@dataclass(frozen=True)
class ResultsFile:
    """What a results file holds."""

    rows: pd.DataFrame  # as `rows.frame` gives them
    lines: list[int]  # of each row in the file
    baseline: dict[str, float] = field(default_factory=dict)  # metrics of the dense model, where a row gives them
    notes: tuple[str, ...] = ()  # what a reader must know of how the file was read


def read_results_csv(path: Path, model: str | None) -> ResultsFile:
    """The trials of the results file `path`, under the label `model` (None: as its column `model` says).

    Published files may lack columns. taylor_seq_len, taylor_num_samples and pruning_method are then read from the name
    of output_dir (`search_Llama_layerwise_20/exp_001_taylor_seq_len16_taylor_num_samples128`). They keep the measured
    fraction in pruning_ratio: what was asked is that to two decimals, and the same for rows that fall short of it by
    less than 0.02. A row whose pruning_method is dense, unpruned or baseline is the model before pruning.

    Where there are no standard errors they are the binomial ones, sqrt(p (1 - p) / n) with the n of `rows.TASK_ITEMS`;
    that of acc_mean is the root of the sum of their squares, over the number of tasks.

    UserError, with line and column where there is one, if the file is no results file or a value cannot be.
    """
    header, lines, records = _cells(path)
    columns = {name: [record[index] for record in records] for index, name in enumerate(header)}
    table = _Table(path, lines, columns)
    notes: list[str] = []
    if "acc_mean" not in columns:
        if missing := [name for name in ("output_dir", *ACCURACIES[1:]) if name not in columns]:
            raise UserError(f"{path} has no column acc_mean ({', '.join(missing)}); name an {RESULTS}")
        notes.append("it has no acc_mean: the mean of its seven tasks was taken")
    rows = pd.DataFrame({name: table.column(name) for name in columns})
    if "acc_mean" not in rows:
        rows["acc_mean"] = rows[list(ACCURACIES[1:])].mean(axis=1, skipna=False)
    _name_model(path, rows, model)
    if "success" not in rows:
        rows["success"] = rows["acc_mean"].notna()
    if "pruning_method" not in rows:
        notes.append("it has no pruning_method: the methods are those that output_dir names")
    rows["pruning_method"], assumed = table.methods(rows)
    if assumed:
        notes.append(f"{assumed} rows name no method, only its hyperparameters: taken for taylor")
    dense = rows["pruning_method"].str.lower().isin(_DENSE)
    baseline = _baseline(rows[dense])
    kept = np.flatnonzero(~dense)
    rows, table.lines = rows.iloc[kept].reset_index(drop=True), [lines[index] for index in kept]
    for name in _KNOB:
        rows[name] = table.hyperparameter(rows, name)
    _ask_ratio(rows, notes)
    _add_stderrs(rows)
    _find_folders(path, rows)
    if "status" not in rows:
        rows["status"] = np.where(rows["success"], "complete", "failed")
    rows = typed(rows)
    table.check(rows)
    return ResultsFile(rows, table.lines, baseline, tuple(notes))


def _cells(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """Header, the line in which each record begins, and the records, which are all as long as the header."""
    lines, records = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if not any(header):
                raise UserError(f"{path} cannot be read as a CSV file (its first line is empty); name an {RESULTS}")
            if twice := [name for name in dict.fromkeys(header) if header.count(name) > 1]:
                raise UserError(f"{path}, line 1 names the column {twice[0]!r} twice; keep one")
            line = reader.line_num + 1
            for record in reader:
                if any(cell.strip() for cell in record):
                    if len(record) != len(header):
                        raise UserError(
                            f"{path}, line {line} has {len(record)} columns and the first line {len(header)}; correct it"
                        )
                    lines.append(line)
                    records.append(record)
                line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num} cannot be read as CSV ({error}); correct it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a CSV file ({error}); name an {RESULTS}") from error
    return header, lines, records


@dataclass
class _Table:
    """The cells of a file and where they stand, for errors."""

    path: Path
    lines: list[int]
    cells: Mapping[str, list[str]]

    def wrong(self, index: int, column: str, what: str) -> UserError:
        return UserError(f"{self.path}, line {self.lines[index]}, column {column}: {what}; correct it")

    def column(self, name: str) -> list[Any]:
        """The values of a column in its type; a column that we do not know is numbers if it can be."""
        cells = [cell.strip() for cell in self.cells[name]]
        if name in TEXTS:
            return [None if cell == "" else cell for cell in cells]
        if name == "success":
            return [self._success(index, cell) for index, cell in enumerate(cells)]
        known = name in INTEGERS or name.startswith(("acc_", "grad_")) or name in _NUMBERS
        try:
            values = [math.nan if cell.lower() in _MISSING else float(cell) for cell in cells]
        except ValueError:
            if not known:
                return cells
            index = next(i for i, cell in enumerate(cells) if cell.lower() not in _MISSING and not _is_number(cell))
            raise self.wrong(index, name, f"{cells[index]!r} is not a number") from None
        for index, value in enumerate(values):
            if name in INTEGERS and not math.isnan(value) and not value.is_integer():
                raise self.wrong(index, name, f"{cells[index]!r} is not a whole number")
            if (
                name.startswith("acc_")
                and not name.endswith("_stderr")
                and math.isfinite(value)
                and not 0 <= value <= 1
            ):
                raise self.wrong(index, name, f"{cells[index]!r} is not from 0 to 1 (accuracies are fractions)")
        return values

    def _success(self, index: int, cell: str) -> bool:
        if cell == "":
            return bool(self.cells.get("acc_mean", [""] * len(self.lines))[index].strip())
        if cell.lower() not in _BOOLEANS:
            raise self.wrong(index, "success", f"{cell!r} is neither True nor False")
        return _BOOLEANS[cell.lower()]

    def methods(self, rows: pd.DataFrame) -> tuple[pd.Series, int]:
        """The method of each row: its column, else the last method that output_dir names, else, where it names
        these alone, taylor, as in the first published grids; and the number of the last."""
        given = rows["pruning_method"] if "pruning_method" in rows else [None] * len(rows)
        folders = rows["output_dir"] if "output_dir" in rows else [None] * len(rows)
        methods: list[str] = []
        assumed = 0
        for index, (method, folder) in enumerate(zip(given, folders, strict=True)):
            if not isinstance(method, str) and isinstance(folder, str):
                rest = re.sub(r"taylor_(seq_len|num_samples)", "", folder)
                named = _METHOD.findall(rest)
                method = named[-1] if named else "taylor" if rest != folder else None
                assumed += not named and method is not None
            if not isinstance(method, str):
                raise self.wrong(index, "pruning_method", "it is missing, and output_dir names no method")
            methods.append(method)
        return pd.Series(methods, index=rows.index, dtype="str"), assumed

    def hyperparameter(self, rows: pd.DataFrame, name: str) -> list[float]:
        given = rows[name] if name in rows else [math.nan] * len(rows)
        folders = rows["output_dir"] if "output_dir" in rows else [""] * len(rows)
        values = []
        for index, (value, folder) in enumerate(zip(given, folders, strict=True)):
            if math.isnan(value):
                found = _KNOB[name].search(folder) if isinstance(folder, str) else None
                if found is None:
                    raise self.wrong(index, name, f"it is missing, and output_dir does not name it as {name}64")
                value = float(found[1])
            values.append(value)
        return values

    def check(self, rows: pd.DataFrame) -> None:
        """Every row has a configuration that can be, and a status that is one."""
        for index, (_, row) in enumerate(rows.iterrows()):
            try:
                config_of(row)
            except UserError as error:
                raise UserError(f"{self.path}, line {self.lines[index]}: {error}") from error
            if (
                row["status"] not in ("complete", "failed", "stopped_early")
                or (row["status"] == "complete") != row["success"]
            ):
                raise self.wrong(index, "status", f"{row['status']!r} does not go with success {bool(row['success'])}")


_NUMBERS = ("ppl", "pruning_ratio", "removed_fraction", "elapsed_time")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _name_model(path: Path, rows: pd.DataFrame, model: str | None) -> None:
    if model is None:
        if "model" not in rows or rows["model"].isna().any():
            raise UserError(f"{path} does not say of which model it is; name it, as in --csv Llama={path}")
        return
    named = sorted(set(rows["model"].dropna())) if "model" in rows else []
    if len(named) > 1:
        raise UserError(
            f"{path} holds {len(named)} models ({', '.join(named)}), and --csv gives it to one; name its experiment folder"
        )
    rows["model"] = model


def _baseline(dense: pd.DataFrame) -> dict[str, float]:
    if dense.empty:
        return {}
    _add_stderrs(dense := dense.copy())
    names = [name for name in dense if name.startswith("acc_") or name in ("ppl", "params_count")]
    return {name: float(dense.iloc[0][name]) for name in names if not pd.isna(dense.iloc[0][name])}


def _ask_ratio(rows: pd.DataFrame, notes: list[str]) -> None:
    """Fill pruning_ratio with what was asked and removed_fraction with what was measured."""
    if "pruning_ratio" not in rows:
        rows["pruning_ratio"] = math.nan
    if "removed_fraction" not in rows:
        rows["removed_fraction"] = measured = rows["pruning_ratio"]
        usual = measured.round(2).mode()
        if len(usual):
            near = (measured - usual.iloc[0]).abs() < 0.02
            rows["pruning_ratio"] = measured.round(2).where(~near, usual.iloc[0])
    if rows["pruning_ratio"].isna().any():
        usual = rows["pruning_ratio"].mode()
        if usual.empty and len(rows):
            notes.append(f"it gives no pruning_ratio: {PruningConfig.pruning_ratio} is assumed")
        rows["pruning_ratio"] = rows["pruning_ratio"].fillna(
            usual.iloc[0] if len(usual) else PruningConfig.pruning_ratio
        )


def _add_stderrs(rows: pd.DataFrame) -> None:
    """Binomial standard errors, where the file has no column for them."""
    for task, items in TASK_ITEMS.items():
        name = f"acc_{task}"
        if name in rows and f"{name}_stderr" not in rows:
            rows[f"{name}_stderr"] = np.sqrt(rows[name] * (1 - rows[name]) / items)
    columns = [f"acc_{task}_stderr" for task in ZERO_SHOT_TASKS]
    if "acc_mean_stderr" not in rows and set(columns) <= set(rows):
        squares = rows[columns].astype("float64") ** 2
        rows["acc_mean_stderr"] = np.sqrt(squares.sum(axis=1, skipna=False)) / len(columns)


def _find_folders(path: Path, rows: pd.DataFrame) -> None:
    """Trial folders are written relative to the file by us; they are left as they are where none is there."""
    if "output_dir" in rows:
        rows["output_dir"] = [
            (path.parent / name).as_posix() if isinstance(name, str) and (path.parent / name).is_dir() else name
            for name in rows["output_dir"]
        ]
