"""The figures of a paper: what was searched and what came of it. Every number drawn is in `Findings`.

heatmap_<model>    accuracy over seq_len x num_samples, a panel per method
methods            the mean of each method, its spread, and every configuration
seq_len, num_samples, ...    accuracy against one hyperparameter, averaged over the others
ppl_accuracy       perplexity against accuracy
accuracy_cost      accuracy against what a trial costs
accuracy_size      accuracy of the best against the parameters kept, where a model was pruned at several ratios
retention_<model>  what each layer of the best configuration kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tune_prune.analysis.figures import figure_style
from tune_prune.analysis.figures.figure_style import (
    ACCURACY,
    BLACK,
    DOUBLE,
    GREY,
    SINGLE,
    SMALL,
    TINY,
    Look,
)
from tune_prune.analysis.figures.figures_best import layer_shares, retention_figure
from tune_prune.analysis.figures.heatmap import heatmap
from tune_prune.analysis.statistics.factors import CALIBRATION, NUMERIC, methods_reading
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.core.config import HYPERPARAMETERS

_TIME, _TOKENS = "Trial time (s)", "Calibration tokens"


def draw_all(findings: Findings, folder: Path) -> list[Path]:
    """Write every figure into `folder` as PNG and PDF and return the paths; nothing if no model has a complete trial.

    Left out are hyperparameters of which every model has one level, ppl_accuracy where no perplexity is finite, accuracy_size
    where every model has one ratio, and retention_<model> where the best trial's folder is not there. UserError if a file
    in it is damaged.
    """
    models = findings.models
    if not models:
        return []
    paths = []
    stems = figure_style.file_stems(models)
    with figure_style.style():
        figures = {f"heatmap_{stems[label]}": heatmap(model) for label, model in models.items()}
        figures["methods"] = methods(models)
        for factor in NUMERIC:
            if any(len(model.levels.get(factor, ())) > 1 for model in models.values()):
                figures[HYPERPARAMETERS[factor].short] = curves(models, factor)
        if any(np.isfinite(model.eligible["ppl"]).any() for model in models.values()):
            figures["ppl_accuracy"] = ppl_accuracy(models)
        figures["accuracy_cost"] = accuracy_cost(models)
        if findings.sizes is not None:
            figures["accuracy_size"] = accuracy_size(findings.sizes)
        for label, model in models.items():
            folder_of_best = model.best["output_dir"]
            kept = layer_shares(Path(folder_of_best)) if folder_of_best else None
            if kept is not None:
                figures[f"retention_{stems[label]}"] = retention_figure(kept)
        for stem, figure in figures.items():
            paths += figure_style.save(figure, folder, stem)
    return paths


def methods(models: Mapping[str, ModelFindings]) -> Figure:
    """A bar from zero per method and model: the mean of its configurations, their standard deviation, and each of them.

    The points of a bar are its configurations by seq_len, then num_samples, from left to right.
    """
    looks = _looks(models)
    names = {label: figure_style.wrapped(label) for label in models}
    longest = max(len(line) for name in names.values() for line in name.split("\n"))
    room = max(10 + 0.6 * SMALL * longest, 22 * len(looks))  # pt that a model takes: its label, its bars
    per_row = max(1, min(7, int(72 * (DOUBLE - 0.6) / room)))
    labels = list(models)
    rows = [labels[start : start + per_row] for start in range(0, len(labels), per_row)]
    wide = room * len(rows[0]) > 72 * (SINGLE - 0.6)
    figure = Figure(figsize=(DOUBLE if wide else SINGLE, 1.9 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), squeeze=False, sharey=True).ravel().tolist()
    width = 0.86 / len(looks)
    for axes, row in zip(grid, rows, strict=True):
        for place, label in enumerate(row):
            for offset, (method, look) in enumerate(looks.items()):
                if method in models[label].methods.index:
                    _bar(axes, place + (offset - (len(looks) - 1) / 2) * width, width, models[label], method, look)
        axes.set_xticks(range(len(row)), [names[label] for label in row])
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
        axes.set_xlim(-0.55, len(rows[0]) - 0.45)
        axes.set_ylabel(ACCURACY)
    handles = [figure_style.key(look, method) for method, look in looks.items()]
    handles += [Line2D([], [], color=BLACK, linewidth=1, label="mean ± std over configurations")]
    figure_style.legend_above(figure, handles)
    return figure


def _bar(axes: Axes, centre: float, width: float, model: ModelFindings, method: str, look: Look) -> None:
    row, rows = model.methods.loc[method], model.eligible[model.eligible["pruning_method"] == method]
    spread = row["std"] if math.isfinite(row["std"]) else None  # of one configuration there is none
    error: dict[str, Any] = {"elinewidth": 1, "capsize": 2.5, "capthick": 1, "ecolor": BLACK, "zorder": 3}
    faces: dict[str, Any] = {"color": figure_style.tint(look.colour), "edgecolor": look.colour}
    axes.bar(centre, row["mean"], width * 0.92, yerr=spread, error_kw=error, **faces)
    mean = f"{row['mean']:.3f}".removeprefix("0")
    axes.text(centre, 0.02 * row["mean"], mean, fontsize=SMALL, ha="center", va="bottom")
    accuracies = rows.sort_values(list(CALIBRATION))["acc_mean"]
    places = centre + width * (np.linspace(-0.36, 0.36, len(rows)) if len(rows) > 1 else np.zeros(1))
    point: dict[str, Any] = {"marker": look.marker, "markersize": 2.6, "markeredgecolor": BLACK, "markeredgewidth": 0.3}
    axes.plot(places, accuracies, linestyle="none", color=look.colour, **point)


def curves(models: Mapping[str, ModelFindings], factor: str) -> Figure:
    """acc_mean against the levels of `factor`, a panel per model: each method's mean over the other hyperparameters with its
    standard error over those configurations (none where there is one), and the mean over all of them
    (`ModelFindings.levels`). A method that does not read `factor` is a level line."""
    looks = _looks(models)
    models = {label: model for label, model in models.items() if len(model.levels.get(factor, ()))}
    figure, grid = figure_style.panels(list(models), 1.9)
    for axes, model in zip(grid, models.values(), strict=True):
        for method, look in looks.items():
            rows = model.eligible[model.eligible["pruning_method"] == method]
            if method not in methods_reading(model.model.rows, factor):
                axes.axhline(rows["acc_mean"].mean(), color=look.colour, linewidth=1, label=method)
                continue
            by_level = rows.groupby(factor)["acc_mean"].agg(["mean", "sem"])
            levels, mean, error = by_level.index.astype("int64"), by_level["mean"], by_level["sem"].fillna(0)
            axes.fill_between(levels, mean - error, mean + error, color=look.colour, alpha=0.18, linewidth=0)
            edge: dict[str, Any] = {"markeredgecolor": BLACK, "markeredgewidth": 0.4}
            axes.plot(levels, mean, color=look.colour, marker=look.marker, label=method, **edge)
        table = model.levels[factor]
        if len(looks) > 1:
            axes.plot(table.index.astype("int64"), table["mean"], **_ALL_METHODS)
        figure_style.level_axis(axes, [int(level) for level in table.index])
    figure_style.label_outer(grid, x=HYPERPARAMETERS[factor].label, y=ACCURACY)
    handles: list[Artist] = [figure_style.key(look, method, linestyle="-") for method, look in looks.items()]
    if len(looks) > 1:
        handles += [Line2D([], [], **_ALL_METHODS)]
    handles += [Patch(color=GREY, alpha=0.25, linewidth=0, label="± standard error")]
    figure_style.legend_above(figure, handles)
    return figure


def ppl_accuracy(models: Mapping[str, ModelFindings]) -> Figure:
    """Perplexity against acc_mean, a panel per model, with the dense model where it is known."""
    figure, grid = figure_style.panels(list(models), 2.0)
    dense_known = False
    for axes, model in zip(grid, models.values(), strict=True):
        shown = _scatter(axes, model, model.eligible["ppl"], _looks(models))
        dense = [model.model.baseline.get(name, math.nan) for name in ("ppl", "acc_mean")]
        if all(map(math.isfinite, dense)):
            dense_known = True
            axes.plot(*dense, **_DENSE)
            shown = np.append(shown, dense[0])
        figure_style.spread_axis(axes, "x", shown)
    figure_style.label_outer(grid, x="Perplexity", y=ACCURACY)
    extra = [Line2D([], [], **_DENSE, label="dense model")] if dense_known else []
    figure_style.legend_above(figure, _scatter_keys(models) + extra)
    return figure


def accuracy_cost(models: Mapping[str, ModelFindings]) -> Figure:
    """acc_mean against the trial's time (calibration tokens where a model's trials have none), a panel per model; the line
    is the best that can be had at each cost."""
    figure, grid = figure_style.panels(list(models), 2.0)
    for axes, model in zip(grid, models.values(), strict=True):
        timed = bool(np.isfinite(model.eligible["elapsed_time"]).all())
        cost = model.eligible["elapsed_time" if timed else "tokens"].astype("float64")
        _scatter(axes, model, cost, _looks(models))
        highest = model.eligible["acc_mean"].groupby(cost).max().cummax()
        axes.plot(highest.index, highest, drawstyle="steps-post", color=GREY, linewidth=0.8, zorder=1)
        figure_style.spread_axis(axes, "x", cost)
        axes.set_xlabel(_TIME if timed else _TOKENS)
    figure_style.label_outer(grid, y=ACCURACY)
    line = Line2D([], [], color=GREY, linewidth=0.8, label="best at this cost")
    figure_style.legend_above(figure, [*_scatter_keys(models), line])
    return figure


def accuracy_size(sizes: pd.DataFrame) -> Figure:
    """acc_mean and its standard error of each model's best configurations (`Findings.sizes`) against the percentage of parameters
    kept; stars are the dense models."""
    figure, (axes,) = figure_style.panels([""], 2.2)
    handles = []
    for (label, rows), look in zip(sizes.groupby("model", sort=False), figure_style.series(), strict=False):
        error: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2, "linewidth": 1, "color": look.colour}
        axes.errorbar(100 * rows["kept"], rows["acc_mean"], rows["acc_mean_stderr"], **error)
        for dense, of_kind in rows.groupby(rows["ratio"] == 0):
            marker: dict[str, Any] = {"marker": "*", "markersize": 7} if dense else {"marker": look.marker}
            line: dict[str, Any] = {
                "linestyle": "none",
                "color": look.colour,
                "markeredgecolor": BLACK,
                "markeredgewidth": 0.4,
            }
            axes.plot(100 * of_kind["kept"], of_kind["acc_mean"], **line, **marker)
        handles.append(figure_style.key(look, figure_style.wrapped(str(label)), linestyle="-"))
    figure_style.label_outer([axes], x="Parameters kept (%)", y=ACCURACY)
    if (sizes["ratio"] == 0).any():
        handles.append(Line2D([], [], **_DENSE, label="dense model"))
    figure_style.legend_above(figure, handles)
    return figure


_ALL_METHODS: dict[str, Any] = {"color": BLACK, "linestyle": "--", "linewidth": 1, "label": "all methods"}
_RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 8,
    "fillstyle": "none",
    "markeredgewidth": 1.2,
    "color": BLACK,
}
_DENSE: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 7, "color": BLACK}


def _scatter(axes: Axes, model: ModelFindings, x: pd.Series, looks: Mapping[str, Look]) -> np.ndarray:
    """The configurations at `x` and acc_mean, the best ringed; what has no finite `x` is counted in the panel. Returns the
    values shown. Filled: cannot be told from the most accurate (where that is known)."""
    finite = np.isfinite(x)
    worse = model.worse
    for method, look in looks.items():
        of_method = finite & (model.eligible["pruning_method"] == method)
        for rows, face in ((of_method & worse, "white"), (of_method & ~worse, look.colour)):
            axes.plot(
                x[rows],
                model.eligible["acc_mean"][rows],
                linestyle="none",
                marker=look.marker,
                markerfacecolor=face,
                markeredgecolor=look.colour if face == "white" else BLACK,
                markeredgewidth=0.8 if face == "white" else 0.4,
                zorder=2 if face == "white" else 3,
                label=method,
            )
    if finite[model.best.name]:
        axes.plot(x[model.best.name], model.best["acc_mean"], **_RING, zorder=4)
    if not finite.all():
        says = f"{(~finite).sum()} of {len(x)} not finite, not shown"
        axes.text(0.98, 0.98, says, transform=axes.transAxes, fontsize=TINY, ha="right", va="top", color=GREY)
    return x[finite].to_numpy(dtype="float64")


def _scatter_keys(models: Mapping[str, ModelFindings]) -> list[Line2D]:
    keys = [figure_style.key(look, method) for method, look in _looks(models).items()]
    keys.append(Line2D([], [], **(_RING | {"markersize": 6}), label="best"))
    if any(model.basis != "unknown" for model in models.values()):
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": GREY, "markeredgewidth": 0.8}
        keys.append(figure_style.key(Look(GREY, "o"), "below the highest (95%)", **hollow))
    return keys


def _looks(models: Mapping[str, ModelFindings]) -> dict[str, Look]:
    return figure_style.looks(method for model in models.values() for method in model.methods.index)
