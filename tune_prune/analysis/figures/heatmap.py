"""Accuracy over the calibration's hyperparameters, a panel per method."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from tune_prune.analysis.figures import figure_style
from tune_prune.analysis.figures.figure_style import ACCURACY, LIGHT, PANELS_PER_ROW, TINY, VERMILLION
from tune_prune.analysis.render.messages import printed
from tune_prune.analysis.statistics.factors import CALIBRATION, methods_reading
from tune_prune.analysis.statistics.findings import ModelFindings
from tune_prune.core.hyperparameters import HYPERPARAMETERS

MAX_LEVELS = 12  # with a tick each; more, and the numbers in the cells could not be read
_PLAIN: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6, "zorder": 2.0}
_TIED: dict[str, Any] = {"edgecolor": VERMILLION, "linewidth": 0.8, "zorder": 2.1}
_BEST: dict[str, Any] = {"edgecolor": VERMILLION, "linewidth": 2.0, "zorder": 2.2}
_MISSING: dict[str, Any] = {"facecolor": "white", "edgecolor": LIGHT, "hatch": "/////"}


def heatmap(model: ModelFindings) -> Figure:
    """acc_mean over seq_len (up) and num_samples (across), a panel per method, on one colour scale.

    Where several configurations share a cell, it shows the best of them. A method that reads neither has one cell.
    """
    rows, eligible = model.model.rows, model.eligible
    seq_lens, samples = (sorted(rows[factor].dropna().astype(int).unique()) for factor in CALIBRATION)
    size = (len(samples), len(seq_lens))
    reading = set.union(*(methods_reading(rows, factor) for factor in CALIBRATION))
    names = list(figure_style.styles(rows["method"]))
    wide = min(len(names), PANELS_PER_ROW) * len(samples) > 9
    height = 0.9 + 0.27 * min(11, max(3, len(seq_lens)))
    figure, grid = figure_style.panels(len(names), height, wide, sharex=True, sharey=True)
    figure.set_layout_engine("constrained", w_pad=0.02, wspace=0.01)
    panels = dict(zip(names, grid, strict=True))
    for method, axes in panels.items():
        axes.set(title=method, xlim=(0, size[0]), ylim=(0, size[1]))
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.patch.set(**_MISSING, linewidth=0)
    for axis, levels in ((grid[0].xaxis, samples), (grid[0].yaxis, seq_lens)):
        step = math.ceil(len(levels) / MAX_LEVELS)
        axis.set_ticks(np.arange(0.5, len(levels), step), levels[::step])

    read = eligible["method"].isin(reading)
    places = eligible[["method"]].assign(**{factor: eligible[factor].where(read, 0) for factor in CALIBRATION})
    cells = eligible[~places.duplicated()]  # the best of each, which stands first
    tied = eligible.index[eligible["name"].isin(model.marked)]
    low, high = eligible["acc_mean"].min(), eligible["acc_mean"].max()
    scale = Normalize(low, high) if high > low else Normalize(low - 0.005, low + 0.005)
    colours = ScalarMappable(scale, "cividis")
    for index, row in eligible.iterrows():
        axes, accuracy = panels[row["method"]], row["acc_mean"]
        x, y, width, up = 0, 0, *size
        if row["method"] in reading:
            x, y, width, up = samples.index(row["num_samples"]), seq_lens.index(row["seq_len"]), 1, 1
        edge = _BEST if index == model.best.name else _TIED if index in tied else _PLAIN
        face = colours.to_rgba(accuracy) if index in cells.index else "none"
        axes.add_patch(Rectangle((x, y), width, up, facecolor=face, clip_on=False, **edge))
        if index in cells.index and max(size) <= MAX_LEVELS:
            ink = "black" if scale(accuracy) > 0.47 else "white"  # there, cividis has the same contrast to both
            centre = x + width / 2, y + up / 2
            axes.text(*centre, printed(accuracy, "acc3"), color=ink, fontsize=TINY, ha="center", va="center")
    figure.supxlabel(HYPERPARAMETERS["num_samples"].label)
    figure.supylabel(HYPERPARAMETERS["seq_len"].label)
    bar = figure.colorbar(colours, ax=grid, pad=0.02, fraction=0.05, aspect=25)
    bar.set_label(figure_style.fractions(ACCURACY, bar.ax))
    bar.outline.set_visible(False)
    bar.solids.set(edgecolor="face", rasterized=False)  # type: ignore[union-attr]
    keys = [Patch(facecolor="none", label="best", **_BEST)]
    if len(tied) > 1:
        keys.append(Patch(facecolor="none", label="too close to call (95%)", **_TIED))
    missing = sum(math.prod(size) if method in reading else 1 for method in names) - len(cells)
    if missing:
        keys.append(Patch(label=f"no complete trial ({missing})", **_MISSING))
    return figure_style.with_legend(figure, keys)
