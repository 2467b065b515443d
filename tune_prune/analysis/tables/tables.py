"""The final table of a search, as aligned plain text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from tune_prune.analysis.export import retained_accuracy
from tune_prune.analysis.statistics.factors import FACTORS, methods_reading, varied
from tune_prune.analysis.statistics.findings import Findings
from tune_prune.analysis.statistics.transfer import Transfer
from tune_prune.core.config import HYPERPARAMETERS

_SHORT = {"taylor_seq_len": "seq", "taylor_num_samples": "n"}  # others by their short names, where they vary
_MEASURES = ("ppl", "acc ± se", "retained", "params")
_LEGEND = (
    "seq: tokens per calibration sample, n: samples, acc: zero-shot mean, retained: part of the dense acc",
    "*: best, ~: statistically tied with it (95%, all comparisons together)",
)
_MAX_WIDTH = 100


def final_table(findings: Findings, top: int = 5) -> str:
    """Per model: the dense model, the best configuration of each method and the `top` best; 100 columns at most."""
    blocks = [_model_block(findings, label, top) for label in sorted(findings.study.models)]
    if findings.transfer is not None:
        blocks.append(_across_models(findings.transfer))
    return "\n\n".join("\n".join(block) for block in [*blocks, _LEGEND])


def _across_models(transfer: Transfer) -> list[str]:
    """Per model: its own best and what it loses with each other model's best and with the best single configuration."""
    losses, for_all = transfer.losses, transfer.best_for_all
    header = ["  model", "own best", *(f"with {label}'s" for label in losses)]
    if for_all["config"] is not None:
        header.append(f"with {for_all['config']}")
    table = [header]
    for label, row in losses.items():
        cells = ["  " + label, row[label]["config"], *("-" if o == label else _loss(loss) for o, loss in row.items())]
        if for_all["config"] is not None:
            cells.append(_loss(for_all["models"][label]))
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return ["across models: points of accuracy lost with another model's best configuration (± standard error)", *lines]


def _loss(entry: Mapping[str, Any]) -> str:
    if not entry["evaluated"]:
        return "not tried"
    stderr = entry["loss_points_stderr"]
    return f"{round(entry['loss_points'], 2) + 0.0:.2f}" + ("" if stderr is None else f" ± {stderr:.2f}")


def _model_block(findings: Findings, label: str, top: int) -> list[str]:
    model, found = findings.study.models[label], findings.models.get(label)
    counts = model.rows["status"].value_counts()
    states = [f"{counts[status]} {word}" for status, word in _STATUS_WORDS.items() if status in counts]
    trials = f"{len(model.rows)} trial{'s' if len(model.rows) > 1 else ''}"
    title = f"{label}: {trials} ({', '.join(states)})" if states else f"{label}: no trials"
    shown = [name for name in FACTORS if name in _SHORT or (name != "method" and name in varied(model.rows))]
    table: list[tuple[str, ...] | str] = [
        ("", "method", *(_SHORT.get(name, HYPERPARAMETERS[name].short) for name in shown), *_MEASURES)
    ]
    if model.baseline:
        table.append(("", "dense", *["-"] * len(shown), *_measures(model.baseline, model.baseline)))
    if found is None:
        return [title[:_MAX_WIDTH], *_aligned([*table, "no complete trial"]), *_warnings(model.baseline)]

    def cells(row: pd.Series) -> tuple[str, ...]:
        mark = "*" if row["name"] == found.best["name"] else "~" if row["name"] in found.tied else ""
        values = (str(row[name]) if row["pruning_method"] in reading[name] else "-" for name in shown)
        return (mark, str(row["pruning_method"]), *values, *_measures(row, model.baseline))

    reading = {name: methods_reading(model.rows, name) for name in shown}
    rows, first = found.eligible, found.eligible.drop_duplicates("pruning_method")
    table += ["best per method", *(cells(row) for _, row in first.iterrows())]
    if len(rows) > len(first):  # else all rows stand above
        table.append(f"best {min(top, len(rows))} of {len(rows)} complete")
        table += [cells(row) for _, row in rows.head(top).iterrows()]
    return [title[:_MAX_WIDTH], *_aligned(table), *_warnings(model.baseline)]


def _warnings(dense: Mapping[str, float]) -> list[str]:
    """What a reader must know before believing the accuracies above."""
    acc, chance, stderr = (dense.get(name, math.nan) for name in ("acc_mean", "chance_acc_mean", "acc_mean_stderr"))
    if acc - chance < 2 * stderr:
        return [
            f"  ! the dense model itself is at chance on these tasks ({acc:.3f}, chance {chance:.3f}):",
            "    accuracies are at chance and uninformative; go by perplexity",
        ]
    return []


_STATUS_WORDS = {"complete": "complete", "stopped_early": "stopped early", "failed": "failed"}


def _measures(values: Any, dense: Mapping[str, float]) -> tuple[str, str, str, str]:
    """As _MEASURES, of a row or of metrics."""
    ppl, acc, stderr, params = (values.get(name) for name in ("ppl", "acc_mean", "acc_mean_stderr", "params_count"))
    accuracy = _text(acc, "{:.4f}") + ("" if _missing(stderr) else f" ± {stderr:.4f}")
    retained = None if _missing(acc) else retained_accuracy(acc, dense)
    ppl_format = "{:.2f}" if not _missing(ppl) and abs(ppl) < 100_000 else "{:.3g}"
    part = "-" if retained is None else f"{100 * retained:.1f}%"
    return _text(ppl, ppl_format), accuracy, part, "-" if _missing(params) else f"{int(params):,}"


def _missing(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def _text(value: Any, form: str) -> str:
    if _missing(value):
        return "-"
    return form.format(value) if math.isfinite(value) else "inf" if value > 0 else "-inf"


def _aligned(table: list[tuple[str, ...] | str]) -> list[str]:
    """The rows in columns, methods left and numbers right; a text among the rows is a heading."""
    rows = [row for row in table if isinstance(row, tuple)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[1] = min(widths[1], 28)

    def line(row: tuple[str, ...]) -> str:
        texts = [text[:width] for text, width in zip(row, widths, strict=True)]
        left = [text.ljust(width) for text, width in zip(texts[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(texts[2:], widths[2:], strict=True)]
        return "  " + "  ".join([" ".join(left), *right])

    return [line(row) if isinstance(row, tuple) else f"  -- {row}" for row in table]
