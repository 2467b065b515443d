"""From a study to its findings: everything that is printed anywhere is computed here, once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.export import Items, cross_model_comparison
from tune_prune.analysis.input.load import TASK_ITEMS, Difference, config_of, difference, ranked, read_items
from tune_prune.analysis.input.study import Model, Study
from tune_prune.analysis.statistics import effects, rules
from tune_prune.analysis.statistics.findings import CrossFit, Findings, ModelFindings, Remark
from tune_prune.analysis.statistics.outcomes import Comparison, Outcomes, compare_rows, cross_fit
from tune_prune.core.config import PruningConfig
from tune_prune.core.hashing import seed_for

_KNOBS = ("taylor_seq_len", "taylor_num_samples")
_GRID = ("pruning_method", *_KNOBS)

Costs = Mapping[Path, Mapping[str, Any]]  # Study.costs


def find(study: Study, rule: str = "accuracy", seed: int = 0) -> Findings:
    """The findings of `study`, the best of each model chosen by `rule` (one of findings.RULES).

    `seed` is of the bootstrap and of the folds; each model has its own stream, whatever other models there are. UserError
    for an unknown rule, for a rule that a model's rows cannot decide, and for items that contradict their trial's record.
    """
    rules.require_known(rule)
    items = functools.cache(read_items)
    models, without = {}, []
    for label, model in study.models.items():
        competing = ranked(model.rows)
        if competing.empty:
            without.append(label)
        else:
            models[label] = _model(model, competing, study.costs, rule, seed, items)
    points, stderrs, percent = _transfer(models, items)
    return Findings(
        study=study,
        rule=rule,
        models=models,
        without=tuple(without),
        transfer_points=points,
        transfer_stderr=stderrs,
        transfer_percent=percent,
        best_for_all=_best_for_all(models, items),
    )


def _model(model: Model, competing: pd.DataFrame, costs: Costs, rule: str, seed: int, items: Items) -> ModelFindings:
    comparison, outcomes, items_remark = compare_rows(competing, model.label, items, seed)
    competing = competing.assign(
        tokens=competing["taylor_seq_len"] * competing["taylor_num_samples"],
        gradient_pass_s=_gradient_pass_s(competing, model, costs),
        difference_points=100 * (competing["acc_mean"] - competing["acc_mean"].iloc[0]),
        difference_stderr_points=100 * comparison.stderr[:, 0],
        p_best=comparison.p_best,
        in_confidence_set=comparison.in_confidence_set,
    )
    chosen = rules.choose_all(competing)
    name = rules.best_of(chosen, rule, model.label)
    best = competing[competing["name"] == name].iloc[0]
    generator = np.random.default_rng(seed_for(seed, f"folds of {model.label}"))
    corrected = _cross_fit(competing, name, outcomes, comparison, rule, generator)
    methods = effects.method_table(competing)
    anova = effects.anova(competing)
    importance, basis = effects.importance(competing, anova)
    statistics = _statistics(model.rows, competing)
    return ModelFindings(
        model=model,
        rule=rule,
        best=best,
        competing=competing,
        basis=comparison.basis,
        chosen=chosen,
        cross_fit=corrected,
        methods=methods,
        levels={knob: effects.level_table(competing, knob) for knob in _KNOBS},
        trends={knob: effects.trend(competing, knob) for knob in _KNOBS if competing[knob].nunique() > 1},
        effects=anova,
        importance=importance,
        importance_basis=basis,
        correlations=effects.correlations(competing),
        tasks=_tasks(model, best, items),
        statistics=statistics,
        warnings=tuple(_warnings(model, competing, best, chosen, methods, items_remark, corrected)),
    )


def _gradient_pass_s(competing: pd.DataFrame, model: Model, costs: Costs) -> list[float]:
    """Seconds that the gradients of each row take alone: its samples' part of the pass that was made for all of its seq_len."""
    label = (model.source or {}).get("label", model.label)  # as the search calls the model
    per_sample = {
        int(entry["seq_len"]): entry["duration_s"] / entry["num_samples"]
        for folder in model.origins
        for entry in costs.get(folder, {}).get("shared_passes", ())
        if entry["stage"] == "importance" and entry["model"] == label
    }
    return [
        per_sample.get(seq_len, math.nan) * samples
        for seq_len, samples in zip(competing["taylor_seq_len"], competing["taylor_num_samples"], strict=True)
    ]


