"""The batches that a search runs: all of it at once, or with `--draws N` and `--recover N` what its records say.

`--draws N`: every configuration gets one draw of calibration samples. Those that may still have the best mean of N draws by the
measure of --draws-by get more (analysis.statistics.draws.next_draws).

`--recover N`: a training takes longer than everything else of a trial. So of each model and pruning ratio N are trained of those
that may still be the most accurate (the confidence set, docs/analysis.md), on each draw of calibration samples that they were
given. Accuracy cannot tell these apart; the log-probability of right choices, which says more per item, does: the N with the
highest, or, where tasks have none, the N most accurate. With another --objective than accuracy the N best by that are trained.

Each decision follows from the records of the trials that were given before it and from nothing else, so a search that was killed
decides the same again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from tune_prune.analysis.input.items import GOLD
from tune_prune.analysis.input.reading import study_of_search
from tune_prune.analysis.statistics.draws import draw_variance, next_draws, of_control
from tune_prune.analysis.statistics.findings import Findings, ModelFindings, find
from tune_prune.analysis.statistics.rules import NEEDS, score, score_columns
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import seed_for
from tune_prune.core.ledger import Experiment
from tune_prune.core.records import TrialRecord, failure_counts, may_pass
from tune_prune.core.terminal import say
from tune_prune.tuning import experiment
from tune_prune.tuning.plan import Plan
from tune_prune.tuning.work import TrialSpec

_BEST = {
    "accuracy": "the most accurate",
    "gold_logprob": "the best by right answers",
    "kl": "the closest to the original",
}  # by --draws-by
_BY = {
    "acc_mean": "accuracy",
    "perplexity": "perplexity",
    "gold_logprob": "the likelihood of right answers",
    GOLD: "the likelihood of right answers",
    "kl": "the distance from the original",
}  # by `Trained.by`


@dataclass(frozen=True)
class Batch:
    """Trials that are run before the next decision; those that the ledger holds are not run again."""

    trials: Sequence[TrialSpec]
    may_stop: bool = True  # whether the scheduler and the KL filter stop trials early


class Rounds:
    """The batches of a plan, each by the records of those before it. `given`: keys of the trials that are to be run so far."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._held = plan.held
        self.given = plan.first_trials
        self._batches = self._decided() if plan.decides else iter([Batch(plan.trials)])

    def next(self, held: Experiment) -> Batch | None:
        """Return what is to be run next by what the experiment has `held` since the last batch; None at the end."""
        self._held = held
        return next(self._batches, None)

    def _decided(self) -> Iterator[Batch]:
        """Yield what no decision is made for, then draw by draw those that may still be the best, then with training the best of
        them. What has failed for a reason that may pass is tried once more before a decision, and left out if it fails again.
        Only the first trials may be stopped early: a mean over draws needs all of them."""
        plan, settings = self._plan, self._plan.settings
        failed_before = {record.key for record in self._held.records if record.status == "failed"}
        draws, run, may_stop = Draws(plan), set[str](), True
        while self.given > run:
            yield self._batch(self.given - run, may_stop)
            if again := {
                one.key: one.failure for one in self._given() if may_pass(one) and one.key not in failed_before
            }:
                say(f"again        {failure_counts(again.values())}: tried once more before anything is decided")
                failed_before |= again.keys()
                finished = self._held.finished.keys() & self.given  # what a race judges it beside
                yield self._batch(finished | again.keys(), may_stop)
            may_stop, run = False, set(self.given)
            if settings.draws is not None:
                decisions, keys = draws.decide(self._findings(), self.given)
                self.given |= keys
                self._held = experiment.write_given(self._held, plan, self.given, draws=draws.decisions)
                for decision in decisions:
                    say(f"draws        {decision}")
        if settings.recover is not None:
            trained, keys = to_train(plan, self._findings(), self.given)
            self._held = experiment.write_given(self._held, plan, self.given | keys, recovered=trained)
            for one in trained:
                say(f"recovery     {one}")
            yield self._batch(keys, may_stop)

    def _batch(self, keys: Collection[str], may_stop: bool) -> Batch:
        return Batch([spec for spec in self._plan.trials if spec.key in keys], may_stop)

    def _given(self) -> list[TrialRecord]:
        return [record for record in self._held.records if record.key in self.given]

    def _findings(self) -> Findings:
        held = self._held
        return find(study_of_search(self._plan.experiment_dir, held.about or {}, held.baselines, self._given()))


@dataclass(frozen=True)
class MoreDraws:
    """Further draws that one decision gave to configurations of one model."""

    model: str  # label, with the pruning ratio where there are several
    draws: Mapping[str, int]  # configuration -> the number of the draw that it gets: 2 is its second
    of: int  # configurations that were compared
    # Standard deviation of a draw's accuracy on these items; None where nobody had two draws, and by nats.
    spread_points: float | None
    freedom: int  # degrees of freedom of that
    others: float | None  # chance that one of those which got none would have won
    by: str = "accuracy"  # the measure of --draws-by
    spread_nats: float | None = None  # as `spread_points`, of the other measures

    def __str__(self) -> str:
        number = "/".join(map(str, sorted(set(self.draws.values()))))
        names = ", ".join([*self.draws][:4]) + ", ..." * (len(self.draws) > 4)
        text = f"{self.model}: run {number} for {len(self.draws)} of {self.of} configurations ({names}): "
        best = _BEST[self.by]
        if self.others is None:
            return text + f"{best} by one run, to see how far runs differ"
        apart = f"{self.spread_nats:.3f} nats" if self.spread_points is None else f"{self.spread_points:.1f} points"
        return text + (
            f"they could still be {best}, the others with a chance of {self.others:.1%} together; runs differ by {apart} "
            f"({self.freedom} degrees of freedom)"
        )


