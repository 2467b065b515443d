"""`--draws N`: which configurations of a search are measured on more draws of calibration samples, and why.

Every configuration gets one draw, those that may still have the best mean of N draws by the measure of --draws-by get more
(analysis.statistics.draws.next_draws). Each decision follows from the records of the draws that were given before it and from
nothing else, so a search that was killed decides the same again.

`--recover N`: which configurations are trained once all of them are measured without training, and why.

A training takes longer than everything else of a trial. So of each model and pruning ratio N are trained of those that may still be
the most accurate (the confidence set, docs/analysis.md), on each draw of calibration samples that they were given. Accuracy cannot
tell these apart; the log-probability of right choices, which says more per item, does: the N with the highest, or, where tasks have
none, the N most accurate. That follows from the records alone, so a search that was killed decides the same again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tune_prune.analysis.input.items import GOLD
from tune_prune.analysis.input.study import Study
from tune_prune.analysis.statistics.draws import draw_variance, next_draws, of_control
from tune_prune.analysis.statistics.findings import Findings, ModelFindings, find
from tune_prune.analysis.statistics.rules import NEEDS, score, score_columns
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import seed_for
from tune_prune.core.hyperparameters import RECIPE
from tune_prune.core.records import TrialRecord
from tune_prune.tuning.plan import ModelPlan, Plan

_BEST = {
    "accuracy": "the most accurate",
    "gold_logprob": "the best by right answers",
    "kl": "the closest to the original",
}  # by --draws-by


@dataclass(frozen=True)
class Round:
    """What one decision gave to the configurations of one model."""

    model: str  # label, with the pruning ratio where there are several
    draws: Mapping[str, int]  # configuration -> the number of the draw that it gets: 2 is its second
    of: int  # configurations that were compared
    spread_points: (
        float | None
    )  # standard deviation of a draw's accuracy on these items; None where nobody had two draws, and by nats
    freedom: int  # degrees of freedom of that
    others: float | None  # chance that one of those which got none would have won
    by: str = "accuracy"  # the measure of --draws-by
    spread_nats: float | None = None  # as `spread_points`, of the other measures

    def __str__(self) -> str:
        names = list(self.draws)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        number = "/".join(map(str, sorted(set(self.draws.values()))))
        text = f"{self.model}: run {number} for {len(names)} of {self.of} configurations ({shown}): "
        best = _BEST[self.by]
        if self.others is None:
            return text + f"{best} by one run, to see how far runs differ"
        apart = f"{self.spread_nats:.3f} nats" if self.spread_points is None else f"{self.spread_points:.1f} points"
        return text + (
            f"they could still be {best}, the others with a chance of {self.others:.1%} together; runs differ by {apart} "
            f"({self.freedom} degrees of freedom)"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_given(plan: Plan, model: ModelPlan) -> set[str]:
    """The keys of those trials of a model that no decision is made for: with --draws of the first draw, with --recover without
    training."""
    own = (None, model.run.seed) if plan.settings.draws is not None else None
    return {
        key for config, key in model.trials if (own is None or config.seed in own) and not is_withheld(plan, config)
    }


class Draws:
    """The draws of a plan: all of them are its trials, and `given` are the keys of those that are to be run."""

    def __init__(self, plan: Plan, study: Callable[[Sequence[TrialRecord]], Study]) -> None:
        self._seed, self._by = plan.settings.seed, plan.settings.draws_by
        self._study = study
        self._draws: dict[str, list[str]] = {}  # key of a first draw -> of all draws, in order
        self._first: dict[str, str] = {}  # key of a draw -> of the first
        by_config: dict[tuple[str, PruningConfig], str] = {}
        for model in plan.models:
            for config, key in model.trials:  # the run's own draw stands first
                if is_withheld(plan, config):
                    continue
                first = by_config.setdefault((model.run.label, replace(config, seed=None)), key)
                self._draws.setdefault(first, []).append(key)
                self._first[key] = first
        self.given = set().union(*(first_given(plan, model) for model in plan.models))
        self.rounds: list[Round] = []

    def decide(self, records: Collection[TrialRecord]) -> bool:
        """Give draws by the records of those that were given; whether there were any to give. Raises UserError where nothing of the
        measure of --draws-by is among them."""
        found = find(self._study([record for record in records if record.key in self.given]))
        decided = [self._round(model) for model in found.models.values()]
        self.rounds += [one for one, keys in decided if keys]
        new = {key for _, keys in decided for key in keys}
        self.given |= new
        return bool(new)

    def _round(self, found: ModelFindings) -> tuple[Round, list[str]]:
        rows, scores = found.eligible, score(found.eligible, self._by)
        if np.isnan(scores).all():
            raise UserError(
                f"--draws-by {self._by} needs {NEEDS[self._by]}, which no complete trial of {found.model.label} has; use "
                "--draws-by accuracy"
            )
        between = draw_variance(of_control(found.draws, False), found.interactions, score_columns(rows, self._by))
        firsts = [self._first[key] for key in rows["key"]]
        had = np.array([len(self.given & set(self._draws[first])) for first in firsts])
        # A draw that has failed is in no mean, and never will be; what has had all its draws moves no more, as a method that reads
        # no seed with its first
        counts = rows["draws"].to_numpy()
        most = np.array([len(self._draws[first]) for first in firsts]) - (had - counts)
        number = len(self.rounds)
        generator = np.random.default_rng(seed_for(self._seed, f"draws of {found.model.label}, {number}"))
        wanted, chances = next_draws(np.nan_to_num(scores, nan=-np.inf), counts, most, between, generator)
        names, places = rows["name"].tolist(), np.flatnonzero(wanted)
        spread = None if between is None else between.mean_square**0.5
        in_points = self._by == "accuracy"
        one = Round(
            found.model.label,
            {names[place]: int(had[place]) + 1 for place in places},
            len(rows),
            None if spread is None or not in_points else 100 * spread,
            0 if between is None else between.freedom,
            None if between is None else float(chances[~wanted & (counts < most)].sum()),
            self._by,
            None if in_points else spread,
        )
        return one, [self._draws[firsts[place]][had[place]] for place in places]


@dataclass(frozen=True)
class Trained:
    """What is trained of one model."""

    model: str  # label, with the pruning ratio where there are several
    configurations: tuple[str, ...]  # without training, the best first
    of: int  # configurations that were compared
    tied: int  # of which so many may still be the most accurate
    by: str  # the measure that chose among those

    def __str__(self) -> str:
        names, count = self.configurations, len(self.configurations)
        shown = "".join(f"\n{'':13}{name}" for name in names[:4])
        more = f"\n{'':13}and {count - 4} more" if count > 4 else ""
        which = "the most promising" if count == 1 else f"the {count} most promising"
        by = "the likelihood of right answers" if self.by == GOLD else "accuracy"
        return f"{self.model}: training {which} of {self.of}, by {by}{shown}{more}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_withheld(plan: Plan, config: PruningConfig) -> bool:
    """Whether that trial has to wait for the decision."""
    return plan.settings.recover is not None and config.recovery != PruningConfig.recovery


def expected(plan: Plan, configs: Iterable[PruningConfig]) -> list[PruningConfig]:
    """Those of a model's configurations that the search runs at most: of the trained ones so many of each ratio and draw."""
    most, counts, found = plan.settings.recover, Counter[tuple[Any, ...]](), []
    for config in configs:
        trained = (getattr(config, name) for name, row in RECIPE.items() if row.of == "recovery")
        of = config.pruning_ratio, config.seed, *trained
        counts[of] += is_withheld(plan, config)
        if most is None or not is_withheld(plan, config) or counts[of] <= most:
            found.append(config)
    return found


def choose(plan: Plan, findings: Findings, given: Collection[str]) -> tuple[list[Trained], set[str]]:
    """What is trained by the `findings` of what was `given` (trial keys), and the keys of those trials."""
    chosen, keys = [], set()
    for found in findings.models.values():
        tied = found.eligible[found.eligible["in_confidence_set"]]
        by = GOLD if GOLD in tied and tied[GOLD].notna().all() else "acc_mean"
        # By accuracy they are in that order already.
        ordered = tied.sort_values(GOLD, ascending=False, kind="stable") if by == GOLD else tied
        best = ordered.head(plan.settings.recover)
        chosen.append(Trained(found.model.label, tuple(best["name"]), len(found.eligible), len(tied), by))
        for model in plan.models:
            by_key = {key: config for config, key in model.trials}
            untrained = {config: key for key, config in by_key.items()}
            wanted = {replace(by_key[key], seed=None) for key in best["key"] if key in by_key}
            keys |= {
                key
                for key, config in by_key.items()
                if is_withheld(plan, config)
                and replace(config.untrained(), seed=None) in wanted
                and untrained.get(config.untrained(), untrained.get(replace(config.untrained(), seed=None))) in given
            }
    return chosen, keys
