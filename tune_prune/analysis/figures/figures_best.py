"""Pictures of one pruned model: its gradients and what each layer lost and kept, from the files in its trial folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tune_prune.analysis.figures import figure_style
from tune_prune.analysis.figures.figure_style import BLACK, BLUE, GREY, ORANGE, SMALL
from tune_prune.core.errors import UserError
from tune_prune.core.files import number, parse_json
from tune_prune.core.ledger import trial_file
from tune_prune.core.store import GRADIENTS, PLAN_COMPARISON, Location

MAX_LAYERS_IN_COLUMN = 40  # more, and the figure is as wide as the page
_CIRCLE: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 3.5, "linewidth": 1}
_SQUARE: dict[str, Any] = {"color": ORANGE, "marker": "s", "markersize": 3.5, "linewidth": 1}
_PARTS = (("kv_groups", "attention (KV groups)", _SQUARE), ("mlp_channels", "MLP (channels)", _CIRCLE))


def draw_best(trial_folder: Location, folder: Path) -> list[Path]:
    """Write gradient_analysis.png, pruning_ratio.png and retention_ratio.png of a trial into `folder`.

    A picture whose file is not in `trial_folder` is left out. UserError if a file is damaged.
    """
    figures = {}
    with figure_style.style():
        gradients = layer_table(trial_folder / GRADIENTS, ["grad_mean", "grad_norm"])
        if gradients is not None:
            figures["gradient_analysis"] = gradient_figure(gradients)
        kept = layer_shares(trial_folder)
        if kept is not None:
            figures |= {"pruning_ratio": pruning_figure(kept), "retention_ratio": retention_figure(kept)}
        return figure_style.save(figures, folder, ("png",))


def layer_table(path: Location, columns: list[str]) -> pd.DataFrame | None:
    """The `columns` of every layer in a trial's JSON file, indexed by layer; None if there is no such file."""
    found = trial_file(path.parent, path.name)
    if found is None:
        return None
    content = parse_json(path, found)
    try:
        table = pd.DataFrame(content["layers"]).astype({"layer": "int64"}).set_index("layer")
        return table[columns].map(number).astype("float64")
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(columns)
        raise UserError(
            f"{path} has no layers with {names}; restore it from a copy, or move it away to leave its figures out"
        ) from error


def layer_shares(trial_folder: Location) -> pd.DataFrame | None:
    """The share of each layer that a trial kept, of kv_groups, mlp_channels and params; None if its file is not there."""
    names = ("kv_groups", "mlp_channels", "params")
    columns = [f"{name}_{when}" for name in names for when in ("before", "kept")]
    table = layer_table(trial_folder / PLAN_COMPARISON, columns)
    if table is None:
        return None
    return pd.DataFrame({name: table[f"{name}_kept"] / table[f"{name}_before"] for name in names})


def retention_figure(kept: pd.DataFrame) -> Figure:
    """The kept share of every layer's KV groups and MLP channels, from `layer_shares`."""
    figure, (axes,) = _panels(kept, 1, 2.1)
    axes.set(ylim=(0, 1.02), ylabel=figure_style.fractions("Share kept", axes))
    for part, label, style in _PARTS:
        axes.plot(kept[part], label=label, clip_on=False, **style)
    axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":", zorder=1, label="half")
    return figure_style.with_legend(figure)


def pruning_figure(kept: pd.DataFrame) -> Figure:
    """The removed share of every layer's KV groups and MLP channels as bars, and of its parameters as a line."""
    figure, (axes,) = _panels(kept, 1, 2.1)
    axes.set(ylim=(0, 1.02), ylabel=figure_style.fractions("Share removed", axes))
    for side, (part, label, style) in zip((-0.21, 0.21), _PARTS, strict=True):
        bar: dict[str, Any] = {"color": style["color"], "edgecolor": BLACK, "linewidth": 0.3}
        axes.bar(kept.index + side, 1 - kept[part], 0.42, label=label, **bar)
    line: dict[str, Any] = {"fmt": "none", "ecolor": BLACK, "elinewidth": 1.4, "capsize": 0}
    axes.errorbar(kept.index, 1 - kept["params"], xerr=0.3, label="whole layer", **line)
    return figure_style.with_legend(figure)


def gradient_figure(gradients: pd.DataFrame) -> Figure:
    """Mean |G| and ||G|| of every layer, on logarithmic scales, with the ratio of the largest to the smallest."""
    figure, grid = _panels(gradients, 2, 1.45)
    shown = (("grad_mean", "Mean |G|", _CIRCLE), ("grad_norm", "Norm ‖G‖", _SQUARE))
    for axes, (column, label, style) in zip(grid, shown, strict=True):
        values = gradients[column]
        positive = values[np.isfinite(values) & (values > 0)]
        axes.plot(positive, **style)
        axes.set_ylabel(label)
        figure_style.spread_axis(axes.yaxis)
        hidden = len(values) - len(positive)
        title = f"{hidden} zero or not finite" if hidden else f"largest / smallest: {values.max() / values.min():.3g}"
        axes.set_title(title, fontsize=SMALL, loc="right", color=GREY, pad=2)
    figure.align_ylabels()
    return figure


def _panels(table: pd.DataFrame, count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels below each other, over the layers."""
    wide = len(table) > MAX_LAYERS_IN_COLUMN
    figure, grid = figure_style.panels(count, height, wide, columns=1, sharex=True)
    grid[-1].set(xlabel="Layer", xlim=(table.index.min() - 0.6, table.index.max() + 0.6))
    grid[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure, grid
