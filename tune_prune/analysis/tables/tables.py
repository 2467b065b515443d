"""The final table of a search, as aligned plain text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from tune_prune.analysis.export import Views, retained_accuracy
from tune_prune.analysis.input.load import config_name, ranked
from tune_prune.core.records import TrialRecord

_HEADER = ("", "method", "seq", "n", "ppl", "acc ± se", "kept%", "params")
_LEGEND = (
    "seq: tokens per calibration sample, n: samples, acc: zero-shot mean, kept%: part of the dense acc",
    "*: best, ~: not told apart from it (95%, all comparisons together)",
)
_MAX_WIDTH = 100


def final_table(views: Views, baselines: Mapping[str, TrialRecord], top: int = 5) -> str:
    """Per model: the dense model, the best configuration of each method and the `top` best; 100 columns at most."""
    labels = sorted(set(views.results["model"]) | set(baselines))
    blocks = []
    for label in labels:
        rows = views.results[views.results["model"] == label]
        best = views.global_best_config["models"].get(label, {})
        blocks.append("\n".join(_model_block(label, rows, best, baselines.get(label), top)))
    if views.cross_model_comparison is not None:
        blocks.append("\n".join(_across_models(views.cross_model_comparison)))
    return "\n\n".join([*blocks, "\n".join(_LEGEND)])


def _across_models(comparison: Mapping[str, Any]) -> list[str]:
    """Per model: its own best and what it loses with each other model's best and with the best single configuration."""
    best, for_all = comparison["best"], comparison["best_for_all"]
    others = {label: entry["config"] for label, entry in best.items()}
    header = ["  model", "own best", *(f"with {label}'s" for label in others)]
    if for_all["config"] is not None:
        header.append(f"with {for_all['config']}")
    table = [header]
    for label, entry in best.items():
        row = ["  " + label, entry["config"]]
        row += ["-" if other == label else _loss(comparison["transfer"][label][other]) for other in others]
        if for_all["config"] is not None:
            row.append(_loss(for_all["models"][label]))
        table.append(row)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return ["across models: points of accuracy lost with another model's best configuration (± standard error)", *lines]


def _loss(entry: Mapping[str, Any]) -> str:
    if not entry["evaluated"]:
        return "not tried"
    stderr = entry["loss_points_stderr"]
    return f"{entry['loss_points']:.2f}" + ("" if stderr is None else f" ± {stderr:.2f}")


def _model_block(
    label: str, rows: pd.DataFrame, best: Mapping[str, Any], dense: TrialRecord | None, top: int
) -> list[str]:
    competing = ranked(rows)
    counts = rows["status"].value_counts()
    states = [f"{counts[status]} {word}" for status, word in _STATUS_WORDS.items() if status in counts]
    trials = f"{len(rows)} trial{'s' if len(rows) > 1 else ''}"
    title = f"{label}: {trials} ({', '.join(states)})" if states else f"{label}: no trials"

    def cells(row: pd.Series) -> tuple[str, ...]:
        name = config_name(row)
        mark = "*" if name == best["name"] else "~" if name in best["within_noise"] else ""
        knobs = (str(row["pruning_method"]), str(row["taylor_seq_len"]), str(row["taylor_num_samples"]))
        return (mark, *knobs, *_measures(row, dense))

    table: list[tuple[str, ...] | str] = []
    if dense is not None:
        table.append(("", "dense", "-", "-", *_measures(dense.metrics, dense)))
    if competing.empty:
        table.append("no complete trial")
    else:
        table.append("best per method")
        table += [cells(row) for _, row in competing.drop_duplicates("pruning_method").iterrows()]
        if len(competing) > competing["pruning_method"].nunique():  # else all rows stand above
            table.append(f"best {min(top, len(competing))} of {len(competing)} complete")
            table += [cells(row) for _, row in competing.head(top).iterrows()]
    return [title[:_MAX_WIDTH], *_aligned(table), *_warnings(dense)]


def _warnings(dense: TrialRecord | None) -> list[str]:
    """What a reader must know before believing the accuracies above."""
    metrics = dense.metrics if dense is not None else {}
    acc, chance, stderr = (metrics.get(name, math.nan) for name in ("acc_mean", "chance_acc_mean", "acc_mean_stderr"))
    if acc - chance < 2 * stderr:
        return [
            f"  ! the dense model itself is at chance on these tasks ({acc:.3f}, chance {chance:.3f}):",
            "    their accuracies say nothing about pruning here; go by perplexity",
        ]
    return []


_STATUS_WORDS = {"complete": "complete", "stopped_early": "stopped early", "failed": "failed"}


def _measures(values: Any, dense: TrialRecord | None) -> tuple[str, str, str, str]:
    """ppl, acc ± se, kept% and params of a row or of metrics."""
    ppl, acc, stderr, params = (values.get(name) for name in ("ppl", "acc_mean", "acc_mean_stderr", "params_count"))
    accuracy = _text(acc, "{:.4f}") + ("" if _missing(stderr) else f" ± {stderr:.4f}")
    retained = None if _missing(acc) else retained_accuracy(acc, dense)
    ppl_format = "{:.2f}" if not _missing(ppl) and abs(ppl) < 100_000 else "{:.3g}"
    kept = "-" if retained is None else f"{100 * retained:.1f}"
    return _text(ppl, ppl_format), accuracy, kept, "-" if _missing(params) else f"{int(params):,}"


def _missing(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def _text(value: Any, form: str) -> str:
    if _missing(value):
        return "-"
    return form.format(value) if math.isfinite(value) else "inf" if value > 0 else "-inf"


def _aligned(table: list[tuple[str, ...] | str]) -> list[str]:
    """The rows below their header in columns, methods left and numbers right; a text among the rows is a heading."""
    rows = [_HEADER, *(row for row in table if isinstance(row, tuple))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    widths[1] = min(widths[1], 28)

    def line(row: tuple[str, ...]) -> str:
        texts = [text[:width] for text, width in zip(row, widths, strict=True)]
        left = [text.ljust(width) for text, width in zip(texts[:2], widths[:2], strict=True)]
        right = [text.rjust(width) for text, width in zip(texts[2:], widths[2:], strict=True)]
        return "  " + "  ".join([" ".join(left), *right])

    return [line(_HEADER), *(line(row) if isinstance(row, tuple) else f"  -- {row}" for row in table)]