def _cross_fit(
    competing: pd.DataFrame,
    best: str,
    outcomes: Outcomes | None,
    comparison: Comparison,
    rule: str,
    generator: np.random.Generator,
) -> CrossFit | None:
    """Of the rule that chose `best`, among the rows with items; None if these alone would not have led to `best`."""
    if outcomes is None:
        return None
    rows = competing.iloc[outcomes.rows]
    names = rows["name"].tolist()
    if best not in names:
        return None
    # What breaks ties must not come from the items: a row's place in `competing` does
    order = rows.assign(ppl=rows["ppl"].fillna(math.inf)).reset_index(drop=True)
    ties = np.empty(len(rows), dtype=np.intp)
    ties[order.sort_values(["ppl", "tokens", "name"]).index] = np.arange(len(rows))
    cost = rules.cost_order(rows)
    stderr = comparison.stderr[np.ix_(outcomes.rows, outcomes.rows)]

    def most_accurate(accuracies: np.ndarray) -> int:
        leading = np.flatnonzero(accuracies >= accuracies.max() - 1e-12)
        return int(leading[np.argmin(ties[leading])])

    def cheapest(accuracies: np.ndarray) -> int:
        top = most_accurate(accuracies)
        within = accuracies >= accuracies[top] - np.maximum(np.nan_to_num(stderr[top]), 1e-12)
        return rules.cheapest_within(within, accuracies, cost)

    fixed = names.index(best)  # perplexity is measured on other text: no part of the items changes the choice
    pick = {"perplexity": lambda accuracies: fixed, "one-standard-error": cheapest}.get(rule, most_accurate)
    if abs(outcomes.accuracies[pick(outcomes.accuracies)] - rows["acc_mean"].iloc[fixed]) > 1e-6:
        return None  # `best` was chosen with the help of rows without items
    return cross_fit(outcomes, names, pick, generator)


def _tasks(model: Model, best: pd.Series, items: Items) -> pd.DataFrame:
    """The tasks of `best`: acc, stderr, dense, retained, items; NaN what is not known."""
    scores = items(best["output_dir"])
    sizes: Mapping[str, int] = TASK_ITEMS if model.kind == "published" else {}
    if scores is not None:
        sizes = scores.groupby(level="task").size()
    rows = {
        task: {
            "acc": best[f"acc_{task}"],
            "stderr": best.get(f"acc_{task}_stderr", math.nan),
            "dense": model.baseline.get(f"acc_{task}", math.nan),
            "items": sizes.get(task, math.nan),
        }
        for task in _task_names(model.rows)
        if not pd.isna(best[f"acc_{task}"])
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["acc", "stderr", "dense", "items"], dtype="float64")
    table.insert(3, "retained", table["acc"] / table["dense"].where(table["dense"] > 0))
    return table.rename_axis("task")


def _task_names(rows: pd.DataFrame) -> list[str]:
    names = (name.removeprefix("acc_") for name in rows.columns if name.startswith("acc_"))
    return [name for name in names if name != "mean" and not name.endswith("_stderr")]


def _statistics(rows: pd.DataFrame, competing: pd.DataFrame) -> dict[str, float]:
    """Counts of runs, and the distribution of acc_mean over the complete ones (std: n - 1)."""
    accuracy = competing["acc_mean"]
    status = rows["status"].value_counts()
    return {
        "runs": len(rows),
        "complete": len(competing),
        "failed": int(status.get("failed", 0)),
        "stopped_early": int(status.get("stopped_early", 0)),
        "not_finite": int(rows["success"].sum()) - len(competing),
        "task_evaluations": int(rows[[f"acc_{task}" for task in _task_names(rows)]].notna().to_numpy().sum()),
        **{name: float(getattr(accuracy, name)()) for name in ("max", "min", "median", "mean", "std")},
    }


