"""final_analysis_report.txt: the decision and its evidence on the first screen, then the sections of the published report.

The prose stands in templates/report_<language>.txt.j2; here are the rows of its tables and the numbers it names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.study import Problem
from tune_prune.analysis.render import templating
from tune_prune.analysis.render.messages import (
    LANGUAGES,
    MISSING,
    acc,
    format_message,
    integer,
    missing,
    p_value,
    percent,
    perplexity,
    pm,
    points,
    trend_remark,
)
from tune_prune.analysis.render.text import COLUMNS, aligned, pad, width, wrap
from tune_prune.analysis.statistics.findings import RULES, Correlation, Findings, Message, ModelFindings
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text

KNOBS = ("taylor_seq_len", "taylor_num_samples")
SHOWN_PROBLEMS = 5  # on the first screen; the appendix has all of them
SHOWN_NAMES = 24  # configurations within noise on the first screen; section 6 has all of them
_LABEL = 17  # columns of the names of the entries
_TOP = 5
_RULE = "=" * COLUMNS + "\n"

Row = list[str]


def write_report(findings: Findings, path: Path, language: str = "en") -> None:
    """Write the report to `path`, atomically: UTF-8, at most 100 columns. UserError for an unknown language."""
    atomic_write_text(path, report(findings, language))


def report(findings: Findings, language: str = "en") -> str:
    """The text of the report in "en" or "zh"."""
    if language not in LANGUAGES:
        raise UserError(f"the report's language is {language!r}; it must be one of {', '.join(LANGUAGES)}")
    environment = templating.environment()
    environment.filters["say"] = partial(format_message, language=language)
    environment.globals |= {
        "entry": _entry,
        "paragraph": lambda indent=0, *, caller: wrap(caller(), " " * indent, " " * indent),
        "bullet": lambda caller: wrap(caller(), "  - "),
        "heading": lambda title, rule="=": wrap(title) + rule * min(width(title), COLUMNS) + "\n",
        "table": aligned,
        "banner": lambda title: _RULE + wrap(title) + _RULE,
        "remark": lambda kind, **values: Message(kind, values),
        "trend_remark": trend_remark,
        "SHOWN_PROBLEMS": SHOWN_PROBLEMS,
        "SHOWN_NAMES": SHOWN_NAMES,
        "KNOBS": KNOBS,
    }
    template = environment.get_template(f"report_{language}.txt.j2")
    models = [_view(model, language) for model in findings.models.values()]
    text = template.render(findings=findings, models=models, across=_across(findings))
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _entry(label: str, caller: Callable[[], str]) -> str:
    """A named value; its text hangs beside the name."""
    return wrap(caller(), "  " + pad(label, _LABEL), " " * (_LABEL + 2))


def _view(model: ModelFindings, language: str) -> dict[str, Any]:
    """What the template says of a model beyond the fields of ModelFindings."""
    competing, top = model.competing, model.competing.iloc[0]
    inside = competing[_inside(model)]
    ppl = pd.to_numeric(competing["ppl"], errors="coerce").dropna().sort_values()
    best = model.best
    return {
        "found": model,
        "label": model.model.label,
        "best": best,
        "alone": len(competing) == 1,
        "top": top,
        "knobs": {name: integer(best[name]) for name in KNOBS},
        "dense": {name: model.model.baseline.get(name) for name in ("acc_mean", "ppl", "params_count")},
        "retained": _ratio(best["acc_mean"], model.model.baseline.get("acc_mean")),
        "close": _close(model),
        "best_is_close": best["name"] in set(inside["name"]),
        "problems": _problems(model.model.problems),
        "problem_kinds": pd.Series([p.kind for p in model.model.problems], dtype="object").value_counts().to_dict(),
        "methods": _method_rows(model.methods),
        "method_order": list(model.methods.sort_values("mean", ascending=False).index),
        "levels": {knob: _level_rows(levels) for knob, levels in model.levels.items()},
        "effects": _effect_rows(model.effects),
        "importance": sorted(model.importance.items(), key=lambda item: -item[1]),
        "gradients": [_correlation_row(c, competing, language) for c in model.correlations if _is_gradient(c)],
        "shared": [c for c in model.correlations if _is_gradient(c) and c.n_independent is not None],
        "unexplained": _reasons(model.correlations, language),
        "extreme": _correlation(model, "extreme_pruning_layers"),
        "extreme_rows": _extreme_rows(competing),
        "ppl": _correlation(model, "ppl"),
        "ppl_rows": [
            _ppl_row(competing, name, ppl) for name in _first(competing["name"], competing.loc[ppl.index, "name"])
        ],
        "agreeing": len(set(ppl.index[:_TOP]) & set(competing.index[:_TOP])),
        "top_count": min(_TOP, len(ppl)),
        "tasks": _task_rows(model.tasks),
        "chosen": [row for rule in RULES if rule in model.chosen for row in _rule_rows(model, rule)],
        "confidence_set": [_set_row(row) for _, row in inside.iterrows()],
        "folds": sorted(model.cross_fit.chosen.items(), key=lambda item: (-item[1], item[0]))
        if model.cross_fit
        else [],
    }


def _problems(problems: Iterable[Problem]) -> list[str]:
    """What is to be said of each place, in the order in which they were found."""
    by_place: dict[str, list[str]] = {}
    for problem in problems:
        by_place.setdefault(problem.where, []).append(problem.what)
    return [": ".join(filter(None, (where, ", ".join(what)))) for where, what in by_place.items()]


def _inside(model: ModelFindings) -> pd.Series:
    return model.competing["in_confidence_set"].fillna(False).astype("bool")


def _close(model: ModelFindings) -> list[str]:
    """The configurations that cannot be told from the most accurate one, without itself."""
    return list(model.competing["name"].iloc[1:][_inside(model).iloc[1:]])


def _ratio(part: float, whole: float | None) -> float | None:
    return None if missing(whole) or not whole else part / whole


def _is_gradient(correlation: Correlation) -> bool:
    return correlation.column.startswith("grad_")


def _reasons(correlations: Iterable[Correlation], language: str) -> list[str]:
    """Why gradient metrics have no correlation, each reason once; the cell itself says what is not finite."""
    reasons = [c.reason for c in correlations if _is_gradient(c) and c.reason is not None]
    return list(dict.fromkeys(format_message(reason, language) for reason in reasons if reason.kind != "not_finite"))


def _correlation(model: ModelFindings, column: str) -> Correlation | None:
    return next((c for c in model.correlations if c.column == column), None)


def _method_rows(methods: pd.DataFrame) -> list[Row]:
    """method, n, mean, std (n - 1), std (n), min, median, max, best; highest mean first."""
    numbers = ["mean", "std", "std_n", "min", "median", "max"]
    return [
        [str(name), integer(row["n"]), *(acc(row[column]) for column in numbers), str(row["best"])]
        for name, row in methods.sort_values("mean", ascending=False).iterrows()
    ]


def _level_rows(levels: pd.DataFrame) -> list[Row]:
    """level, n, mean, std, standard error of the mean, min, max."""
    numbers = ["mean", "std", "stderr", "min", "max"]
    return [
        [str(level), integer(row["n"]), *(acc(row[column]) for column in numbers)] for level, row in levels.iterrows()
    ]


def _effect_rows(effects: pd.DataFrame | None) -> list[Row]:
    """term, degrees of freedom, share of the sum of squares, F, p."""
    if effects is None:
        return []
    return [
        [str(term).replace(":", " x "), integer(row["df"]), percent(row["share"]), points(row["F"]), p_value(row["p"])]
        for term, row in effects.iterrows()
    ]


def _correlation_row(correlation: Correlation, competing: pd.DataFrame, language: str) -> Row:
    """column, r over the rows, rows, r over the passes, passes, 95% interval; or why there is none."""
    if correlation.r is None:
        return [correlation.column, format_message(_not_computable(correlation, competing), language)]
    passes = "" if correlation.n_independent is None else integer(correlation.n_independent)
    over_passes = "" if correlation.n_independent is None else acc(correlation.r_independent)
    interval = _interval(correlation)
    return [correlation.column, acc(correlation.r), integer(correlation.n), over_passes, passes, interval]


def _interval(correlation: Correlation) -> str:
    if missing(correlation.low) or missing(correlation.high):
        return MISSING
    return f"{acc(correlation.low)} .. {acc(correlation.high)}"


def _not_computable(correlation: Correlation, competing: pd.DataFrame) -> Message:
    """The reason as short as a table's cell."""
    values = pd.to_numeric(competing[correlation.column], errors="coerce").astype("float64")
    infinite, unknown = int(np.isinf(values).sum()), int(values.isna().sum())
    if infinite or unknown:
        return Message("not_computable_in", {"what": "inf" if infinite else "NaN", "count": infinite or unknown})
    return Message("not_computable")


