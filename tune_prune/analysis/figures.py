"""The figures of a paper: what was searched and what came of it, as PNG and PDF that are the same bytes each time. Every number
drawn is in `Findings`.

heatmap_<model>    accuracy over seq_len x num_samples, a panel per method
methods            the mean of each method, its spread, and every configuration
seq_len, num_samples, ...    accuracy against one hyperparameter, averaged over the others
ppl_accuracy       perplexity against accuracy
accuracy_cost      accuracy against what a trial costs
accuracy_size      accuracy of the best against the parameters kept, where a model was pruned at several ratios
pareto             accuracy against size, cache and speed, where speed was measured
retention_<model>  what each layer of the best configuration kept

`draw_best` draws one pruned model: its gradients and what each layer lost and kept, from the files in its trial folder.

Sizes are those of a two-column paper at 8 pt. The colours are Okabe and Ito's (Color Universal Design, 2008), which people with
any common colour blindness can tell apart; no colour carries a meaning alone: each method also has its marker. Figures are
`Figure` objects, so neither pyplot nor a display is needed.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tune_prune.analysis.input.rows import CALIBRATION
from tune_prune.analysis.render.messages import in_percent, printed
from tune_prune.analysis.statistics.effects import NUMERIC, level_table, methods_reading
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables.configurations import by_size, by_speed
from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_bytes, number, parse_json
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.ledger import trial_file
from tune_prune.core.store import GRADIENTS, PLAN_COMPARISON, Location, location

SINGLE, DOUBLE = 3.3, 6.9  # inches: width of one column and of both
SMALL, TINY = 7, 6  # pt; all else is 8
PANELS_PER_ROW = 4
MAX_LABEL = 20  # characters per line
MAX_TICKS = 6  # of a factor's scale: as many as the narrowest panel has room for, less one

ACCURACY = "Mean accuracy"  # label of an axis
BLACK, GREY, LIGHT = "#000000", "#666666", "#bbbbbb"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILLION, YELLOW = "#56b4e9", "#d55e00", "#f0e442"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_FIRST = ("taylor", "layerwise", "blockwise")  # the order of the paper; these look the same in every analysis


@contextmanager
def paper_style() -> Iterator[None]:
    """Figures made and saved inside look as declared here, whatever the user's matplotlibrc says."""
    with matplotlib.style.context(
        Path(__file__).parent / "render" / "templates" / "figures.mplstyle", after_reset=True
    ):
        yield


