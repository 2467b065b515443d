"""The input of an analysis: models, their trials and what is wrong with them, wherever it came from.

`Study` holds every row that was found, also those that are not eligible, and names each of these in a `Problem`. A `Message` is
what a finding tells its reader, as data: render/ has its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from tune_prune.core.config import PruningConfig
from tune_prune.core.speed_records import SpeedRecord, newest_conditions
from tune_prune.core.store import Location


@dataclass(frozen=True)
class Message:
    """A sentence to be made from `values`."""

    kind: str  # a key of messages.SENTENCES
    values: Mapping[str, Any] = field(default_factory=dict)


def tasks_of(columns: Iterable[str]) -> list[str]:
    """Return the tasks whose accuracies are among the columns of a frame."""
    names = (name.removeprefix("acc_") for name in columns if name.startswith("acc_"))
    return [name for name in names if name != "mean" and not name.endswith("_stderr")]


@dataclass(frozen=True)
class Problem:
    """A row that is not eligible, or anything else about the input that a reader must know."""

    where: str  # "line 12 of PATH", "trial 0123abcd of FOLDER", "PATH"
    what: str  # "failed: out of memory", "acc_mean is nan", "taylor-s16-n128, as line 3 of PATH, which counts"
    kind: Literal["failed", "stopped_early", "not_finite", "duplicate", "missing", "note"] = "missing"
    model: str = ""  # the label of the `Model`, once there is one


@dataclass(frozen=True)
class Model:
    """One model and all rows found for it; as a reader gives it, its part in one experiment or results file."""

    label: str
    # the columns of `rows.frame`, and `name` (of the configuration; of a part `where`); RangeIndex; failed ones too; no duplicates
    rows: pd.DataFrame
    baseline: Mapping[str, float] = field(default_factory=dict)  # metrics of the dense model; empty where unknown
    source: Mapping[str, Any] | None = None  # ModelRun.to_dict(), where known: what it takes to run a trial again
    window: int | None = None  # tokens of a window of the perplexity text, as used; None: not recorded
    origins: tuple[Location, ...] = ()  # experiment folders and CSV files that the rows are from
    problems: tuple[Problem, ...] = ()
    kind: Literal["experiment", "published"] = "experiment"
    binomial: bool = False  # a results file without standard errors, whose are made of the sizes of the published tasks
    base: str = ""  # the label without pruning ratio and recovery: equal for what differs in those only
    kin: str = ""  # equal for what is of the same model and was measured alike, however many labels tell it apart
    measured: str | None = None  # equal for parts that were measured alike: a key; None if that is lost
    seedless: tuple[str, ...] = ()  # methods that read no seed and so have no draws, where experiment.json tells
    text: str | None = None  # that perplexity is of: "embedded", "wikitext2", "other"; None: not recorded
    speeds: tuple[SpeedRecord, ...] = ()  # of trials of these origins, under any conditions
    baseline_by: Mapping[str, str] = field(default_factory=dict)  # rows.VERSIONS that have measured the dense model

    @property
    def tasks(self) -> list[str]:
        """The tasks that were measured; where no accuracy but the mean is known, all that the rows have a column for."""
        names = tasks_of(self.rows)
        known = self.rows[[f"acc_{name}" for name in names]].notna().any()
        return [name for name in names if known[f"acc_{name}"] or f"acc_{name}" in self.baseline] or names

    @property
    def states(self) -> pd.Series:
        """Return how each row ended: its status, or "not_finite" of one that is complete without a finite accuracy."""
        return self.rows["status"].mask(self.rows["success"] & ~np.isfinite(self.rows["acc_mean"]), "not_finite")

    @property
    def compared_speeds(self) -> Mapping[str, SpeedRecord]:
        """Return by the trial's key the speeds of its rows that were measured under the conditions of the newest."""
        keys = set(self.rows["key"])
        return newest_conditions([record for record in self.speeds if record.key in keys])

    @property
    def tokens(self) -> int | None:
        """Return how many tokens of the perplexity text were read, its first ones; None: all, or not recorded."""
        bound: int | None = (self.source or {}).get("protocol", {}).get("perplexity_tokens")
        return bound

    @property
    def ratio(self) -> float:
        """The pruning ratio asked for, of most rows; NaN where there are none."""
        return float(self.rows["pruning_ratio"].mode().get(0, math.nan))

    @property
    def recovery(self) -> str:
        """Return how all rows were trained after pruning (PruningConfig.recovery)."""
        return str(next(iter(self.rows["recovery"]), PruningConfig.recovery))

    @property
    def trained(self) -> bool:
        """Return whether these models were trained after pruning."""
        return self.recovery != PruningConfig.recovery

    @property
    def series(self) -> str:
        """The label without the pruning ratio: equal for what differs in that only."""
        return f"{self.base}+{self.recovery}" if self.trained else self.base

    @property
    def shape(self) -> str:
        """Return what the layers may look like after pruning (PruningConfig.shape), if it is the same in all rows; else "free"."""
        shapes = self.rows["shape"].unique()
        return str(shapes[0]) if len(shapes) == 1 else PruningConfig.shape


@dataclass(frozen=True)
class Study:
    """All models of an analysis, in the order they were named."""

    models: Mapping[str, Model]
    experiments: Mapping[Location, Mapping[str, Any]] = field(default_factory=dict)  # folder -> its experiment.json
    costs: Mapping[Location, Mapping[str, Any]] = field(
        default_factory=dict
    )  # folder -> its cost.json, where there is one


def gradient_pass_s(eligible: pd.DataFrame, model: Model, costs: Mapping[Any, Mapping[str, Any]]) -> pd.Series:
    """Return the seconds that the gradients of each row take alone: its samples' part of the pass that was made for all of its
    seq_len; NaN where its method reads none of it."""
    label = (model.source or {}).get("label", model.label)  # as the search calls the model
    per_sample = {
        int(entry["seq_len"]): entry["duration_s"] / entry["num_samples"]
        for folder in model.origins
        for entry in costs.get(folder, {}).get("shared_passes", ())
        if entry["stage"] == "importance" and entry["model"] == label
    }
    seconds = eligible["seq_len"].map(per_sample).astype("float64") * eligible["num_samples"].astype("float64")
    if "importance_duration_s" in eligible:
        seconds = seconds.where(eligible["importance_duration_s"].notna())
    return seconds


def measured_apart(eligible: pd.DataFrame, model: Model, costs: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Return columns that no trial has measured: `gradient_pass_s`; speed_up and retained_per_second, NaN where no speed was
    measured.

    speed_up             seconds that the dense model takes for the request of the conditions (prompt and new tokens), over its own
    retained_per_second  accuracy retained, over the seconds of the request in units of the dense model's: 1 of the dense model
    """
    speeds = model.compared_speeds
    speed_up = np.array([speeds[key].total.value if key in speeds else math.nan for key in eligible["key"]])
    retained = eligible["acc_mean"].astype("float64") / model.baseline.get("acc_mean", math.nan)
    passes = gradient_pass_s(eligible, model, costs)
    return {"gradient_pass_s": passes, "speed_up": speed_up, "retained_per_second": retained * speed_up}
