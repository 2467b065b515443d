"""The look of every figure, and its files: sizes, colours, scales, panels; PNG and PDF that are the same bytes each time.

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
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from tune_prune.analysis.render.messages import in_percent
from tune_prune.core import terminal
from tune_prune.core.files import atomic_write_bytes

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

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "figure.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "lines.markeredgecolor": BLACK,
    "lines.markeredgewidth": 0.4,
    "errorbar.capsize": 2,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a label with a dollar sign is a label
    "pdf.fonttype": 42,  # TrueType, embedded: journals refuse Type 3
    "savefig.dpi": 200,
}


@contextmanager
def style() -> Iterator[None]:
    """Figures made and saved inside look as declared here, whatever the user's matplotlibrc says."""
    with matplotlib.style.context(_STYLE, after_reset=True):
        yield


def styles(names: Iterable[str], first: Sequence[str] = _FIRST) -> dict[str, dict[str, Any]]:
    """`color` and `marker` of each name, in the order in which they are drawn; those of `first` are theirs alone."""
    named = set(names)
    order = [*first, *sorted(named.difference(first))]
    each = zip(order, itertools.cycle(_COLOURS), itertools.cycle(_MARKERS), strict=False)
    return {name: {"color": colour, "marker": marker} for name, colour, marker in each if name in named}


def panels(
    count: int, height: float, wide: bool, columns: int = PANELS_PER_ROW, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure, as wide as a page (else as a column), with `count` panels of `height` inches, at most `columns` beside each
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
    """A model's label, in lines that four panels beside each other have room for."""
    return textwrap.fill(label, MAX_LABEL)


def with_legend(figure: Figure, handles: Sequence[Artist] = ()) -> Figure:
    """The figure, with one legend for all panels above them in as few lines as its width allows; it grows by those. The legend has
    `handles`, or else what is drawn in any panel under a label."""
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
    """Scale for what is drawn along `axis`: logarithmic where it spans more than a factor of four; plain numbers at the ticks, of
    which there are none where nothing is drawn."""
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
    """Scale for a factor's ascending levels: a logarithmic one, on which powers are evenly spaced; ticks at levels."""
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
    """A name for each label that any file system takes, different for each."""
    stems: dict[str, str] = {}
    for label in labels:
        wanted = re.sub(r"[^A-Za-z0-9._+@-]+", "_", label).strip("._") or "model"
        taken = {stem.lower() for stem in stems.values()}
        names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
        stems[label] = next(name for name in names if name.lower() not in taken)
    return stems


def save(figures: Mapping[str, Figure], folder: Path, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write each figure under its name once per format, atomically, and return the paths; call it inside `style`."""
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
