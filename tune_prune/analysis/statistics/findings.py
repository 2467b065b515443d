"""What the statistics say of a study: everything that a search prints at its end and that tables, figures and reports print.

`find` chooses the best configuration of each model; the rest is computed when it is asked for, once, so that a search's end
does not pay for what only a report prints. Accuracies and their standard errors are fractions, differences are percentage
points. Tables are data frames; what a column holds is said where it is declared. A value that cannot be computed is None or
NaN and its reason stands beside it as a `Message`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from tune_prune.analysis.input.errors import certain_sizes, rows_with_wilson_errors, with_wilson_errors
from tune_prune.analysis.input.items import ItemReader
from tune_prune.analysis.input.measures import with_gold_logprobs
from tune_prune.analysis.input.message import Message
from tune_prune.analysis.input.rows import configuration_of, plain_value, ranked
from tune_prune.analysis.input.study import Model, Study, measured_apart
from tune_prune.analysis.statistics import draws
from tune_prune.analysis.statistics.comparison import compare, paired_scores
from tune_prune.analysis.statistics.cross_fit import CrossFit
from tune_prune.analysis.statistics.differences import Transfer, transfer
from tune_prune.analysis.statistics.draws import DrawItems
from tune_prune.analysis.statistics.effects import Correlation, Trend
from tune_prune.analysis.statistics.model_findings import ModelFindings
from tune_prune.analysis.statistics.rules import NEEDS, RULES, WITHIN, none_within
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hashing import seed_for
from tune_prune.core.measures import comparable

__all__ = ["RULES", "Correlation", "CrossFit", "Findings", "Message", "ModelFindings", "Trend", "find"]


@dataclass(frozen=True)
class Protocol:
    """How a model was measured."""

    items: Mapping[str, int | None]  # of each task; None: not known
    tokens: int | None  # of the perplexity text, the first; 0: all; None: not known

    @classmethod
    def of(cls, found: ModelFindings) -> Protocol:
        model, counts = found.model, found.tasks["items"].drop("mean")
        implied = model.kind == "published" and not model.binomial  # by standard errors, hence about
        items = {str(task): None if implied or pd.isna(count) else int(count) for task, count in counts.items()}
        return cls(items, None if model.source is None else model.tokens or 0)

    def joined(self, other: Protocol) -> Protocol | None:
        """What both say, where nothing that is known of both differs."""
        pairs = [(self.tokens, other.tokens), *((self.items[task], other.items.get(task)) for task in self.items)]
        if list(self.items) != list(other.items) or any(None not in pair and pair[0] != pair[1] for pair in pairs):
            return None
        tokens, *counts = (first if second is None else second for first, second in pairs)
        return Protocol(dict(zip(self.items, counts, strict=True)), tokens)


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
        rows = {label: found.eligible for label, found in self.models.items()}
        return transfer(rows, {label: found.best for label, found in self.models.items()}, self.items)

    def meaning(self, rule: str) -> Message:
        return Message(f"rule_{rule}", {"within": self.within})

    @cached_property
    def series(self) -> Mapping[str, list[ModelFindings]]:
        """The models that differ in nothing but their pruning ratio, the lowest ratio first, by their label without it."""
        ordered = sorted(self.models.values(), key=lambda found: found.model.ratio)
        names = dict.fromkeys(found.model.series for found in self.models.values())
        return {name: [found for found in ordered if found.model.series == name] for name in names}

    @cached_property
    def protocols(self) -> list[tuple[Protocol, list[str]]]:
        """How models were measured, with the labels of those that were measured so: one where all stand side by side."""
        found: list[tuple[Protocol, list[str]]] = []
        for label, one in self.models.items():
            own = Protocol.of(one)
            for index, (protocol, labels) in enumerate(found):
                if (joined := protocol.joined(own)) is not None:
                    found[index] = joined, [*labels, label]
                    break
            else:
                found.append((own, [label]))
        return found

    @cached_property
    def smallest(self) -> Mapping[str, ModelFindings]:
        """By rule "smallest" the one of each of `series` whose best has the fewest parameters; none where nothing is within."""
        able = {name: [one for one in members[::-1] if one.chosen["smallest"]] for name, members in self.series.items()}
        size = {one.model.label: plain_value(one.best["params_count"]) or math.inf for one in self.models.values()}
        return {name: min(members, key=lambda one: size[one.model.label]) for name, members in able.items() if members}


def _untrained(model: Model, models: Iterable[ModelFindings]) -> ModelFindings | None:
    """Of the untrained ones of the same model and ratio, measured alike, that with the most of its configurations."""
    alike = [
        one for one in models if not one.model.trained and (one.model.kin, one.model.ratio) == (model.kin, model.ratio)
    ]
    own = {configuration_of(row).untrained() for _, row in model.rows.iterrows()}
    shared = [len(own & {configuration_of(row).canonical() for _, row in one.eligible.iterrows()}) for one in alike]
    return alike[shared.index(max(shared))] if alike else None


def find(study: Study, rule: str = "accuracy", seed: int = 0, within: float = WITHIN) -> Findings:
    """The findings of `study`, the best of each model chosen by `rule` (one of RULES); `within` is of rule "smallest".

    `seed` is of the bootstrap and of the folds; each model has its own stream, whatever other models there are. UserError
    for an unknown rule, for a rule that a model's rows cannot decide, and for items that contradict their trial's record.
    """
    if rule not in RULES:
        raise UserError(f"selection rule {rule!r} is not known; {did_you_mean(rule, RULES)}")
    items = DrawItems(ItemReader())
    models: dict[str, ModelFindings] = {}
    for label, read in study.models.items():  # of a model trained ones come after the others
        plain, sizes = with_gold_logprobs(read), certain_sizes(read)
        model = with_wilson_errors(plain, sizes)
        trials = ranked(model.rows)
        eligible, several = draws.configurations(ranked(plain.rows), plain.rows, model.seedless)
        if eligible.empty:
            continue
        interactions = draws.interactions(several, items)
        variances, control = (
            draws.draw_variances(draws.of_control(several, own), interactions) for own in (False, True)
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
            *(model, rule, eligible, trials, several, interactions, variances, control),
            *(comparison, scores, message, chosen, seed, items),
            _untrained(model, models.values()) if model.trained else None,
        )
    without = tuple(label for label in study.models if label not in models)
    findings = Findings(study, rule, within, models, without, items)
    for label, members in findings.series.items():
        if rule == "smallest" and label not in findings.smallest:
            nearest = max(members, key=lambda found: comparable(found.best["acc_mean"]))
            what = f"{nearest.best['name']} with {100 * nearest.model.ratio:g}% removed"
            raise UserError(none_within(label, within, what, nearest.against_dense))
    return findings