def looks(names: Iterable[str], first: Sequence[str] = _FIRST) -> dict[str, dict[str, Any]]:
    """`color` and `marker` of each name, in the order in which they are drawn; those of `first` are theirs alone."""
    named = set(names)
    order = [*first, *sorted(named.difference(first))]
    each = zip(order, itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    return {name: {"color": colour, "marker": marker} for name, colour, marker in each if name in named}


def new_panels(
    count: int, height: float, wide: bool, columns: int = PANELS_PER_ROW, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure, as wide as a page (else as a column), with `count` panels of `height` inches, at most `columns` beside each
    other."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(DOUBLE if wide else SINGLE, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **shared).ravel().tolist()
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[max(0, count - columns) : count]:  # also those above a place that is left empty
        axes.tick_params(labelbottom=True)
    return figure, grid[:count]


def wrapped(label: str) -> str:
    """Return a model's label, in lines that four panels beside each other have room for."""
    return textwrap.fill(label, MAX_LABEL)


def with_legend(figure: Figure, handles: Sequence[Artist] = ()) -> Figure:
    """Return the figure, with one legend for all panels above them in as few lines as its width allows; it grows by those. The
    legend has `handles`, or else what is drawn in any panel under a label."""
    drawn = [handle for axes in figure.axes for handle in axes.get_legend_handles_labels()[0]]
    keys = {handle.get_label(): handle for handle in handles or drawn}
    for columns in range(len(keys), 0, -1):
        figure.legends.clear()
        legend = figure.legend(handles=keys.values(), loc="outside upper center", ncols=columns)
        size = legend.get_window_extent()
        if size.width <= figure.bbox.width:
            break
    figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
    return figure


def fractions(label: str, *axes: Axes) -> str:
    """`label` for the vertical axes of `axes`, along which fractions are drawn; where accuracies are printed in percent the
    numbers at their ticks and the label are, too."""
    if not in_percent():
        return label
    for each in axes:
        each.yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    return f"{label} (%)"


def spread_axis(axis: XAxis | YAxis) -> None:
    """Set the scale for what is drawn along `axis`: logarithmic where it spans more than a factor of four; plain numbers at the
    ticks, of which there are none where nothing is drawn."""
    low, high = axis.get_data_interval()
    if low > high:
        axis.set_ticks([])
        return
    most = min(6, 12 // axis.axes.get_gridspec().ncols)  # type: ignore[union-attr]
    if low <= 0 or high <= 4 * low:
        axis.set_major_locator(MaxNLocator(min(4, most)))
        axis.set_major_formatter("{x:g}")
        return
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
        if len(ticks) <= most:
            break
    _log_axis(axis, ticks[:: math.ceil(len(ticks) / most)])


def level_axis(axis: XAxis | YAxis, levels: Sequence[int]) -> None:
    """Set the scale for a factor's ascending levels: a logarithmic one, on which powers are evenly spaced; ticks at levels."""
    apart = (levels[-1] / levels[0]) ** (1 / MAX_TICKS)
    ticks: list[int] = []
    for level in levels:
        if not ticks or level >= apart * ticks[-1]:
            ticks.append(level)
    _log_axis(axis, ticks)


def _log_axis(axis: XAxis | YAxis, ticks: Sequence[float]) -> None:
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_ticks(ticks)
    axis.minorticks_off()
    axis.set_major_formatter("{x:g}")


def file_stems(labels: Iterable[str]) -> dict[str, str]:
    """Return a name for each label that any file system takes, different for each."""
    stems: dict[str, str] = {}
    for label in labels:
        wanted = re.sub(r"[^A-Za-z0-9._+@-]+", "_", label).strip("._") or "model"
        taken = {stem.lower() for stem in stems.values()}
        names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
        stems[label] = next(name for name in names if name.lower() not in taken)
    return stems


def save(figures: Mapping[str, Figure], folder: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write each figure under its name once per format, atomically, and return the paths; call it inside `paper_style`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with terminal.step("figures", lambda: len(figures), "figures") as advance:
        for stem, figure in figures.items():
            figure.draw_without_rendering()  # lays out; once is enough for all formats
            figure.set_layout_engine("none")
            for kind in formats:
                content = io.BytesIO()
                figure.savefig(content, format=kind, metadata={"CreationDate": None})
                paths.append(folder / f"{stem}.{kind}")
                atomic_write_bytes(paths[-1], content.getvalue())
            advance(1)
    return paths


MAX_LEVELS = 12  # with a tick each; more, and the numbers in the cells could not be read
_PLAIN: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6, "zorder": 2.0}
_TIED: dict[str, Any] = {"edgecolor": VERMILLION, "linewidth": 0.8, "zorder": 2.1}
_BEST: dict[str, Any] = {"edgecolor": VERMILLION, "linewidth": 2.0, "zorder": 2.2}
_MISSING: dict[str, Any] = {"facecolor": "white", "edgecolor": LIGHT, "hatch": "/////"}


def heatmap(model: ModelFindings) -> Figure:
    """Draw acc_mean over seq_len (up) and num_samples (across), a panel per method, on one colour scale.

    Where several configurations share a cell, it shows the best of them. A method that reads neither has one cell.
    """
    rows, eligible = model.model.rows, model.eligible
    seq_lens, samples = (sorted(rows[factor].dropna().astype(int).unique()) for factor in CALIBRATION)
    size = (len(samples), len(seq_lens))
    reading = set.union(*(methods_reading(rows, factor) for factor in CALIBRATION))
    names = list(looks(rows["method"]))
    wide = min(len(names), PANELS_PER_ROW) * len(samples) > 9
    height = 0.9 + 0.27 * min(11, max(3, len(seq_lens)))
    figure, grid = new_panels(len(names), height, wide, sharex=True, sharey=True)
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
    bar.set_label(fractions(ACCURACY, bar.ax))
    bar.outline.set_visible(False)
    bar.solids.set(edgecolor="face", rasterized=False)  # type: ignore[union-attr]
    keys = [Patch(facecolor="none", label="best", **_BEST)]
    if len(tied) > 1:
        keys.append(Patch(facecolor="none", label="too close to call (95%)", **_TIED))
    missing = sum(math.prod(size) if method in reading else 1 for method in names) - len(cells)
    if missing:
        keys.append(Patch(label=f"no complete trial ({missing})", **_MISSING))
    return with_legend(figure, keys)


MAX_LAYERS_IN_COLUMN = 40  # more, and the figure is as wide as the page
_CIRCLE: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 3.5, "linewidth": 1}
_SQUARE: dict[str, Any] = {"color": ORANGE, "marker": "s", "markersize": 3.5, "linewidth": 1}
_PARTS = (("kv_groups", "attention (KV groups)", _SQUARE), ("mlp_channels", "MLP (channels)", _CIRCLE))


def draw_best(trial_folder: Location, folder: Path) -> list[Path]:
    """Write gradient_analysis.png, pruning_ratio.png and retention_ratio.png of a trial into `folder`.

    A picture whose file is not in `trial_folder` is left out. UserError if a file is damaged.
    """
    figures = {}
    with paper_style():
        gradients = layer_table(trial_folder / GRADIENTS, ["grad_mean", "grad_norm"])
        if gradients is not None:
            figures["gradient_analysis"] = gradient_figure(gradients)
        shares = layer_shares(trial_folder)
        if shares is not None:
            figures |= {"pruning_ratio": pruning_figure(shares), "retention_ratio": retention_figure(shares)}
        return save(figures, folder, ("png",))


def layer_table(path: Location, columns: list[str]) -> pd.DataFrame | None:
    """Return the `columns` of every layer in a trial's JSON file, indexed by layer; None if there is no such file."""
    file = trial_file(path.parent, path.name)
    if file is None:
        return None
    content = parse_json(path, file)
    try:
        table = pd.DataFrame(content["layers"]).astype({"layer": "int64"}).set_index("layer")
        return table[columns].map(number).astype("float64")
    except (KeyError, TypeError, ValueError) as error:
        names = ", ".join(columns)
        raise UserError(
            f"{path} has no layers with {names}; restore it from a copy, or move it away to leave its figures out"
        ) from error


def layer_shares(trial_folder: Location) -> pd.DataFrame | None:
    """Return the share of each layer that a trial kept, of kv_groups, mlp_channels and params; None if its file is not there."""
    names = ("kv_groups", "mlp_channels", "params")
    columns = [f"{name}_{when}" for name in names for when in ("before", "kept")]
    table = layer_table(trial_folder / PLAN_COMPARISON, columns)
    if table is None:
        return None
    return pd.DataFrame({name: table[f"{name}_kept"] / table[f"{name}_before"] for name in names})


def retention_figure(shares: pd.DataFrame) -> Figure:
    """Draw the kept share of every layer's KV groups and MLP channels, from `layer_shares`."""
    figure, (axes,) = _layer_panels(shares, 1, 2.1)
    axes.set(ylim=(0, 1.02), ylabel=fractions("Share kept", axes))
    for part, label, style in _PARTS:
        axes.plot(shares[part], label=label, clip_on=False, **style)
    axes.axhline(0.5, color=GREY, linewidth=0.6, linestyle=":", zorder=1, label="half")
    return with_legend(figure)


def pruning_figure(shares: pd.DataFrame) -> Figure:
    """Draw the removed share of every layer's KV groups and MLP channels as bars, and of its parameters as a line."""
    figure, (axes,) = _layer_panels(shares, 1, 2.1)
    axes.set(ylim=(0, 1.02), ylabel=fractions("Share removed", axes))
    for side, (part, label, style) in zip((-0.21, 0.21), _PARTS, strict=True):
        bar: dict[str, Any] = {"color": style["color"], "edgecolor": BLACK, "linewidth": 0.3}
        axes.bar(shares.index + side, 1 - shares[part], 0.42, label=label, **bar)
    line: dict[str, Any] = {"fmt": "none", "ecolor": BLACK, "elinewidth": 1.4, "capsize": 0}
    axes.errorbar(shares.index, 1 - shares["params"], xerr=0.3, label="whole layer", **line)
    return with_legend(figure)


def gradient_figure(gradients: pd.DataFrame) -> Figure:
    """Draw mean |G| and ||G|| of every layer, on logarithmic scales, with the ratio of the largest to the smallest."""
    figure, grid = _layer_panels(gradients, 2, 1.45)
    shown = (("grad_mean", "Mean |G|", _CIRCLE), ("grad_norm", "Norm ‖G‖", _SQUARE))
    for axes, (column, label, style) in zip(grid, shown, strict=True):
        values = gradients[column]
        positive = values[np.isfinite(values) & (values > 0)]
        axes.plot(positive, **style)
        axes.set_ylabel(label)
        spread_axis(axes.yaxis)
        hidden = len(values) - len(positive)
        title = f"{hidden} zero or not finite" if hidden else f"largest / smallest: {values.max() / values.min():.3g}"
        axes.set_title(title, fontsize=SMALL, loc="right", color=GREY, pad=2)
    figure.align_ylabels()
    return figure


def _layer_panels(table: pd.DataFrame, count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return panels below each other, over the layers."""
    wide = len(table) > MAX_LAYERS_IN_COLUMN
    figure, grid = new_panels(count, height, wide, columns=1, sharex=True)
    grid[-1].set(xlabel="Layer", xlim=(table.index.min() - 0.6, table.index.max() + 0.6))
    grid[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure, grid


_DENSE: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 7}
_RING = _DENSE | {"marker": "o", "markersize": 8, "markeredgewidth": 1.2, "fillstyle": "none"}


def draw_all(findings: Findings, folder: Path) -> list[Path]:
    """Write every figure of one model or more into `folder` as PNG and PDF and return the paths.

    Left out are hyperparameters of which every model has one level, ppl_accuracy where no perplexity is finite, accuracy_size
    where every model has one ratio, pareto where no speed was measured, and retention_<model> where the best trial's folder is
    not there. UserError if a file in it is damaged.
    """
    models = findings.models
    stems = file_stems(models)
    with paper_style():
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
            shares = layer_shares(location(folder_of_best)) if folder_of_best else None
            if shares is not None:
                figures[f"retention_{stems[label]}"] = retention_figure(shares)
        return save(figures, folder)


def methods(models: Mapping[str, ModelFindings]) -> Figure:
    """Draw a bar from zero per method, a panel per model: the mean of its configurations, their standard deviation, and each of
    them.

    The points of a bar are its configurations by seq_len, then num_samples, from left to right.
    """
    styles = _looks(models)
    wide = len(models) > 2 or len(models) * len(styles) > 8  # so that each label and mean has room
    columns = max(1, min(PANELS_PER_ROW, 20 // len(styles)))
    figure, grid = new_panels(len(models), 1.9, wide, columns, sharey=True)
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
        axes.set_xticks([(len(styles) - 1) / 2], [wrapped(label)])
        axes.set_xlim(-0.55, len(styles) - 0.45)
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
    figure.supylabel(fractions(ACCURACY, *grid))
    return with_legend(figure)


def curves(models: Mapping[str, ModelFindings], factor: str) -> Figure:
    """Draw acc_mean against the levels of `factor`, a panel per model: each method's mean over the other hyperparameters with its
    standard error over those configurations (none where there is one), and the mean over all of them (`ModelFindings.levels`). A
    method that does not read `factor` is a level line."""
    styles = _looks(models)
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
        level_axis(axes.xaxis, mean.index.tolist())
    return with_legend(figure)


def ppl_accuracy(models: Mapping[str, ModelFindings]) -> Figure:
    """Draw perplexity against acc_mean, a panel per model, with the dense model where it is known."""
    figure, grid = _panels(models, 2.0, "Perplexity")
    for axes, model in zip(grid, models.values(), strict=True):
        _scatter(axes, model, model.eligible["ppl"], _looks(models))
        dense = [model.model.baseline.get(name, math.nan) for name in ("ppl", "acc_mean")]
        if all(map(math.isfinite, dense)):
            axes.plot(*dense, **_DENSE, color=BLACK, label="original model")
        spread_axis(axes.xaxis)
    return with_legend(figure)


def accuracy_cost(models: Mapping[str, ModelFindings]) -> Figure:
    """Draw acc_mean against the trial's time (calibration tokens where a model's trials have none), a panel per model; the line
    is the best that can be had at each cost."""
    figure, grid = _panels(models, 2.0)
    for axes, model in zip(grid, models.values(), strict=True):
        timed = bool(np.isfinite(model.eligible["elapsed_time"]).all())
        cost = model.eligible["elapsed_time" if timed else "tokens"].astype("float64")
        _scatter(axes, model, cost, _looks(models))
        highest = model.eligible["acc_mean"].groupby(cost).max().cummax()
        line: dict[str, Any] = {"drawstyle": "steps-post", "color": GREY, "linewidth": 0.8, "zorder": 1}
        axes.plot(highest.index, highest, **line, label="best at this cost")
        axes.set_xlabel("Seconds of a trial on its machine" if timed else "Calibration tokens")
        spread_axis(axes.xaxis)
    return with_legend(figure)


def accuracy_size(sizes: pd.DataFrame) -> Figure:
    """Draw acc_mean and its standard error of each model's best configurations (`configurations.by_size`) against the percentage
    of parameters kept; stars are the dense models, bands go from the lowest to the highest draw of calibration samples."""
    figure, (axes,) = new_panels(1, 2.2, wide=False)
    styles = looks(sizes["model"], first=())
    for label, rows in sizes.groupby("model"):
        style, dense = styles[str(label)], rows[rows["ratio"] == 0]
        values = (100 * rows["kept"], rows["acc_mean"], rows["acc_mean_stderr"])
        pruned = (rows["ratio"] > 0).tolist()
        label = wrapped(str(label))
        axes.errorbar(*values, elinewidth=0.8, linewidth=1, markevery=pruned, label=label, **style)
        of_draws = (rows["acc_lowest"].fillna(rows["acc_mean"]), rows["acc_highest"].fillna(rows["acc_mean"]))
        axes.fill_between(values[0], *of_draws, color=style["color"], alpha=0.18, linewidth=0)
        axes.plot(100 * dense["kept"], dense["acc_mean"], color=style["color"], **_DENSE)
    if (sizes["ratio"] == 0).any():
        axes.plot([], [], color=BLACK, label="original model", **_DENSE)
    if (sizes["acc_lowest"] < sizes["acc_highest"]).any():
        axes.plot([], [], color=GREY, alpha=0.25, linewidth=5, label="lowest to highest run")
    axes.set(xlabel="Parameters kept (%)", ylabel=fractions(ACCURACY, axes))
    return with_legend(figure)


def pareto(speeds: pd.DataFrame) -> Figure:
    """Draw acc_mean of the configurations of `configurations.by_speed` against four costs, a row of panels per model, with all
    its ratios: parameters and KV bytes per token in percent of the dense model's, prefill and decode as multiples of its speed,
    from the lowest to the highest round. Filled: Pareto-optimal at its ratio; ringed: the best of its ratio; star: the dense
    model."""
    names = speeds["series"].unique()
    figure, grid = new_panels(4 * len(names), 2.0, wide=True, sharey="row")
    styles = looks(set(speeds["method"]) - {"dense"})
    costs = {"kept": (100, "Parameters (%)"), "kv_kept": (100, "KV bytes/token (%)")}
    costs |= {"prefill": (1, "Prefill (x original)"), "decode": (1, "Decode (x original)")}
    for place, axes in enumerate(grid):
        rows = speeds[speeds["series"] == names[place // 4]]
        cost, (scale, label) = list(costs.items())[place % 4]
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
                shown = of & (pruned["method"] == method)
                axes.plot(x[shown], y[shown], linestyle="none", label=None if face else method, **style, **face)
        best = pruned["best"].astype("bool")
        axes.plot(x[best], y[best], **_RING, color=BLACK, zorder=4, label="best")
        axes.plot(scale * dense[cost], dense["acc_mean"], **_DENSE, color=BLACK, zorder=4, label="original model")
        if not optimal.all():
            hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": GREY}
            axes.plot([], [], linestyle="none", marker="o", **hollow, label="not Pareto-optimal")
        axes.set_xlabel(label)
        axes.set_title(wrapped(names[place // 4]) if len(names) > 1 and place % 4 == 0 else "")
    figure.supylabel(fractions(ACCURACY, *grid))
    return with_legend(figure)


def _panels(models: Mapping[str, ModelFindings], height: float, x: str = "") -> tuple[Figure, list[Axes]]:
    """Return a panel per model, with its label above it; a panel alone has none: the caption says what it is."""
    figure, grid = new_panels(len(models), height, wide=len(models) > 1)
    for axes, label in zip(grid, models, strict=True):
        axes.set_title(wrapped(label) if len(models) > 1 else "")
    figure.supxlabel(x)
    figure.supylabel(fractions(ACCURACY, *grid))
    return figure, grid


def _of(model: ModelFindings, method: str) -> pd.DataFrame:
    """Return the eligible rows of a method."""
    return model.eligible[model.eligible["method"] == method]


def _looks(models: Mapping[str, ModelFindings]) -> dict[str, dict[str, Any]]:
    return looks(method for model in models.values() for method in model.methods.index)


def _scatter(axes: Axes, model: ModelFindings, x: pd.Series, styles: Mapping[str, dict[str, Any]]) -> None:
    """Draw the configurations at `x` and acc_mean, the best ringed; what has no finite `x` is counted in the panel. Hollow: less
    accurate than some other (95%, where that is known)."""
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
