"""Trials as rows of a data frame: records in, one row per trial out; which rows are eligible, and how they are ranked."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.core.config import ZERO_SHOT_TASKS, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS, TRAINING_STEP_TOKENS
from tune_prune.core.kinds import Whole
from tune_prune.core.measures import ACCURACY_DIGITS
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import TRIALS, Location

ACCURACIES = ("acc_mean", *(f"acc_{task}" for task in ZERO_SHOT_TASKS))

CONTROL = "random"  # the method that prunes by chance: no part of what is said of methods that read samples

CALIBRATION = ("seq_len", "num_samples")  # what a gradient pass is made with; it serves every method

# The columns of the published results files, in their documented order (some by a newer name: OLDER_NAMES); ours follow.
PUBLISHED_COLUMNS = (
    *("model", "method", "seq_len", "num_samples", "output_dir", "ppl", *ACCURACIES),
    *("params_count", "pruning_ratio", "grad_mean_ratio", "grad_norm_ratio", "grad_std_ratio", "grad_max_ratio"),
    *("grad_mean_range", "grad_norm_range", "extreme_pruning_layers", "elapsed_time", "success"),
)
VERSIONS = ("torch_version", "transformers_version")  # of what has measured a row
_OWN = tuple(name for name in HYPERPARAMETERS if name not in PUBLISHED_COLUMNS)
# Texts, as the fields of a record.
_OF_RECORD = ("status", "reason", "failure", "key", "started_at", "host", "device_name", *VERSIONS, "method_code")
COLUMNS = (*PUBLISHED_COLUMNS, *_OWN, "removed_fraction", *(f"{name}_stderr" for name in ACCURACIES))
COLUMNS += (*_OF_RECORD, "peak_memory_bytes", "cpus", "gpus")
INTEGERS = tuple(name for name, row in HYPERPARAMETERS.items() if isinstance(row.kind, Whole))
INTEGERS += ("params_count", "extreme_pruning_layers", "peak_memory_bytes")
_LATER = {name: row.default for name, row in HYPERPARAMETERS.items() if row.later}  # of rows that do not have it
_OWN_TEXTS = tuple(name for name in _OWN if HYPERPARAMETERS[name].kind.is_text)
TEXTS = ("model", "method", "output_dir", *_OWN_TEXTS, *_OF_RECORD)


# What a spreadsheet would take for a formula (https://owasp.org/www-community/attacks/CSV_Injection), and what would read back as
# one that was made harmless.
_FORMULA = re.compile("'*[=+@\t\r\n-]")


def as_cell(value: Any) -> Any:
    """Return a value as a CSV file has it: a text that a spreadsheet would calculate begins with an apostrophe. Numbers stay
    numbers."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def from_cell(text: str) -> str:
    """Return the text that `as_cell` has made harmless; any other as it is."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def frame(records: Iterable[TrialRecord], experiment_dir: Location) -> pd.DataFrame:
    """Return one row per record: COLUMNS, `<stage>_duration_s`, every other metric by name, and its `configuration` (`typed`).

    Accuracies are fractions, elapsed_time is in seconds, pruning_ratio is what was asked and removed_fraction what was
    removed. What a record does not know is NaN. `success` is true for complete trials only.
    """
    return typed(pd.DataFrame([_row(record, experiment_dir) for record in records]))


def _row(record: TrialRecord, experiment_dir: Location) -> dict[str, Any]:
    durations: dict[str, float] = defaultdict(float)
    for stage in record.stages:  # zero_shot is there once per slice
        durations[f"{stage.stage}_duration_s"] += stage.duration_s
    fields = ("model", *_OF_RECORD, "peak_memory_bytes")
    return {
        **durations,
        **record.metrics,
        **({} if record.config is None else record.config.to_dict()),
        **{name: getattr(record, name) for name in fields},
        "output_dir": (experiment_dir / TRIALS / record.key).as_posix(),
        "elapsed_time": record.elapsed_time_s,
        "cpus": record.resources.get("cpu"),
        "gpus": record.resources.get("gpu"),
        "success": record.status == "complete",
    }


def typed(rows: pd.DataFrame, place: Callable[[Any], str] = "row {}".format) -> pd.DataFrame:
    """Return the rows with COLUMNS first, each in its one type, and their `configuration`: a PruningConfig each.

    What is missing is NaN, an empty text or, of what came later, its default. UserError for values that no configuration can
    have; `place` says where the row of an index stands.
    """
    rows = rows.reindex(columns=[*COLUMNS, *sorted(set(rows.columns) - set(COLUMNS))])
    types = dict.fromkeys(COLUMNS, "float64") | dict.fromkeys(INTEGERS, "Int64") | dict.fromkeys(TEXTS, "str")
    missing = dict.fromkeys(TEXTS, "") | {name: HYPERPARAMETERS[name].default or "" for name in _OWN_TEXTS}
    rows = rows.astype(types | {"success": "bool"}).fillna(missing | _LATER)
    configs = {}
    for index, values in rows[list(HYPERPARAMETERS)].to_dict("index").items():
        known = {str(name): plain_value(value) for name, value in values.items()}
        try:
            configs[index] = PruningConfig.from_dict(
                {k: value for k, value in known.items() if value not in (None, "")}
            )
        except UserError as error:
            raise UserError(f"{place(index)}: {error}") from error
    return rows.assign(configuration=pd.Series(configs, dtype="object"))


def ranked(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the eligible rows (complete, with a finite acc_mean), best first, with `tokens` (`calibration_tokens`); they have a
    `name`.

    Selection rule "accuracy": highest acc_mean; then lower perplexity (unknown: last), then fewer tokens, then the name.
    """
    rows = rows[rows["success"] & np.isfinite(rows["acc_mean"])]
    return best_first(rows.assign(tokens=calibration_tokens(rows)))


def calibration_tokens(rows: pd.DataFrame) -> pd.Series:
    """Return the tokens that making each model reads: seq_len x samples for the scores of every step, and those of a refit and of
    a training. A method that reads no samples counts as if it did."""
    scores = rows["seq_len"] * rows["num_samples"] * rows["steps"]
    refit = rows["refit_tokens"].where(rows["compensation"] != PruningConfig.compensation)
    training = TRAINING_STEP_TOKENS * rows["recovery_steps"].where(rows["recovery"] != PruningConfig.recovery)
    return scores + refit.fillna(0) + training.fillna(0)


def best_first(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows by selection rule "accuracy" (`ranked`)."""
    keys = pd.DataFrame({"accuracy": compared(rows["acc_mean"])}).join(rows[["ppl", "tokens", "name"]])
    return rows.loc[keys.sort_values(list(keys), ascending=[False, True, True, True]).index]


def compared(accuracies: pd.Series) -> pd.Series:
    """Return what accuracies are ordered by and told apart by: equal ones are equal here (`measures.comparable`)."""
    return accuracies.astype("float64").round(ACCURACY_DIGITS)


def without_draw(configuration: PruningConfig) -> PruningConfig:
    """Return a configuration without its draw: trials that differ in their seed alone have the same."""
    return replace(configuration, seed=None)


def plain_values(row: Mapping[str, Any] | pd.Series, *names: str) -> dict[str, Any]:
    """Return cells of a row by name, as plain data."""
    return {name: plain_value(row.get(name)) for name in names}


def plain_value(value: Any) -> Any:
    """Return a cell as plain data: None if missing, NumPy and pandas scalars as Python ones."""
    if value is None or pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value