def _extreme_rows(competing: pd.DataFrame) -> list[Row]:
    """layers, configurations with so many, their mean, min and max accuracy, and their mean perplexity."""
    known = competing[competing["extreme_pruning_layers"].notna()]
    rows = []
    for layers, group in known.groupby("extreme_pruning_layers"):
        accuracy = group["acc_mean"]
        numbers = [acc(accuracy.mean()), acc(accuracy.min()), acc(accuracy.max()), perplexity(group["ppl"].mean())]
        rows.append([integer(layers), integer(len(group)), *numbers])
    return rows


def _first(*columns: pd.Series) -> list[str]:
    """The first names of each column, every name once."""
    return list(dict.fromkeys(name for column in columns for name in column.head(_TOP)))


def _ppl_row(competing: pd.DataFrame, name: str, ppl: pd.Series) -> Row:
    """configuration, accuracy and its rank, perplexity and its rank."""
    place = int(np.flatnonzero(competing["name"] == name)[0])
    row = competing.iloc[place]
    rank = str(int(ppl.index.get_loc(row.name)) + 1) if row.name in ppl.index else MISSING
    return [name, pm(row["acc_mean"], row["acc_mean_stderr"]), str(place + 1), perplexity(row["ppl"]), rank]


def _task_rows(tasks: pd.DataFrame) -> list[Row]:
    """task, accuracy ± standard error, the dense model's, what is left of it, items."""
    return [
        [str(t), pm(row["acc"], row["stderr"]), acc(row["dense"]), percent(row["retained"]), integer(row["items"])]
        for t, row in tasks.iterrows()
    ]