def _warnings(
    model: Model,
    competing: pd.DataFrame,
    best: pd.Series,
    chosen: Mapping[str, list[str]],
    methods: pd.DataFrame,
    items_remark: Remark | None,
    corrected: CrossFit | None,
) -> list[Remark]:
    """What a reader must know before believing the decision; the gravest first."""
    remarks = _dense_remarks(model.baseline)
    remarks += [
        Remark("edge", {"knob": knob, "value": int(best[knob]), "side": "lower" if best[knob] == low else "upper"})
        for knob in _KNOBS
        if (low := model.rows[knob].min()) < (high := model.rows[knob].max()) and best[knob] in (low, high)
    ]
    first = competing["name"].iloc[0]
    others = competing.iloc[1:][competing["in_confidence_set"].iloc[1:].to_numpy()]
    if not others.empty:
        points = -float(others["difference_points"].iloc[0])
        remarks.append(Remark("within_noise", {"best": first, "others": others["name"].tolist(), "points": points}))
    if corrected is not None and corrected.naive - corrected.corrected > corrected.stderr:
        remarks.append(Remark("selection_bias", {"naive": corrected.naive, "corrected": corrected.corrected}))
    if chosen["perplexity"] and chosen["perplexity"][0] != first:
        remarks.append(Remark("ppl_disagrees", {"best": first, "best_ppl": chosen["perplexity"][0]}))
    by_mean, by_max = methods.index.tolist(), methods.sort_values("max", ascending=False, kind="stable").index.tolist()
    if by_mean != by_max:
        remarks.append(Remark("rank_disagrees", {"by_mean": by_mean, "by_max": by_max}))
    expected = math.prod(model.rows[knob].nunique() for knob in _GRID)
    if len(competing) < expected:
        remarks.append(Remark("missing_trials", {"missing": expected - len(competing), "expected": expected}))
    stopped = int((model.rows["status"] == "stopped_early").sum())
    if stopped:
        remarks.append(Remark("stopped_early", {"count": stopped}))
    unknown = competing.loc[competing["p_best"].isna(), "name"].tolist()
    if items_remark is not None and len(competing) > 1:
        remarks.append(items_remark)
    if unknown and len(competing) > 1:
        remarks.append(Remark("stderr_unknown", {"names": unknown}))
    if competing["name"].is_unique:
        remarks.append(Remark("seeds_one"))
    return remarks


def _dense_remarks(baseline: Mapping[str, float]) -> list[Remark]:
    dense, chance, stderr = (
        baseline.get(name, math.nan) for name in ("acc_mean", "chance_acc_mean", "acc_mean_stderr")
    )
    if not math.isfinite(dense):
        return [Remark("dense_unknown")]
    return [Remark("at_chance", {"dense": dense, "chance": chance})] if dense - chance < 2 * stderr else []


def _transfer(
    models: Mapping[str, ModelFindings], items: Items
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame] | tuple[None, None, None]:
    """What each model (row) loses with each one's best (column): points, their standard error, percent of the own best."""
    if len(models) < 2:
        return None, None, None
    labels = list(models)
    points, stderrs, percent = (pd.DataFrame(math.nan, index=labels, columns=labels) for _ in range(3))
    for label, own in models.items():
        rows = _by_config(own)
        for other, theirs in models.items():
            row = rows.get(config_of(theirs.best))
            if row is None:
                continue
            loss = (
                Difference(0.0, 0.0, "paired") if row["name"] == own.best["name"] else difference(own.best, row, items)
            )
            points.loc[label, other] = loss.points
            stderrs.loc[label, other] = loss.stderr_points
            percent.loc[label, other] = loss.points / own.best["acc_mean"] if own.best["acc_mean"] > 0 else math.nan
    return points, stderrs, percent


def _by_config(model: ModelFindings) -> dict[PruningConfig, pd.Series]:
    return {config_of(row): row for _, row in model.competing.iterrows()}


def _best_for_all(models: Mapping[str, ModelFindings], items: Items) -> Mapping[str, Any] | None:
    """The entry of cross_model_comparison.json; losses are against each model's most accurate configuration."""
    if len(models) < 2:
        return None
    rows = pd.concat([findings.competing.assign(model=label) for label, findings in models.items()], ignore_index=True)
    comparison = cross_model_comparison(rows, items)
    return None if comparison is None else comparison["best_for_all"]
