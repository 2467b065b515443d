"""How every figure looks, and how it is saved: sizes, colours, scales, panels; PNG and PDF that are the same bytes each time.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tune_prune.core.files import atomic_write_bytes

SINGLE, DOUBLE = 3.3, 6.9  # inches: width of one column and of both
SMALL, TINY = 7, 6  # pt; all else is 8
DPI = 200  # of the PNGs
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
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a label with a dollar sign is a label
    "pdf.fonttype": 42,  # TrueType, embedded: journals refuse Type 3
    "savefig.dpi": DPI,
}


@contextmanager
def style() -> Iterator[None]:
    """Figures made and saved inside look as declared here, whatever the user's matplotlibrc says."""
    with matplotlib.style.context(_STYLE, after_reset=True):
        yield


@dataclass(frozen=True)
class Look:
    """A method's colour and marker."""

    colour: str
    marker: str


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of each method, in the order in which methods are drawn."""
    named = set(methods)
    order = [*_FIRST, *sorted(named - set(_FIRST))]
    return {
        method: Look(_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)])
        for place, method in enumerate(order)
        if method in named
    }


def series() -> Iterator[Look]:
    """Looks for what is no method, one after the other without end."""
    return (Look(_COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]) for place in itertools.count())


def panels(titles: Sequence[str], height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of `height` inches per title: one is as wide as a column, several as wide as a page.

    A panel alone has no title: the caption says what it is.
    """
    columns = min(len(titles), PANELS_PER_ROW)
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(SINGLE if columns == 1 else DOUBLE, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in grid[len(titles) :]:
        axes.remove()
    if len(titles) > 1:
        for axes, title in zip(grid, titles, strict=False):
            axes.set_title(wrapped(title))
    return figure, grid[: len(titles)]


def wrapped(label: str) -> str:
    """A model's label, in lines that four panels beside each other have room for."""
    return textwrap.fill(label, MAX_LABEL)


def label_outer(axes: Sequence[Axes], x: str | None = None, y: str | None = None) -> None:
    """Name the axes once: `y` at the first panel of each row, `x` at the last panel of each column."""
    for place, panel in enumerate(axes):
        if y is not None and place % PANELS_PER_ROW == 0:
            panel.set_ylabel(y)
        if x is not None and place + PANELS_PER_ROW >= len(axes):
            panel.set_xlabel(x)


def legend_above(figure: Figure, handles: Sequence[Any]) -> None:
    """One legend for all panels, above them, in as few lines as the width allows; the figure grows by those."""
    widths = [24 + 0.56 * SMALL * len(handle.get_label()) for handle in handles]  # pt: handle, gaps and the text, about
    columns = len(handles)
    while columns > 1 and _legend_width(widths, columns) > 72 * figure.get_figwidth():
        columns -= 1
    figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(handles) / columns))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)


def _legend_width(widths: Sequence[float], columns: int) -> float:
    """The width of a legend whose entries fill one column after the other, as matplotlib does it."""
    short, longer = divmod(len(widths), columns)
    ends = np.cumsum([short + (column < longer) for column in range(columns)])
    return sum(max(column) for column in np.split(np.asarray(widths), ends[:-1]))


def key(look: Look, label: str, **line: Any) -> Line2D:
    """A legend entry with the method's marker."""
    drawn: dict[str, Any] = {"linestyle": "none", "markeredgecolor": BLACK, "markeredgewidth": 0.4} | line
    return Line2D([], [], color=look.colour, marker=look.marker, label=label, **drawn)


def spread_axis(axes: Axes, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """Scale for measured values: logarithmic where they span more than a factor of four; plain numbers at the ticks.
    A panel without any value has no ticks."""
    numbers = [float(value) for value in values]
    if not numbers:
        axes.set(xticks=[], yticks=[])
        return
    axis: Axis = getattr(axes, f"{which}axis")
    low, high = min(numbers), max(numbers)
    beside = min(len(axes.figure.axes), PANELS_PER_ROW)
    most = {1: 6, 2: 6, 3: 4, 4: 3}[beside]
    if low > 0 and high > 4 * low:
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(FixedLocator(_log_ticks(low, high, most)))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(min(4, most)))
    axis.set_major_formatter(FuncFormatter(_plain_number))


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round numbers between `low` and `high`, as many as can be had."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= most:
            break
    return thinned(ticks, most)


def level_axis(axes: Axes, levels: Sequence[int]) -> None:
    """Horizontal scale for a factor's ascending levels: a logarithmic one, on which powers are evenly spaced; ticks at levels."""
    axes.set_xscale("log", base=2)
    apart = math.log(levels[-1] / levels[0]) / MAX_TICKS
    shown: list[int] = []
    for level in levels:
        if not shown or math.log(level / shown[-1]) >= apart:
            shown.append(level)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_plain_number))


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly spread, the first among them."""
    return list(values[:: max(1, math.ceil(len(values) / most))])


def _plain_number(value: float, _position: int | None = None) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.6g}"


def tint(colour: str) -> tuple[float, ...]:
    """The colour, lightened for areas that stand behind points."""
    return tuple(0.65 + 0.35 * part for part in to_rgb(colour))


def readable_on(colours: np.ndarray) -> list[str]:
    """Black or white for text on each RGBA colour, by its relative luminance (WCAG 2)."""
    linear = np.where(colours <= 0.03928, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)[..., :3]
    return ["black" if light > 0.18 else "white" for light in (linear @ [0.2126, 0.7152, 0.0722]).ravel()]


def file_stems(labels: Iterable[str]) -> dict[str, str]:
    """A name for each label that any file system takes, different for each."""
    stems: dict[str, str] = {}
    for label in labels:
        stem = wanted = re.sub(r"[^A-Za-z0-9._+-]+", "_", label).strip("._") or "model"
        number = 1
        while stem.lower() in {other.lower() for other in stems.values()}:
            number += 1
            stem = f"{wanted}-{number}"
        stems[label] = stem
    return stems


def save(figure: Figure, folder: Path, stem: str, formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Write the figure once per format, each atomically, and return the paths; call it inside `style`."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()  # lays out; once is enough for all formats
    figure.set_layout_engine("none")
    paths = []
    for name in formats:
        content = io.BytesIO()
        undated = {"CreationDate": None} if name == "pdf" else {"Software": None}
        figure.savefig(content, format=name, metadata=undated)
        atomic_write_bytes(folder / f"{stem}.{name}", content.getvalue())
        paths.append(folder / f"{stem}.{name}")
    return paths