def _rule_rows(model: ModelFindings, rule: str) -> list[Row]:
    """rule, configuration, accuracy, perplexity, calibration tokens; the rule once where it leaves several."""
    rows = []
    by_name = model.competing.set_index("name")
    for index, name in enumerate(model.chosen[rule]):
        row = by_name.loc[name]
        accuracy = pm(row["acc_mean"], row["acc_mean_stderr"])
        rows.append([rule if index == 0 else "", name, accuracy, perplexity(row["ppl"]), integer(row["tokens"])])
    return rows


def _set_row(row: Mapping[str, Any] | pd.Series) -> Row:
    """configuration, accuracy, difference to the most accurate in points, p, perplexity, calibration tokens."""
    difference = pm(row["difference_points"], row["difference_stderr_points"], "points")
    accuracy = pm(row["acc_mean"], row["acc_mean_stderr"])
    return [row["name"], accuracy, difference, p_value(row["p_best"]), perplexity(row["ppl"]), integer(row["tokens"])]


def _across(findings: Findings) -> dict[str, Any] | None:
    """The tables of the comparison of models; None with fewer than two."""
    lost = findings.transfer_points
    if lost is None:
        return None
    stderr, share = findings.transfer_stderr, findings.transfer_percent
    best = findings.best_for_all if findings.best_for_all and findings.best_for_all["config"] is not None else None
    return {
        "others": [str(label) for label in lost.columns],
        "points": _matrix(lost, lambda row, column: pm(lost.at[row, column], _at(stderr, row, column), "points")),
        "percent": _matrix(lost, lambda row, column: points(_at(share, row, column))),
        "own": [[label, *_own_best(model)] for label, model in findings.models.items()],
        "best_for_all": best,
        "losses": [] if best is None else [_loss_row(str(label), entry) for label, entry in best["models"].items()],
    }


def _at(frame: pd.DataFrame | None, row: Any, column: Any) -> Any:
    return None if frame is None else frame.at[row, column]


def _matrix(lost: pd.DataFrame, cell: Callable[[Any, Any], str]) -> list[Row]:
    """A row per model; a dot on the diagonal, where nothing is transferred."""
    return [[str(r), *("." if r == c else cell(r, c) for c in lost.columns)] for r in lost.index]


def _own_best(model: ModelFindings) -> Sequence[str]:
    best = model.best
    kept = percent(_ratio(best["acc_mean"], model.model.baseline.get("acc_mean")))
    close = MISSING if model.basis == "unknown" else str(len(_close(model)))
    accuracy = pm(best["acc_mean"], best["acc_mean_stderr"])
    return [str(best["name"]), accuracy, kept, perplexity(best["ppl"]), close]


def _loss_row(label: str, entry: Mapping[str, Any]) -> Row:
    loss = pm(entry.get("loss_points"), entry.get("loss_points_stderr"), "points")
    return [label, acc(entry.get("acc_mean")), loss, perplexity(entry.get("ppl"))]
