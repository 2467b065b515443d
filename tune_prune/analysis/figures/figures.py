"""The figures of a paper: what was searched and what came of it. Every number drawn is in `Findings`.

heatmap_<model>    accuracy over seq_len x num_samples, a panel per method
methods            the mean of each method, its spread, and every configuration
seq_len, num_samples, ...    accuracy against one hyperparameter, averaged over the others
ppl_accuracy       perplexity against accuracy
accuracy_cost      accuracy against what a trial costs
accuracy_size      accuracy of the best against the parameters kept, where a model was pruned at several ratios
pareto             accuracy against size, cache and speed, where speed was measured
retention_<model>  what each layer of the best configuration kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tune_prune.analysis.figures import figure_style
from tune_prune.analysis.figures.figure_style import ACCURACY, BLACK, GREY, LIGHT, PANELS_PER_ROW, SMALL, TINY
from tune_prune.analysis.figures.figures_best import layer_shares, retention_figure
from tune_prune.analysis.figures.heatmap import heatmap
from tune_prune.analysis.input.rows import CALIBRATION
from tune_prune.analysis.render.messages import printed
from tune_prune.analysis.statistics.effects import level_table
from tune_prune.analysis.statistics.factors import NUMERIC, methods_reading
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables.sizes import by_size, by_speed
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import location

_DENSE: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 7}
_RING = _DENSE | {"marker": "o", "markersize": 8, "markeredgewidth": 1.2, "fillstyle": "none"}


def draw_all(findings: Findings, folder: Path) -> list[Path]:
    """Write every figure of one model or more into `folder` as PNG and PDF and return the paths.

    Left out are hyperparameters of which every model has one level, ppl_accuracy where no perplexity is finite, accuracy_size
    where every model has one ratio, pareto where no speed was measured, and retention_<model> where the best trial's folder is
    not there. UserError if a file in it is damaged.
    """
    models = findings.models
    stems = figure_style.file_stems(models)
    with figure_style.style():
        figures = {f"heatmap_{stems[label]}": heatmap(model) for label, model in models.items()}
        figures["methods"] = methods(models)
        for factor in NUMERIC:
            if any(len(model.levels.get(factor, ())) > 1 for model in models.values()):
                figures[HYPERPARAMETERS[factor].name] = curves(models, factor)
        if any(np.isfinite(model.eligible["ppl"]).any() for model in models.values()):
            figures["ppl_accuracy"] = ppl_accuracy(models)
        figures["accuracy_cost"] = accuracy_cost(models)
        if (sizes := by_size(findings)) is not None:
            figures["accuracy_size"] = accuracy_size(sizes)
        if (speeds := by_speed(findings)) is not None:
            figures["pareto"] = pareto(speeds)
        for label, model in models.items():
            folder_of_best = model.best["output_dir"]
            kept = layer_shares(location(folder_of_best)) if folder_of_best else None
            if kept is not None:
                figures[f"retention_{stems[label]}"] = retention_figure(kept)
        return figure_style.save(figures, folder)


def methods(models: Mapping[str, ModelFindings]) -> Figure:
    """A bar from zero per method, a panel per model: the mean of its configurations, their standard deviation, and each of them.

    The points of a bar are its configurations by seq_len, then num_samples, from left to right.
    """
    styles = _styles(models)
    wide = len(models) > 2 or len(models) * len(styles) > 8  # so that each label and mean has room
    columns = max(1, min(PANELS_PER_ROW, 20 // len(styles)))
    figure, grid = figure_style.panels(len(models), 1.9, wide, columns, sharey=True)
    error: dict[str, Any] = {"fmt": "none", "ecolor": BLACK, "elinewidth": 1, "capthick": 1, "zorder": 3}
    for axes, (label, model) in zip(grid, models.items(), strict=True):
        for place, (method, style) in enumerate(styles.items()):
            accuracies = _of(model, method).sort_values(list(CALIBRATION))["acc_mean"]
            places = place + np.linspace(-0.4, 0.4, len(accuracies) + 2)[1:-1]
            axes.plot(places, accuracies, linestyle="none", markersize=3, label=method, **style)
            if accuracies.empty:
                continue
            mean, spread = model.methods.loc[method, ["mean", "std"]]
            tint = 0.65 + 0.35 * np.array(to_rgb(style["color"]))
            axes.bar(place, mean, 0.9, color=tint, edgecolor=style["color"])
            axes.text(place, 0.02 * mean, printed(mean, "acc3"), fontsize=SMALL, ha="center", va="bottom")
            if math.isfinite(spread):  # of one configuration there is none
                axes.errorbar(place, mean, spread, label="mean ± std over configurations", **error)
        axes.set_xticks([(len(styles) - 1) / 2], [figure_style.wrapped(label)])
        axes.set_xlim(-0.55, len(styles) - 0.45)
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
    figure.supylabel(figure_style.fractions(ACCURACY, *grid))
    return figure_style.with_legend(figure)


def curves(models: Mapping[str, ModelFindings], factor: str) -> Figure:
    """acc_mean against the levels of `factor`, a panel per model: each method's mean over the other hyperparameters with its
    standard error over those configurations (none where there is one), and the mean over all of them
    (`ModelFindings.levels`). A method that does not read `factor` is a level line."""
    styles = _styles(models)
    models = {label: model for label, model in models.items() if len(model.levels.get(factor, ()))}
    figure, grid = _panels(models, 1.9, HYPERPARAMETERS[factor].label)
    for axes, model in zip(grid, models.values(), strict=True):
        for method, style in styles.items():
            if method not in methods_reading(model.model.rows, factor):
                axes.axhline(_of(model, method)["acc_mean"].mean(), linewidth=1, clip_on=False, label=method, **style)
                continue
            rows = model.reading(factor)
            table = level_table(rows[rows["method"] == method], factor)
            mean, error = table["mean"], table["stderr"].fillna(0)
            axes.fill_between(mean.index, mean - error, mean + error, color=style["color"], alpha=0.18, linewidth=0)
            axes.plot(mean, label=method, **style)
        mean = model.levels[factor]["mean"]
        if len(styles) > 1:
            axes.plot(mean, color=BLACK, linestyle="--", linewidth=1, label="all methods")
        axes.plot([], [], color=GREY, alpha=0.25, linewidth=5, label="± standard error")
        figure_style.level_axis(axes.xaxis, mean.index.tolist())
    return figure_style.with_legend(figure)


def ppl_accuracy(models: Mapping[str, ModelFindings]) -> Figure:
    """Perplexity against acc_mean, a panel per model, with the dense model where it is known."""
    figure, grid = _panels(models, 2.0, "Perplexity")
    for axes, model in zip(grid, models.values(), strict=True):
        _scatter(axes, model, model.eligible["ppl"], _styles(models))
        dense = [model.model.baseline.get(name, math.nan) for name in ("ppl", "acc_mean")]
        if all(map(math.isfinite, dense)):
            axes.plot(*dense, **_DENSE, color=BLACK, label="original model")
        figure_style.spread_axis(axes.xaxis)
    return figure_style.with_legend(figure)


def accuracy_cost(models: Mapping[str, ModelFindings]) -> Figure:
    """acc_mean against the trial's time (calibration tokens where a model's trials have none), a panel per model; the line
    is the best that can be had at each cost."""
    figure, grid = _panels(models, 2.0)
    for axes, model in zip(grid, models.values(), strict=True):
        timed = bool(np.isfinite(model.eligible["elapsed_time"]).all())
        cost = model.eligible["elapsed_time" if timed else "tokens"].astype("float64")
        _scatter(axes, model, cost, _styles(models))
        highest = model.eligible["acc_mean"].groupby(cost).max().cummax()
        line: dict[str, Any] = {"drawstyle": "steps-post", "color": GREY, "linewidth": 0.8, "zorder": 1}
        axes.plot(highest.index, highest, **line, label="best at this cost")
        axes.set_xlabel("Seconds of a trial on its machine" if timed else "Calibration tokens")
        figure_style.spread_axis(axes.xaxis)
    return figure_style.with_legend(figure)


def accuracy_size(sizes: pd.DataFrame) -> Figure:
    """acc_mean and its standard error of each model's best configurations (`sizes.by_size`) against the percentage of parameters
    kept; stars are the dense models, bands go from the lowest to the highest draw of calibration samples."""
    figure, (axes,) = figure_style.panels(1, 2.2, wide=False)
    styles = figure_style.styles(sizes["model"], first=())
    for label, rows in sizes.groupby("model"):
        style, dense = styles[str(label)], rows[rows["ratio"] == 0]
        values = (100 * rows["kept"], rows["acc_mean"], rows["acc_mean_stderr"])
        pruned = (rows["ratio"] > 0).tolist()
        label = figure_style.wrapped(str(label))
        axes.errorbar(*values, elinewidth=0.8, linewidth=1, markevery=pruned, label=label, **style)
        of_draws = (rows["acc_lowest"].fillna(rows["acc_mean"]), rows["acc_highest"].fillna(rows["acc_mean"]))
        axes.fill_between(values[0], *of_draws, color=style["color"], alpha=0.18, linewidth=0)
        axes.plot(100 * dense["kept"], dense["acc_mean"], color=style["color"], **_DENSE)
    if (sizes["ratio"] == 0).any():
        axes.plot([], [], color=BLACK, label="original model", **_DENSE)
    if (sizes["acc_lowest"] < sizes["acc_highest"]).any():
        axes.plot([], [], color=GREY, alpha=0.25, linewidth=5, label="lowest to highest run")
    axes.set(xlabel="Parameters kept (%)", ylabel=figure_style.fractions(ACCURACY, axes))
    return figure_style.with_legend(figure)


def pareto(speeds: pd.DataFrame) -> Figure:
    """acc_mean of the configurations of `sizes.by_speed` against four costs, a row of panels per model, with all its ratios:
    parameters and KV bytes per token in percent of the dense model's, prefill and decode as multiples of its speed, from the lowest
    to the highest round. Filled: Pareto-optimal at its ratio; ringed: the best of its ratio; star: the dense model."""
    names = speeds["series"].unique()
    figure, grid = figure_style.panels(4 * len(names), 2.0, wide=True, sharey="row")
    styles = figure_style.styles(set(speeds["method"]) - {"dense"})
    costs = {"kept": (100, "Parameters (%)"), "kv_kept": (100, "KV bytes/token (%)")}
    costs |= {"prefill": (1, "Prefill (x original)"), "decode": (1, "Decode (x original)")}
    for number, axes in enumerate(grid):
        rows = speeds[speeds["series"] == names[number // 4]]
        cost, (scale, label) = list(costs.items())[number % 4]
        dense, pruned = rows[rows["method"] == "dense"], rows[rows["method"] != "dense"]
        x, y = scale * pruned[cost], pruned["acc_mean"]
        bars: dict[str, Any] = {"yerr": pruned["acc_mean_stderr"]}
        if f"{cost}_lowest" in pruned:
            bars["xerr"] = [x - pruned[f"{cost}_lowest"], pruned[f"{cost}_highest"] - x]
        axes.errorbar(x, y, fmt="none", ecolor=LIGHT, elinewidth=0.8, zorder=1, **bars)
        optimal = pruned["pareto"].astype("bool")
        for method, style in styles.items():
            for of, face in (
                (~optimal, {"markerfacecolor": "white", "markeredgecolor": style["color"]}),
                (optimal, {}),
            ):
                own = of & (pruned["method"] == method)
                axes.plot(x[own], y[own], linestyle="none", label=None if face else method, **style, **face)
        best = pruned["best"].astype("bool")
        axes.plot(x[best], y[best], **_RING, color=BLACK, zorder=4, label="best")
        axes.plot(scale * dense[cost], dense["acc_mean"], **_DENSE, color=BLACK, zorder=4, label="original model")
        if not optimal.all():
            hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": GREY}
            axes.plot([], [], linestyle="none", marker="o", **hollow, label="not Pareto-optimal")
        axes.set_xlabel(label)
        axes.set_title(figure_style.wrapped(names[number // 4]) if len(names) > 1 and number % 4 == 0 else "")
    figure.supylabel(figure_style.fractions(ACCURACY, *grid))
    return figure_style.with_legend(figure)


def _panels(models: Mapping[str, ModelFindings], height: float, x: str = "") -> tuple[Figure, list[Axes]]:
    """A panel per model, with its label above it; a panel alone has none: the caption says what it is."""
    figure, grid = figure_style.panels(len(models), height, wide=len(models) > 1)
    for axes, label in zip(grid, models, strict=True):
        axes.set_title(figure_style.wrapped(label) if len(models) > 1 else "")
    figure.supxlabel(x)
    figure.supylabel(figure_style.fractions(ACCURACY, *grid))
    return figure, grid


def _of(model: ModelFindings, method: str) -> pd.DataFrame:
    """The eligible rows of a method."""
    return model.eligible[model.eligible["method"] == method]


def _styles(models: Mapping[str, ModelFindings]) -> dict[str, dict[str, Any]]:
    return figure_style.styles(method for model in models.values() for method in model.methods.index)


def _scatter(axes: Axes, model: ModelFindings, x: pd.Series, styles: Mapping[str, dict[str, Any]]) -> None:
    """The configurations at `x` and acc_mean, the best ringed; what has no finite `x` is counted in the panel. Hollow:
    less accurate than some other (95%, where that is known)."""
    finite, worse, accuracy = np.isfinite(x), ~model.eligible["in_confidence_set"], model.eligible["acc_mean"]
    hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white", "markeredgewidth": 0.8}
    for method, style in styles.items():
        of_method = finite & (model.eligible["method"] == method)
        below, level = of_method & worse, of_method & ~worse
        axes.plot(x[below], accuracy[below], **style, **hollow, markeredgecolor=style["color"])
        axes.plot(x[level], accuracy[level], linestyle="none", zorder=3, label=method, **style)
    if finite[model.best.name]:
        axes.plot(x[model.best.name], model.best["acc_mean"], **_RING, clip_on=False, zorder=4, label="best")
    if model.basis != "unknown":
        axes.plot([], [], marker="o", markeredgecolor=GREY, **hollow, label="below the highest (95%)")
    if not finite.any():
        axes.set_yticks([])
    if not finite.all():
        hidden = f"{(~finite).sum()} of {len(x)} not finite, not shown"
        axes.text(0.98, 0.98, hidden, transform=axes.transAxes, fontsize=TINY, ha="right", va="top", color=GREY)
