"""The findings of a study: everything that a search prints at its end and that tables, figures and reports print.

`find` chooses the best configuration of each model; the rest is computed when it is asked for, once. Accuracies and their standard
errors are fractions, differences are percentage points. A value that cannot be computed is None or NaN and its reason stands
beside it as a `Message`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import (
    GOLD,
    ItemReader,
    certain_sizes,
    dense_folder,
    guessing,
    rows_with_wilson_errors,
    sizes_of,
    with_wilson_errors,
)
from tune_prune.analysis.input.rows import CALIBRATION, CONTROL, plain_value, ranked, without_draw
from tune_prune.analysis.input.study import Message, Model, Study, measured_apart
from tune_prune.analysis.statistics import differences, draws, effects
from tune_prune.analysis.statistics.comparison import Comparison, PairedScores, compare, paired_scores
from tune_prune.analysis.statistics.cross_fit import CrossFit, cross_fit_rule
from tune_prune.analysis.statistics.differences import JUDGED, Change, Difference, Transfer, difference
from tune_prune.analysis.statistics.draws import DrawItems, DrawVariance
from tune_prune.analysis.statistics.effects import NUMERIC, Correlation, Trend, levels_of, methods_reading, varied
from tune_prune.analysis.statistics.rules import NEEDS, RULES, WITHIN, none_within
from tune_prune.core.config import TASK_ITEMS
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hashing import seed_for
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Whole
from tune_prune.core.measures import comparable


@dataclass(frozen=True, eq=False)
class ModelFindings:
    """One model. `eligible` has a row per configuration with an eligible trial (complete, with a finite accuracy), best first by
    accuracy: the mean over its draws of calibration samples."""

    model: Model  # of the study, with standard errors for accuracies of 0 and 1 (`items.with_wilson_errors`)
    rule: str  # one of RULES, by which `best` is chosen ("pareto": the most accurate of its set)
    # columns of model.rows and: tokens (seq_len x samples), `measured_apart`; difference_points, difference_stderr_points (own
    # minus the most accurate's), p_value (chance of a gap to the best as large as this if this were the best; corrected for
    # all configurations), in_confidence_set (p_value above 0.05 or unknown: it may still be the best), draws (how many it
    # is the mean of), draw_share (`draws.configurations`), draw_stderr (the part of acc_mean_stderr that these make; NaN where it
    # is unknown), margin_points (`rules`)
    eligible: pd.DataFrame
    trials: pd.DataFrame  # the eligible ones: each draw by itself
    draws: Mapping[int, pd.DataFrame]  # by the index of a row of `eligible`, its trials, where there are several
    interactions: Mapping[int, Mapping[str, float]]  # of `draws`, by accuracy (`draws.interactions`)
    draw_variances: Mapping[str, DrawVariance]  # by metric; empty where no configuration has several draws
    control_variances: Mapping[str, DrawVariance]  # the same of CONTROL, which is no part of them
    comparison: Comparison
    scores: PairedScores | None  # None without item outcomes, or where fewer than two configurations share them
    scores_message: Message | None  # what is missing of them
    chosen: Mapping[str, list[str]]  # rule -> names; one but for "pareto"
    seed: int
    items: DrawItems
    untrained: ModelFindings | None  # of trained ones those of the same model and ratio without training

    @cached_property
    def best(self) -> pd.Series:
        """A row of `eligible`; where rule "smallest" finds none within its bound, the nearest: the most accurate."""
        return self.named((self.chosen[self.rule] or self.chosen["accuracy"])[0])

    def named(self, name: str) -> pd.Series:
        """Return the eligible row of a configuration."""
        return self.eligible[self.eligible["name"] == name].iloc[0]

    @cached_property
    def against_dense(self) -> Difference | None:
        """The accuracy of `best` minus the dense model's, on the same items where both have them; None where that is unknown."""
        dense = {"acc_mean_stderr": math.nan, **self.model.baseline, "output_dir": dense_folder(self.model)}
        return difference(self.best, dense, self.items) if "acc_mean" in dense else None

    @property
    def draw_variance(self) -> DrawVariance | None:
        """The variance between draws of acc_mean; None where no configuration has several draws."""
        return self.draw_variances.get("acc_mean")

    @property
    def basis(self) -> str:
        """`Comparison.basis`: of the differences."""
        return self.comparison.basis

    @cached_property
    def tied(self) -> list[str]:
        """Names of the most accurate and of those that were compared with it and are statistically tied with it (95%). One of
        unknown error was not compared: it is neither among them nor in `ruled_out`."""
        first, *others = self.eligible["name"]
        return [first, *(name for name in others if name in self.marked)]

    @cached_property
    def marked(self) -> set[str]:
        """Names of `tied` that tables and figures mark: none where the most accurate is itself of unknown error."""
        p_value = self.eligible["p_value"]
        return set() if math.isnan(p_value.iloc[0]) else set(self.eligible.loc[p_value > 0.05, "name"])

    @cached_property
    def ruled_out(self) -> set[str]:
        """Names of the configurations that some other one is better than (95%)."""
        return set(self.eligible.loc[self.eligible["p_value"] <= 0.05, "name"])

    @property
    def compared(self) -> int:
        """Count of the others that were compared with the most accurate: those of known error, none where its own is unknown."""
        p_value = self.eligible["p_value"]
        return 0 if math.isnan(p_value.iloc[0]) else int(p_value.count()) - 1

    @cached_property
    def edges(self) -> list[tuple[str, float, str]]:
        """(factor, value, "lower" or "upper") where the best's value is the smallest or largest tried."""
        rows, best, edges = self.model.rows, self.best.to_frame().T, []
        for factor in (name for name in NUMERIC if name in varied(rows) and effects.reading(best, rows, name).all()):
            levels, value = levels_of(rows[effects.reading(rows, rows, factor)], factor), levels_of(best, factor).item()
            if levels.min() < levels.max() and value in (levels.min(), levels.max()):
                edges.append((factor, value, "lower" if value == levels.min() else "upper"))
        return edges

    def _beyond(self, factor: str, value: float, side: str) -> float | None:
        """Return twice or half a value at the edge of what was tried; None where a hyperparameter cannot have it."""
        kind, model = HYPERPARAMETERS[factor].kind, self.model
        value_beyond = 2 * value if side == "upper" else value / 2
        if isinstance(kind, Whole):
            value_beyond = int(value_beyond)
        asked = (model.source or {}).get("protocol", {}).get("perplexity_window", 0)
        # Windows that are shorter than was asked for are all that the model takes
        longest = model.window if factor == "seq_len" and model.window and model.window < asked else math.inf
        return value_beyond if kind.holds(value_beyond) and value_beyond <= longest else None

    def _other_choice(self, *rules: str) -> Message:
        """Return what to do where accuracies say nothing: choose by the first of these rules that something was measured for, or
        stay."""
        if self.rule in rules:
            return Message("step_stay", {"rule": self.rule})
        rule = next((name for name in rules if self.chosen[name]), None)
        return Message("step_tasks") if rule is None else Message("step_rule", {"rule": rule})

    def reading(self, *factors: str) -> pd.DataFrame:
        """Return the eligible rows that vary with each of these factors (`effects.reading`)."""
        reads = [effects.reading(self.eligible, self.model.rows, factor) for factor in factors]
        return self.eligible[np.logical_and.reduce(reads)] if reads else self.eligible

    @cached_property
    def sampling(self) -> set[str]:
        """The methods that read calibration samples."""
        return methods_reading(self.model.rows, CALIBRATION[0])

    @cached_property
    def cross_fit(self) -> CrossFit | None:
        """None without item outcomes, and where rows without them decided."""
        choice = self.eligible, self.best["name"], self.scores, self.comparison, self.rule
        generator = np.random.default_rng(seed_for(self.seed, f"folds of {self.model.label}"))
        return cross_fit_rule(*choice, generator, self.items)

    @cached_property
    def methods(self) -> pd.DataFrame:
        """`effects.method_table`: index method, highest mean first; columns n, mean, std (n - 1), std_n (over n), min, median, max,
        best (name); p_below, the p that it is below the highest mean by `method_pairs` (NaN where the two cannot be compared; of
        the highest itself 1, NaN where it can be compared with none); and tied: known not to be distinguishably below."""
        table, pairs = effects.method_table(self.eligible), self.method_pairs["p_value"].to_dict()
        top, *others = table.index
        below = {method: pairs.get((top, method), math.nan) for method in others}
        # Over the settings that both completed the highest mean may be the lower one
        below |= {method: 1.0 for method in others if not math.isnan(pairs.get((method, top), math.nan))}
        p_below = pd.Series({top: math.nan if np.isnan([*below.values()]).all() else 1.0, **below})
        return table.assign(p_below=p_below, tied=p_below > 0.05)

    @cached_property
    def method_pairs(self) -> pd.DataFrame:
        """`effects.method_pairs`: index first, second; columns n, points, stderr_points, p_value (corrected for all pairs)."""
        generator = np.random.default_rng(seed_for(self.seed, f"methods of {self.model.label}"))
        return effects.method_pairs(self.model.rows, self.eligible, self.comparison, generator)

    @cached_property
    def levels(self) -> Mapping[str, pd.DataFrame]:
        """`effects.level_table` of each hyperparameter that a method reads."""
        shown = [factor for factor in NUMERIC if factor in CALIBRATION or factor in varied(self.eligible)]
        return {factor: effects.level_table(rows, factor) for factor in shown if len(rows := self.reading(factor))}

    @cached_property
    def trends(self) -> Mapping[str, Trend]:
        """The trend of each hyperparameter with two levels or more."""
        rows = {factor: self.reading(factor) for factor in NUMERIC}
        return {
            name: effects.trend(of_factor, name) for name, of_factor in rows.items() if of_factor[name].nunique() > 1
        }

    @cached_property
    def effects(self) -> pd.DataFrame | None:
        """`effects.anova`, where the eligible trials are a full grid."""
        return effects.anova(self.reading(*varied(self.model.rows)))

    @cached_property
    def importance(self) -> Mapping[str, float]:
        """Hyperparameter -> share of accuracy's variation that it answers for, as `importance_basis` tells it."""
        return effects.importance(self.reading(*varied(self.model.rows)), self.effects)

    @property
    def importance_basis(self) -> str:
        """ "anova", "optuna" or "none"."""
        return "anova" if self.effects is not None else "optuna" if self.importance else "none"

    @cached_property
    def correlations(self) -> tuple[Correlation, ...]:
        return effects.correlations(self.eligible)

    @cached_property
    def tasks(self) -> pd.DataFrame:
        """The tasks of `best` and their "mean": acc, stderr, dense, retained, the columns of `guessing`; NaN what is not known."""
        best, dense = self.best, self.model.baseline
        tasks = [task for task in (*self.model.tasks, "mean") if not pd.isna(best[f"acc_{task}"])]
        columns = {
            "acc": [best[f"acc_{task}"] for task in tasks],
            "stderr": [best.get(f"acc_{task}_stderr", math.nan) for task in tasks],
            "dense": [dense.get(f"acc_{task}", math.nan) for task in tasks],
            "retained": [self.retained(best[f"acc_{task}"], task) for task in tasks],
        }
        return pd.DataFrame(columns, pd.Index(tasks, name="task"), dtype="float64").join(self.guessing)

    @cached_property
    def guessing(self) -> pd.DataFrame:
        """`items.guessing`: index the tasks and "mean"; columns chance, majority, items, threshold."""
        model, sizes = self.model, None
        if model.kind == "published":
            sizes = TASK_ITEMS if model.binomial else sizes_of(self.trials, model.tasks)
        return guessing(model.tasks, self.best["output_dir"], model.source, sizes)

    @cached_property
    def uninformative(self) -> list[str]:
        """The tasks that tell nothing of the dense model: its accuracy may come from guessing."""
        return [task for task in self.model.tasks if self.at_chance(self.model.baseline.get(f"acc_{task}"), task)]

    def informative(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Return acc_mean of a row, and its standard error, without the uninformative tasks; NaN where there are none, or no
        others, and what is not known."""
        tasks = [task for task in self.tasks.index[:-1] if self.uninformative and task not in self.uninformative]
        if not tasks:
            return math.nan, math.nan
        columns = [f"acc_{task}" for task in tasks]
        several = draws.of_control(self.draws, bool(self.control_variances) and row.get("method") == CONTROL)
        together = draws.moved_together(several, self.interactions, columns) if several else 0.0
        accuracies = np.array([row.get(column, math.nan) for column in columns], dtype=np.float64)
        errors = np.array([row.get(f"{column}_stderr", math.nan) for column in columns], dtype=np.float64)
        variance = np.square(errors).sum() / len(tasks) ** 2 + together * row.get("draw_share", 0.0)
        return float(accuracies.mean()), float(np.sqrt(np.maximum(0.0, variance)))

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """`differences.changes`: what the refit of these does or, where they are trained, the training."""
        of = self.untrained if self.model.trained else self
        dense = self.model.baseline.get(GOLD, math.nan)
        return () if of is None else differences.changes((self.eligible, self.draws), (of.eligible, of.draws), dense)

    def at_chance(self, accuracy: Any, task: str = "mean") -> bool:
        """Return whether an accuracy may come from guessing; what is not known does not."""
        return accuracy is not None and bool(accuracy < self.guessing.loc[task, "threshold"])

    def retained(self, accuracy: Any, task: str = "mean") -> float | None:
        """Return `accuracy` over the dense model's; None where that is not known, or may itself come from guessing."""
        dense = self.model.baseline.get(f"acc_{task}", math.nan)
        known = accuracy is not None and dense > 0 and not self.at_chance(dense, task)
        return float(accuracy / dense) if known else None

    @cached_property
    def statistics(self) -> Mapping[str, float]:
        """Counts (runs, complete, failed, stopped_early, not_finite, task_evaluations), and max, min, median, mean, std (n - 1)
        of acc_mean over the configurations."""
        rows, accuracy, status = self.model.rows, self.eligible["acc_mean"], self.model.rows["status"].value_counts()
        return {
            "runs": len(rows),
            "complete": len(self.trials),
            "failed": int(status.get("failed", 0)),
            "stopped_early": int(status.get("stopped_early", 0)),
            "not_finite": int(rows["success"].sum()) - len(self.trials),
            "task_evaluations": int(rows[[f"acc_{task}" for task in self.model.tasks]].notna().to_numpy().sum()),
            **{name: float(getattr(accuracy, name)()) for name in ("max", "min", "median", "mean", "std")},
        }

    @cached_property
    def warnings(self) -> tuple[Message, ...]:
        """What a reader must know before believing the decision; the gravest first."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[Message]:
        rows, eligible, fit = self.model.rows, self.eligible, self.cross_fit
        dense = self.model.baseline.get("acc_mean", math.nan)
        guess = self.guessing.loc["mean", ["chance", "majority"]].max()
        if "items_after_eos" in eligible and eligible["items_after_eos"].max() > 0:
            yield Message("items_after_eos", {"step": self._other_choice("perplexity")})
        if not math.isfinite(dense):
            yield Message("dense_unknown")
        if self.at_chance(dense):
            yield Message("dense_at_chance", {"dense": dense, "guess": guess, "step": self._other_choice("perplexity")})
        elif self.at_chance(self.best["acc_mean"]):
            yield Message("best_at_chance", {"acc": self.best["acc_mean"], "guess": guess})
        if self.uninformative:
            step = self._other_choice("kl", "perplexity")
            yield Message("tasks_at_chance", {"names": self.uninformative, "step": step})
        for measure in JUDGED:
            if names := [change.after["name"] for change in self.changes if measure in change.worse]:
                yield Message(f"worse_{measure}", {"names": names})
        if "items_in_calibration" in eligible and (seen := eligible["items_in_calibration"].max()) > 0:
            names = eligible.loc[eligible["items_in_calibration"] > 0, "name"].tolist()
            yield Message("items_in_calibration", {"count": int(seen), "names": names})
        if len(devices := sorted({*eligible["device_name"].dropna()} - {""})) > 1:
            yield Message("several_devices", {"names": devices})
        if beyond := {edge: value for edge in self.edges if (value := self._beyond(*edge)) is not None}:
            edges = [Message(f"edge_{side}", {"factor": name, "value": value}) for name, value, side in beyond]
            space = [f"{name}: {sorted([value, new])}" for (name, value, _), new in beyond.items()]
            yield Message("edges", {"edges": edges, "space": space})
        first, *others = self.tied
        if others:
            points = -float(self.named(others[0])["difference_points"])
            yield Message("within_noise", {"best": first, "others": others, "next": others[0], "points": points})
        if fit is not None and fit.naive - fit.corrected > fit.stderr:
            yield Message("selection_bias", {"naive": fit.naive, "corrected": fit.corrected})
        if self.rule != "perplexity" and self.chosen["perplexity"] and self.chosen["perplexity"][0] != first:
            yield Message("ppl_disagrees", {"best": first, "best_ppl": self.chosen["perplexity"][0]})
        by_mean, by_max = self.methods.index[0], eligible["method"].iloc[0]
        if self.methods.loc[by_max, "p_below"] <= 0.05 and self.methods.loc[by_mean, "best"] in self.ruled_out:
            yield Message("rank_disagrees", {"by_mean": by_mean, "by_max": by_max})
        expected = effects.grid_size(rows)
        if len(eligible) < expected:
            yield Message("missing_trials", {"missing": expected - len(eligible), "expected": expected})
        if stopped := self.statistics["stopped_early"]:
            yield Message("stopped_early", {"count": stopped})
        if len(eligible) > 1:
            if self.scores_message is not None:
                yield self.scores_message
            if unknown := eligible.loc[eligible["p_value"].isna(), "name"].tolist():
                yield Message("stderr_unknown", {"names": unknown})
        yield from draws.warnings(eligible, self.best["name"], self.draw_variance)


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything."""

    study: Study
    rule: str
    within: float  # points below the dense model's accuracy that rule "smallest" allows
    models: Mapping[str, ModelFindings]  # with an eligible trial at least
    without: tuple[str, ...]  # labels of models that have none
    items: DrawItems

    @cached_property
    def transfer(self) -> Transfer | None:
        """What models lose with each other's best configurations; None with fewer than two models."""
        if len(self.models) < 2:
            return None
        rows = {label: result.eligible for label, result in self.models.items()}
        return differences.transfer(rows, {label: one.best for label, one in self.models.items()}, self.items)

    def meaning(self, rule: str) -> Message:
        return Message(f"rule_{rule}", {"within": self.within})

    @cached_property
    def series(self) -> Mapping[str, list[ModelFindings]]:
        """The models that differ in nothing but their pruning ratio, the lowest ratio first, by their label without it."""
        ordered = sorted(self.models.values(), key=lambda result: result.model.ratio)
        names = dict.fromkeys(result.model.series for result in self.models.values())
        return {name: [result for result in ordered if result.model.series == name] for name in names}

    @cached_property
    def protocols(self) -> list[tuple[dict[str, int | None], list[str]]]:
        """How models were measured, with the labels of those that were measured so: one where all stand side by side. Items of each
        task and "perplexity tokens", the first of that text (0: all); None what is not known, and differs from nothing."""
        groups: list[tuple[dict[str, int | None], list[str]]] = []
        for label, one in self.models.items():
            model, counts = one.model, one.tasks["items"].drop("mean")
            implied = model.kind == "published" and not model.binomial  # by standard errors, hence about
            this = {str(task): None if implied or pd.isna(count) else int(count) for task, count in counts.items()}
            this["perplexity tokens"] = None if model.source is None else model.tokens or 0
            for protocol, labels in groups:
                if [*protocol] == [*this] and all(
                    None in (known, this[name]) or known == this[name] for name, known in protocol.items()
                ):
                    protocol |= {name: this[name] for name, known in protocol.items() if known is None}
                    labels.append(label)
                    break
            else:
                groups.append((this, [label]))
        return groups

    @cached_property
    def smallest(self) -> Mapping[str, ModelFindings]:
        """By rule "smallest" the one of each of `series` whose best has the fewest parameters; none where nothing is within."""

        def size(one: ModelFindings) -> float:
            return plain_value(one.best["params_count"]) or math.inf

        able = {name: [one for one in members[::-1] if one.chosen["smallest"]] for name, members in self.series.items()}
        return {name: min(members, key=size) for name, members in able.items() if members}


def _untrained(model: Model, models: Iterable[ModelFindings]) -> ModelFindings | None:
    """Return the untrained findings of the same model and ratio, measured alike, with the most of its configurations."""
    tried = {without_draw(config).untrained() for config in model.rows["configuration"]}

    def shared(one: ModelFindings) -> int:
        return len(tried & {without_draw(config).canonical() for config in one.eligible["configuration"]})

    alike = [
        one for one in models if not one.model.trained and (one.model.kin, one.model.ratio) == (model.kin, model.ratio)
    ]
    return max(alike, key=shared, default=None)


def find(study: Study, rule: str = "accuracy", seed: int = 0, within: float = WITHIN) -> Findings:
    """Return the findings of `study`, the best of each model chosen by `rule` (one of RULES); `within` is of rule "smallest".

    `seed` is of the bootstrap and of the folds; each model has its own stream, whatever other models there are. UserError
    for an unknown rule, for a rule that a model's rows cannot decide, and for items that contradict their trial's record.
    """
    if rule not in RULES:
        raise UserError(f"selection rule {rule!r} is not known; {did_you_mean(rule, RULES)}")
    items = DrawItems(ItemReader())
    models: dict[str, ModelFindings] = {}
    for label, plain in study.models.items():  # of a model trained ones come after the others
        sizes = certain_sizes(plain)
        model = with_wilson_errors(plain, sizes)
        eligible, several = draws.configurations(ranked(plain.rows), plain.rows, model.seedless)
        if eligible.empty:
            continue
        interactions = draws.interactions(several, items)
        variances, control = (
            draws.draw_variances(draws.of_control(several, of_control), interactions) for of_control in (False, True)
        )
        # A draw with an accuracy of 1 is certain of nothing, but its mean with others has an error of its own
        eligible = rows_with_wilson_errors(draws.item_errors(eligible, interactions), sizes)
        spreads = draws.shared(eligible, variances.get("acc_mean"), control.get("acc_mean"))
        scores, message = paired_scores(eligible, items)
        accuracies, stderrs = (eligible[name].to_numpy(dtype=np.float64) for name in ("acc_mean", "acc_mean_stderr"))
        generator = np.random.default_rng(seed_for(seed, f"bootstrap of {label}"))
        comparison = compare(accuracies, stderrs, scores, generator, spreads=spreads)
        eligible = draws.with_draw_errors(eligible, variances, control).assign(
            **measured_apart(eligible, model, study.costs),
            difference_points=100 * (eligible["acc_mean"] - eligible["acc_mean"].iloc[0]),
            difference_stderr_points=100 * comparison.stderr(slice(0, 1))[0],
            p_value=comparison.p_value,
            in_confidence_set=comparison.in_confidence_set,
            margin_points=100 * (eligible["acc_mean"] - model.baseline.get("acc_mean", math.nan)) + within,
        )
        chosen = {name: choose(eligible) for name, choose in RULES.items()}
        if not chosen[rule] and rule != "smallest":  # which decides over all ratios
            raise UserError(
                f"selection rule {rule!r} needs {NEEDS[rule]}, which no complete trial of {label} has; use --rule accuracy"
            )
        models[label] = ModelFindings(
            *(model, rule, eligible, ranked(model.rows), several, interactions, variances, control),
            *(comparison, scores, message, chosen, seed, items),
            _untrained(model, models.values()) if model.trained else None,
        )
    without = tuple(label for label in study.models if label not in models)
    findings = Findings(study, rule, within, models, without, items)
    for label, members in findings.series.items():
        if rule == "smallest" and label not in findings.smallest:
            nearest = max(members, key=lambda result: comparable(result.best["acc_mean"]))
            what = f"{nearest.best['name']} with {100 * nearest.model.ratio:g}% removed"
            raise UserError(none_within(label, within, what, nearest.against_dense))
    return findings
