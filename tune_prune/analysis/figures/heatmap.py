"""Accuracy over the calibration's hyperparameters, a panel per method."""

from __future__ import annotations

import math
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from tune_prune.analysis.figures import figure_style
from tune_prune.analysis.figures.figure_style import ACCURACY, DOUBLE, LIGHT, PANELS_PER_ROW, SINGLE, TINY
from tune_prune.analysis.statistics.factors import CALIBRATION, methods_reading
from tune_prune.analysis.statistics.findings import ModelFindings
from tune_prune.core.config import HYPERPARAMETERS

MAX_LEVELS_WITH_TEXT = 12  # more, and the numbers in the cells could not be read


def heatmap(model: ModelFindings) -> Figure:
    """acc_mean over seq_len (up) and num_samples (across), a panel per method, on one colour scale.

    Where several configurations share a cell, it shows the best of them. A method that reads neither has one cell.
    """
    rows, eligible = model.model.rows, model.eligible
    seq_lens, samples = (sorted(rows[factor].dropna().astype(int).unique()) for factor in CALIBRATION)
    reading = set.union(*(methods_reading(rows, factor) for factor in CALIBRATION))
    names = list(figure_style.looks(rows["pruning_method"]))
    with_text = max(len(seq_lens), len(samples)) <= MAX_LEVELS_WITH_TEXT
    per_row = min(len(names), PANELS_PER_ROW)
    panel_rows = math.ceil(len(names) / per_row)
    wide = per_row * len(samples) > 9
    figure = Figure(
        figsize=(
            DOUBLE if wide else SINGLE,
            panel_rows * (0.25 + min(3.0, max(1.1 / panel_rows, 0.27 * len(seq_lens)))) + 0.9,
        ),
        layout=ConstrainedLayoutEngine(w_pad=0.02, wspace=0.01),
    )
    grid = figure.subplots(panel_rows, per_row, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    alike = ~model.worse & (model.basis != "unknown") & (eligible.index != model.best.name)
    low, high = eligible["acc_mean"].min(), eligible["acc_mean"].max()
    scale = Normalize(low, high) if high > low else Normalize(low - 0.005, low + 0.005)
    for axes, method in zip(grid, names, strict=False):
        of_method = eligible[eligible["pruning_method"] == method]
        cells = of_method.pivot_table(
            index="taylor_seq_len", columns="taylor_num_samples", values="acc_mean", aggfunc="max"
        )
        if method in reading:
            cells = cells.reindex(index=seq_lens, columns=samples)
        mesh = _cells(axes, cells, scale, with_text, seq_lens, samples)
        axes.set_title(method)
        for _, row in of_method[alike[of_method.index]].iterrows():
            _outline(axes, row, seq_lens, samples, method not in reading, **_ALIKE)
        if model.best["pruning_method"] == method:
            _outline(axes, model.best, seq_lens, samples, method not in reading, **_BEST)
    for axes in grid[len(names) :]:
        axes.remove()
    for axes in grid[max(0, len(names) - per_row) : len(names)]:  # also those above a place that is left empty
        axes.tick_params(labelbottom=True)
    figure.supxlabel(HYPERPARAMETERS["taylor_num_samples"].label, fontsize=8)
    figure.supylabel(HYPERPARAMETERS["taylor_seq_len"].label, fontsize=8)
    bar = figure.colorbar(mesh, ax=grid[: len(names)], label=ACCURACY, pad=0.02, fraction=0.05, aspect=25)
    bar.outline.set_visible(False)
    bar.solids.set(edgecolor="face", rasterized=False)  # type: ignore[union-attr]
    keys = [Patch(**_BEST, label="best")]
    if alike.any():
        keys.append(Patch(**_ALIKE, label="tied with the highest (95%)"))
    wanted = sum(len(seq_lens) * len(samples) if method in reading else 1 for method in names)
    missing = wanted - len(eligible.groupby(["pruning_method", *CALIBRATION]))
    if missing:
        keys.append(Patch(facecolor="white", edgecolor=LIGHT, hatch="/////", label=f"no complete trial ({missing})"))
    figure_style.legend_above(figure, keys)
    return figure


_BEST: dict[str, Any] = {"fill": False, "edgecolor": figure_style.VERMILLION, "linewidth": 2.0}
_ALIKE: dict[str, Any] = {"fill": False, "edgecolor": figure_style.VERMILLION, "linewidth": 0.8}


def _outline(axes: Axes, row: pd.Series, seq_lens: list[int], samples: list[int], whole: bool, **line: Any) -> None:
    """Around the cell of a row, or around the whole panel of a method that has one cell."""
    corner = (0, 0) if whole else (samples.index(row["taylor_num_samples"]), seq_lens.index(row["taylor_seq_len"]))
    width, height = (len(samples), len(seq_lens)) if whole else (1, 1)
    axes.add_patch(Rectangle(corner, width, height, clip_on=False, **line))


def _cells(
    axes: Axes, cells: pd.DataFrame, scale: Normalize, with_text: bool, seq_lens: list[int], samples: list[int]
) -> QuadMesh:
    """One panel of a heatmap, which the cells fill: what is missing shows the hatched ground."""
    axes.grid(False)
    axes.patch.set(facecolor="white", edgecolor=LIGHT, hatch="/////", linewidth=0)
    values = np.ma.masked_invalid(cells.to_numpy(dtype="float64"))
    across, up = (
        np.linspace(0, len(levels), n + 1) for levels, n in ((samples, cells.shape[1]), (seq_lens, cells.shape[0]))
    )
    mesh = axes.pcolormesh(across, up, values, cmap="cividis", norm=scale, edgecolor="white", linewidth=0.6)
    for axis, levels in ((axes.xaxis, samples), (axes.yaxis, seq_lens)):
        shown = figure_style.thinned(levels, 12)
        axis.set_ticks([levels.index(level) + 0.5 for level in shown], [str(level) for level in shown])
        axis.set_tick_params(length=0)
    axes.spines[:].set_visible(False)
    if with_text:
        filled = np.argwhere(~np.ma.getmaskarray(values))
        numbers = values[~np.ma.getmaskarray(values)].data
        inks = figure_style.readable_on(matplotlib.colormaps["cividis"](scale(numbers)))
        for (row, column), value, ink in zip(filled, numbers, inks, strict=True):
            text = f"{value:.3f}".removeprefix("0")
            centre = across[column : column + 2].mean(), up[row : row + 2].mean()
            axes.text(*centre, text, color=ink, fontsize=TINY, ha="center", va="center")
    return mesh
