"""Pictures of one pruned model: its gradients and what each layer lost and kept, from the files in its trial folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tune_prune.analysis.figures import figure_style
from tune_prune.analysis.figures.figure_style import BLACK, BLUE, DOUBLE, GREY, ORANGE, SINGLE, SMALL
from tune_prune.analysis.statistics.findings import ModelFindings
from tune_prune.core.errors import UserError
from tune_prune.core.files import number, parse_json
from tune_prune.core.store import GRADIENTS, PLAN_COMPARISON

MAX_LAYERS_IN_COLUMN = 40
_PARTS = (("kv_groups", "attention (KV groups)", ORANGE, "s"), ("mlp_channels", "MLP (channels)", BLUE, "o"))


def draw_best(model: ModelFindings, trial_folder: Path, folder: Path) -> list[Path]:
    """Write gradient_analysis.png, pruning_ratio.png and retention_ratio.png of a model's best configuration into `folder`.

    A picture whose file is not in `trial_folder` is left out. UserError if a file is damaged.
    """
    drawn = []
    with figure_style.style():
        gradients = layer_table(trial_folder / GRADIENTS, ("grad_mean", "grad_norm"))
        if gradients is not None:
            drawn.append((gradient_figure(gradients), "gradient_analysis"))
        kept = layer_shares(trial_folder)
        if kept is not None:
            drawn += [(pruning_figure(kept), "pruning_ratio"), (retention_figure(kept), "retention_ratio")]
        return [path for figure, stem in drawn for path in figure_style.save(figure, folder, stem, ("png",))]


def layer_table(path: Path, columns: Sequence[str]) -> pd.DataFrame | None:
    """The `columns` of every layer in a trial's JSON file, indexed by layer; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        layers: list[dict[str, Any]] = parse_json(path)["layers"]
        values = {name: [float(number(layer[name])) for layer in layers] for name in columns}
        return pd.DataFrame(values, index=pd.Index([int(layer["layer"]) for layer in layers], name="layer"))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} has no layers with {', '.join(columns)} ({error!r}); delete it to leave its figures out"
        ) from error


def layer_shares(trial_folder: Path) -> pd.DataFrame | None:
    """The share of each layer that a trial kept, of kv_groups, mlp_channels and params; None if its file is not there."""
    names = ("kv_groups", "mlp_channels", "params")
    columns = [f"{name}_{when}" for name in names for when in ("before", "kept")]
    table = layer_table(trial_folder / PLAN_COMPARISON, columns)
    if table is None:
        return None
    return pd.DataFrame({name: table[f"{name}_kept"] / table[f"{name}_before"] for name in names})


def retention_figure(kept: pd.DataFrame) -> Figure:
    """The kept share of every layer's KV groups and MLP channels, from `layer_shares`."""
    figure = _figure(kept, 2.1)
    axes = figure.subplots()
    axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":")
    for part, label, colour, marker in _PARTS:
        size: dict[str, Any] = {"markersize": 3.5, "markeredgecolor": BLACK, "markeredgewidth": 0.4}
        axes.plot(kept.index, kept[part], color=colour, marker=marker, label=label, linewidth=1, clip_on=False, **size)
    _share_axes(axes, kept, "Share kept")
    half = Line2D([], [], color=GREY, linewidth=0.6, linestyle=":", label="half")
    figure_style.legend_above(figure, [*axes.get_legend_handles_labels()[0], half])
    return figure


def pruning_figure(kept: pd.DataFrame) -> Figure:
    """The removed share of every layer's KV groups and MLP channels as bars, and of its parameters as a line."""
    figure = _figure(kept, 2.1)
    axes = figure.subplots()
    for side, (part, label, colour, _) in zip((-0.21, 0.21), _PARTS, strict=True):
        axes.bar(kept.index + side, 1 - kept[part], 0.42, color=colour, edgecolor=BLACK, linewidth=0.3, label=label)
    line: dict[str, Any] = {
        "linestyle": "none",
        "marker": "_",
        "markersize": min(9.0, 150 / len(kept)),
        "markeredgewidth": 1.4,
    }
    axes.plot(kept.index, 1 - kept["params"], color=BLACK, label="whole layer", **line)
    _share_axes(axes, kept, "Share removed")
    handles, _ = axes.get_legend_handles_labels()
    figure_style.legend_above(figure, [*handles[1:], handles[0]])
    return figure


def gradient_figure(gradients: pd.DataFrame) -> Figure:
    """Mean |G| and ||G|| of every layer, on logarithmic scales, with the ratio of the largest to the smallest."""
    figure = _figure(gradients, 2.9)
    upper, lower = figure.subplots(2, sharex=True)
    for axes, column, label, colour, marker in (
        (upper, "grad_mean", "Mean |G|", BLUE, "o"),
        (lower, "grad_norm", "Norm ‖G‖", ORANGE, "s"),
    ):
        values = gradients[column]
        shown = values[np.isfinite(values) & (values > 0)]
        size: dict[str, Any] = {"markersize": 3.5, "markeredgecolor": BLACK, "markeredgewidth": 0.4}
        axes.plot(shown.index, shown, color=colour, marker=marker, linewidth=1, **size)
        figure_style.spread_axis(axes, "y", shown)
        axes.set_ylabel(label)
        hidden = len(values) - len(shown)
        says = (
            f"largest / smallest: {values.max() / values.min():.3g}" if hidden == 0 else f"{hidden} zero or not finite"
        )
        axes.set_title(says, fontsize=SMALL, loc="right", color=GREY, pad=2)
    _layer_axis(lower, gradients)
    return figure


def _figure(table: pd.DataFrame, height: float) -> Figure:
    """Of a deep model's layers, a figure as wide as the page."""
    return Figure(figsize=(SINGLE if len(table) <= MAX_LAYERS_IN_COLUMN else DOUBLE, height), layout="constrained")


def _share_axes(axes: Axes, kept: pd.DataFrame, label: str) -> None:
    axes.set_ylim(0, 1.02)
    axes.set_ylabel(label)
    _layer_axis(axes, kept)


def _layer_axis(axes: Axes, table: pd.DataFrame) -> None:
    axes.set_xlabel("Layer")
    axes.set_xlim(table.index.min() - 0.6, table.index.max() + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
