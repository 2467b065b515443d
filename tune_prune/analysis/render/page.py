"""report.html: one page with everything inside it, that a person looks at first.

Its first screen is the decision for each model and the evidence for it. Nothing is loaded from anywhere: figures are
embedded, and the page's own Content-Security-Policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis import export, verdict
from tune_prune.analysis.input.study import Message
from tune_prune.analysis.render import messages, templating
from tune_prune.analysis.statistics.findings import Findings, ModelFindings
from tune_prune.analysis.tables import trial_tables
from tune_prune.analysis.tables.all_tables import all_tables

_APART = 14  # percent of the height between two numbers that do not overlap


def rank_plot(result: ModelFindings) -> dict[str, Any]:
    """Return what the macro `drawing` of report.html.j2 draws of one model; places in percent of the plotted area, from its upper
    left.

    points  of each configuration x, y, low and high (one standard error to either side; None: not known), style (a CSS class),
            title; the one last drawn stands in front
    ticks   y and its accuracy
    far     what the style "far" says of a point
    dense   y of the dense model, None where it is not known
    text    the drawing in words
    """
    rows, dense = result.eligible, result.model.baseline.get("acc_mean", math.nan)
    accuracy, stderr = (rows[name].to_numpy(float) for name in ("acc_mean", "acc_mean_stderr"))
    bars = np.nan_to_num(stderr)
    lowest, highest = np.nanmin([*(accuracy - bars), dense]), np.nanmax([*(accuracy + bars), dense])

    def y(value: float) -> float | None:
        return round(100 * (highest - value) / ((highest - lowest) or 1), 1) if math.isfinite(value) else None

    points = [
        {
            "x": round(x, 1),
            "y": y(value),
            "low": y(value - error),
            "high": y(value + error),
            "style": "best" if name == result.best["name"] else "near" if name in result.marked else "far",
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


_CSS_PIXELS_PER_DOT = 0.5  # figures are drawn at 200 dots per inch, twice a screen's


def render(findings: Findings, figures: Sequence[Path], keep: Mapping[str, str] | None = None) -> str:
    """Return the page's HTML, with those of `figures` that are PNGs, and by model the command to `keep` its best, pruned."""
    style, script = ((templating.TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    models = findings.study.models.values()
    statuses = pd.concat([model.states for model in models])
    counts = {word: (statuses == status).sum() for status, word in trial_tables.STATUS_WORDS.items()}
    # Those too close to call stand on the cards by themselves; what holds for every one of several models stands there once.
    warnings = {
        label: [messages.format_message(warning) for warning in result.warnings if warning.kind != "within_noise"]
        for label, result in findings.models.items()
    }
    first, *others = warnings.values()
    template = templating.environment().get_template("report.html.j2")
    return template.render(
        style=style,
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        findings=findings,
        title=f"Best way to prune {messages.names(findings.study.models, most=2)}",
        close_calls=verdict.close_calls,
        tables=all_tables(findings),
        counts={"trials": len(statuses)} | {word: count for word, count in counts.items() if count},
        warnings=warnings,
        shared_warnings=[text for text in first if others and all(text in texts for texts in others)],
        images=[_image(figure) for figure in figures if figure.suffix == ".png"],
        problems=trial_tables.problems(findings),
        problem_counts=trial_tables.problem_counts(problem for model in models for problem in model.problems),
        costs=trial_tables.costs(findings),
        Message=Message,
        rank_plot=rank_plot,
        rerun=export.best_command,
        keep=keep or {},
        shell=lambda words: shlex.join(map(str, words)),
        shown=_shown,
    )


def _image(path: Path) -> dict[str, Any]:
    """Return a figure of the page; width and height in CSS pixels."""
    content = path.read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # of the IHDR chunk, which is the first of every PNG
    captions = messages.WORDS["captions"]
    figure = next((name for name in captions if path.stem == name or path.stem.startswith(f"{name}_")), None)
    model = path.stem.removeprefix(figure).removeprefix("_") if figure else ""
    return {
        "uri": "data:image/png;base64," + base64.b64encode(content).decode(),
        "caption": (captions[figure] if figure else path.stem.replace("_", " ")) + (f": {model}" if model else ""),
        "name": path.stem,
        "width": round(_CSS_PIXELS_PER_DOT * width),
        "height": round(_CSS_PIXELS_PER_DOT * height),
    }


def _shown(value: Any) -> str:
    """Return what an experiment.json holds, in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return messages.printed(value, "number") if isinstance(value, float) else str(value)
