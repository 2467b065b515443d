"""The small drawing on each model's card: every configuration's accuracy by rank, with its standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics.findings import ModelFindings

WIDTH, HEIGHT = 360, 116  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 42, 10, 8, 22  # margins around the plotted area


@dataclass(frozen=True)
class Point:
    """A configuration: where it is drawn, and its bar of one standard error to either side (None: not known)."""

    x: float
    y: float
    bar: tuple[float, float] | None
    style: str  # CSS class
    title: str


@dataclass(frozen=True)
class RankPlot:
    points: Sequence[Point]  # the one last drawn stands in front
    ticks: Sequence[tuple[float, str]]  # y and its accuracy
    dense: float | None  # y of the dense model
    text: str  # the drawing in words


def rank_plot(found: ModelFindings) -> RankPlot:
    """The drawing for one model; its y axis spans all configurations and the dense model, where that is known."""
    rows = found.eligible
    accuracy = rows["acc_mean"].to_numpy(float)
    stderr = np.nan_to_num(rows["acc_mean_stderr"].to_numpy(float))
    dense = found.model.baseline.get("acc_mean")
    dense = None if messages.missing(dense) else dense
    low, high = min(accuracy - stderr), max(*(accuracy + stderr), -np.inf if dense is None else dense)
    span = (high - low) or 1.0

    def y(value: float) -> float:
        return round(TOP + (high - value) / span * (HEIGHT - TOP - BOTTOM), 1)

    step = (WIDTH - LEFT - RIGHT) / max(1, len(rows) - 1)
    points = []
    for rank, row in enumerate(rows.to_dict("records")):
        style = "best" if row["name"] == found.best["name"] else "near" if row["name"] in found.tied else "far"
        error = row["acc_mean_stderr"]
        bar = None if messages.missing(error) else (y(row["acc_mean"] - error), y(row["acc_mean"] + error))
        title = f"{row['name']}: {messages.pm(row['acc_mean'], error)}"
        points.append(
            Point(round(LEFT + 4 + rank * (step - 8 / max(1, len(rows))), 1), y(row["acc_mean"]), bar, style, title)
        )
    points.sort(key=lambda point: ("far", "near", "best").index(point.style))
    ticks = [(y(value), messages.acc(value)) for value in (accuracy.min(), accuracy.max())]
    if ticks[0][0] - ticks[1][0] < 12:  # one number where two would overlap
        ticks = ticks[1:]
    if dense is not None and ticks[-1][0] - y(dense) >= 12:
        ticks.append((y(dense), messages.acc(dense)))
    text = (
        f"Accuracy of {len(rows)} configurations by rank, from {messages.acc(accuracy.min())} to {messages.acc(accuracy.max())}"
        + ("" if dense is None else f"; the dense model has {messages.acc(dense)}")
    )
    return RankPlot(points, ticks, None if dense is None else y(dense), text)