class Draws:
    """The draws of each configuration of a plan, and the `decisions` about them so far. Those with training are left out."""

    def __init__(self, plan: Plan) -> None:
        self._seed, self._by = plan.settings.seed, plan.settings.draws_by
        self._draws: dict[str, list[str]] = {}  # key of a first draw -> of all draws, in order
        self._first: dict[str, str] = {}  # key of a draw -> of the first
        self.decisions: list[MoreDraws] = []
        by_config: dict[tuple[str, PruningConfig], str] = {}
        for spec in plan.trials:  # the run's own draw stands first
            if not plan.is_withheld(spec.config):
                first = by_config.setdefault((spec.run.label, replace(spec.config, seed=None)), spec.key)
                self._draws.setdefault(first, []).append(spec.key)
                self._first[spec.key] = first

    def decide(self, findings: Findings, given: Collection[str]) -> tuple[list[MoreDraws], set[str]]:
        """Return which draws are given by the `findings` of those that were `given`, and their keys; none at the end.

        Raises UserError where no trial has the measure of --draws-by."""
        decided = [self._decide(model, given) for model in findings.models.values()]
        new = [decision for decision, keys in decided if keys]
        self.decisions += new
        return new, {key for _, keys in decided for key in keys}

    def _decide(self, model: ModelFindings, given: Collection[str]) -> tuple[MoreDraws, list[str]]:
        rows, scores = model.eligible, score(model.eligible, self._by)
        if np.isnan(scores).all():
            raise UserError(
                f"--draws-by {self._by} needs {NEEDS[self._by]}, which no complete trial of {model.model.label} has; use "
                "--draws-by accuracy"
            )
        between = draw_variance(of_control(model.draws, False), model.interactions, score_columns(rows, self._by))
        firsts = [self._first[key] for key in rows["key"]]
        had = np.array([len({*self._draws[first]} & {*given}) for first in firsts])
        # A draw that has failed is in no mean, and never will be. A configuration that has had all its draws moves no more; one
        # whose method reads no seed has had them with its first.
        counts = rows["draws"].to_numpy()
        most = np.array([len(self._draws[first]) for first in firsts]) - (had - counts)
        generator = np.random.default_rng(seed_for(self._seed, f"draws of {model.model.label}, {len(self.decisions)}"))
        wanted, chances = next_draws(np.nan_to_num(scores, nan=-np.inf), counts, most, between, generator)
        names, places = rows["name"].tolist(), np.flatnonzero(wanted)
        spread = None if between is None else between.mean_square**0.5
        in_points = self._by == "accuracy"
        decision = MoreDraws(
            model.model.label,
            {names[place]: int(had[place]) + 1 for place in places},
            len(rows),
            None if spread is None or not in_points else 100 * spread,
            0 if between is None else between.freedom,
            None if between is None else float(chances[~wanted & (counts < most)].sum()),
            self._by,
            None if in_points else spread,
        )
        return decision, [self._draws[firsts[place]][had[place]] for place in places]


@dataclass(frozen=True)
class Trained:
    """Configurations of one model that --recover trains."""

    model: str  # label, with the pruning ratio where there are several
    configurations: tuple[str, ...]  # without training, the best first
    of: int  # configurations that were compared
    tied: int  # those that were chosen from: all that may still be the most accurate, or that have the objective
    by: str  # the measure that chose among those

    def __str__(self) -> str:
        names = "".join(f"\n{'':13}{name}" for name in self.configurations)
        return f"{self.model}: training the {len(self.configurations)} most promising of {self.of}, by {_BY[self.by]}{names}"


def to_train(plan: Plan, findings: Findings, given: Collection[str]) -> tuple[list[Trained], set[str]]:
    """Return what is trained by the `findings` of what was `given` (trial keys), and the keys of those trials."""
    chosen, keys = [], set[str]()
    for model in findings.models.values():
        by, candidates = _promising(model, plan.settings.objective)
        best = candidates.head(plan.settings.recover)
        chosen.append(Trained(model.model.label, tuple(best["name"]), len(model.eligible), len(candidates), by))
        for of_model in plan.models:
            by_key = {spec.key: spec.config for spec in of_model.trials}
            untrained = {config: key for key, config in by_key.items()}
            wanted = {replace(by_key[key], seed=None) for key in best["key"] if key in by_key}
            for key, config in by_key.items():
                before = config.untrained()
                any_draw = replace(before, seed=None)
                if plan.is_withheld(config) and any_draw in wanted:
                    # A method that reads no seed has one draw of the untrained configuration, and several trained ones.
                    keys |= {key} if untrained.get(before, untrained.get(any_draw)) in given else set()
    return chosen, keys


def _promising(model: ModelFindings, objective: str) -> tuple[str, pd.DataFrame]:
    """Return the measure that orders the configurations which may be trained, and their rows, the best first."""
    rows = model.eligible
    scores = score(rows, objective)
    if objective != "accuracy" and not np.isnan(scores).all():
        return objective, rows.iloc[np.argsort(-scores, kind="stable")[: int(np.isfinite(scores).sum())]]
    tied = rows[rows["in_confidence_set"]]
    if GOLD in tied and tied[GOLD].notna().all():
        return GOLD, tied.sort_values(GOLD, ascending=False, kind="stable")
    return "acc_mean", tied  # in that order already
