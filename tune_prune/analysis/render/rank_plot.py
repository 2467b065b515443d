"""The small drawing on each model's card: every configuration's accuracy by rank, with its standard error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tune_prune.analysis.render import messages
from tune_prune.analysis.statistics.findings import ModelFindings

_APART = 14  # percent of the height between two numbers that do not overlap


def rank_plot(found: ModelFindings) -> dict[str, Any]:
    """What the macro `drawing` of report.html.j2 draws of one model; places in percent of the plotted area, from its upper left.

    points  of each configuration x, y, low and high (one standard error to either side; None: not known), style (a CSS class),
            title; the one last drawn stands in front
    ticks   y and its accuracy
    far     what the style "far" says of a point
    dense   y of the dense model, None where it is not known
    text    the drawing in words
    """
    rows, dense = found.eligible, found.model.baseline.get("acc_mean", math.nan)
    accuracy, stderr = (rows[name].to_numpy(float) for name in ("acc_mean", "acc_mean_stderr"))
    lowest = np.nanmin([*(accuracy - np.nan_to_num(stderr)), dense])
    highest = np.nanmax([*(accuracy + np.nan_to_num(stderr)), dense])

    def y(value: float) -> float | None:
        return round(100 * (highest - value) / ((highest - lowest) or 1), 1) if math.isfinite(value) else None

    points = [
        {
            "x": round(x, 1),
            "y": y(value),
            "low": y(value - error),
            "high": y(value + error),
            "style": "best" if name == found.best["name"] else "near" if name in found.marked else "far",
            "title": f"{name}: {messages.pm(value, error)}",
        }
        for name, x, value, error in zip(rows["name"], np.linspace(1, 99, len(rows)), accuracy, stderr, strict=True)
    ]
    points.sort(key=lambda point: ("far", "near", "best").index(point["style"]))
    ticks: dict[float, str] = {}
    for value in (accuracy.max(), accuracy.min(), dense):
        place = y(value)
        if place is not None and all(abs(place - other) >= _APART for other in ticks):
            ticks[place] = messages.acc(value)
    far = "others" if rows["p_value"].isna().any() else "less accurate"  # what was not compared is only not known to be
    text = f"Accuracy of {len(rows)} configurations by rank, from {messages.acc(accuracy.min())} to {messages.acc(accuracy.max())}"
    if math.isfinite(dense):
        text += f"; the original model has {messages.acc(dense)}"
    return {"points": points, "ticks": ticks, "far": far, "dense": y(dense), "text": text}
