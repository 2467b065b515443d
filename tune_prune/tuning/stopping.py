"""Early stopping: a rule decides, after every stage of a trial, whether the trial goes on. Nothing waits for anything.

A trial is compared with the trials of its group alone: one model, pruning ratio, recovery and draw of calibration samples.

`--scheduler race` and `race-gold` stop a trial once paired differences on the same items say that it cannot be the best, `asha`
one below the median of those before it, and `--kl-filter`, before any of them, one whose predictions have moved far more than those
of the trials before it.

## The race

Trials are measured on nested slices of every task's items, the same items in the same order for all. After each slice but the last
(a look) a trial is compared with every other trial, each pair on all items that both have seen. Racing as such is Maron and Moore's
(Hoeffding races, NIPS 1993); there the items bound the differences, here their spread does. What is compared is a `Measure`:
whether an item is right, or the log-probability of its right choice.

Guarantee. With probability >= `confidence` the configuration that would come out best on ALL items is never stopped, however trials
are ordered and however many run at a time. The probability is over the random order of the items; models and items are fixed. It is
an approximation by the normal distribution, with a guard for small numbers below, and is held by simulation
(tests/tuning/test_racing.py), not a bound for every conceivable set of scores.

The rule. k tasks; n_t of a task's N_t items have been seen; d_i is rival minus trial on item i: of accuracies -1, 0 or 1.

    D = sum_t (sum_i d_i / n_t) / k             difference of the means, acc_mean or gold_logprob_mean
    V = sum_t (1 - n_t/N_t) sum_i d_i^2 / (n_t k)^2
    M = max_t (1 - n_t/N_t) / (n_t k)           what one item can weigh
    L                                           what one item can differ by: 1 of accuracies
    stop when D > z * sqrt(V + M * L * D),      z = Phi^-1(1 - (1 - confidence) / (rivals * looks))

V is the variance of D when neither is better: d_i^2 and not (d_i - mean)^2 counts, as in McNemar's test (Psychometrika 1947), and
1 - n_t/N_t is the finite-population correction, since only the items of the protocol are to be predicted (Cochran, Sampling
Techniques, 1977, chapters 2 and 5). z is Bonferroni's over all rivals of the search and all looks, so that comparisons need no
order.

The guard M * L * D, first for accuracies, where L is 1. V counts the items that were seen to differ. A small task in which no pair
has differed yet would count as certain, though the trial may win it on items still to come. If the trial is in truth no worse than
its rival, such unseen wins make up for D; fewest items do when each weighs M, and then they are D / M items that add M^2 each to
the variance: M * D. This is Wilson's score interval (JASA 1927) for a Poisson count: the variance is taken at the hypothesis and
not at the sample. It also makes D > z^2 * M necessary: about a dozen items must differ before anything is stopped.

Log-probabilities have no bound, heavy tails and skewed differences: a model may be a little ahead on most items and far behind on a
few. L is the largest win of the trial on an item that both have seen, or three root mean squares of d_i where that is more: a small
sample without the large losses of the rival has a small variance as well (simulations: docs/studies/methods.md). What no sample can
show the rule does not see: a rival that loses 30 nats on one item in a hundred is taken for what it is until such an item comes.

A trial with a score that is not finite sits out from there on: no rival stops it, and it stops none.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet

from tune_prune.core.errors import UserError
from tune_prune.core.hashing import seed_for
from tune_prune.core.ledger import trial_file
from tune_prune.core.measures import MEASURES, comparable
from tune_prune.core.records import Slice, TrialRecord
from tune_prune.core.store import ITEMS, TRIALS, Location
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.work import TrialSpec, groups_of_draws

if TYPE_CHECKING:
    from tune_prune.tuning.plan import SearchSettings

FACTOR = 1.5  # of the median, above which a KL is too large
FEWEST = 5  # trials before: the median of fewer says little
KLS = MEASURES["kl"][1]  # kl_text, kl_tasks
TYPICAL = 3.0  # root mean squares: what a log-probability may differ by where nothing larger was seen

ItemValues = str | Sequence[float]  # of one task's items, as messages have them


class StoppingRule:
    """Stops no trial: the rule of a search without early stopping, and what the others override."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # why a trial was stopped, by its key, for the ledger

    def stops(self, message: TrialMessage) -> bool:
        """Say whether the trial ends here, though it could go on. If so, its reason stands in `reasons`."""
        return False

    def forget(self, key: str) -> None:
        """Compare nothing with a trial that has failed, as it will never be the best."""


def rule_of(
    settings: SearchSettings,
    specs: Mapping[str, TrialSpec],
    finished: Sequence[TrialRecord],
    experiment_dir: Location,
    may_stop: bool = True,
) -> StoppingRule:
    """Return the rule that a search asks for, with the `finished` trials of earlier starts in it. `specs`: all that it may run."""
    rule = StoppingRule()
    if not may_stop:
        return rule
    if settings.scheduler == "asha":
        rule = AshaRule(specs)
    elif settings.scheduler in RACES:
        measure, known = RACES[settings.scheduler], {}
        for record in finished:
            if record.status == "complete":
                slices = len(specs[record.key].run.protocol.slices)
                known[record.key] = read_outcomes(experiment_dir / TRIALS / record.key / ITEMS, slices, measure)
        rule = RaceRule(specs, known, measure=measure)
    return KlFilterRule(specs, finished, rule) if settings.kl_filter else rule


def in_random_order(specs: Iterable[TrialSpec], seed: int) -> list[TrialSpec]:
    """Return every model's trials in random order, which is the same at every start.

    In the grid's order a race whose best come last would stop few, and the first medians of KL would be of one method."""
    by_run: defaultdict[Any, list[TrialSpec]] = defaultdict(list)
    for spec in specs:
        by_run[spec.run].append(spec)
    for run, of_model in by_run.items():
        random.Random(seed_for(seed, f"race order {run.label}")).shuffle(of_model)
    return [spec for of_model in by_run.values() for spec in of_model]


class Measure:
    """A score that every trial has of the same items. This one is accuracy: right or wrong, so an item can differ by 1."""

    columns: tuple[str, ...] = ("score",)  # of items.parquet, besides task and slice

    def in_message(self, part: Slice) -> Mapping[str, ItemValues]:
        """Return the scores of the items that a slice adds, by task: "0" or "1" per item, or nats."""
        return part.outcomes

    def sizes(self, part: Slice) -> Mapping[str, int]:
        """Return how many items of each task have a score in the whole protocol; no task without any."""
        return part.items_per_task

    def in_rows(self, rows: Iterable[tuple[Any, ...]]) -> ItemValues:
        """Return the scores of the items with these values of `columns`."""
        return "".join("1" if score else "0" for (score,) in rows)

    def numbers(self, values: ItemValues) -> np.ndarray:
        """Return the scores [items]."""
        return np.frombuffer(str(values).encode(), dtype=np.uint8) == ord("1")

    def largest_is_at_least(self, difference: float) -> float:
        """Return a bound below what `spread` gives for two trials whose means differ by that: whether to compute it at all."""
        return 1.0

    def spread(self, rival: np.ndarray, trial: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the squares of the differences [items], and by how much the trial may win an item that was not seen (L).

        `weights` [items] are those of the mean."""
        return rival != trial, 1.0

    def text(self, difference: float, standard_error: float) -> str:
        return f"{100 * difference:.1f} ± {100 * standard_error:.1f} points"


class GoldLogprob(Measure):
    """The log-probability of the right choice in nats, as gold_logprob_<task> averages it; items without a single right choice
    have none. What an item not seen yet can differ by is as much as the trial has won any item by, and at least TYPICAL root mean
    squares (the mean square of the tasks, averaged), as few items may hold no large win: real differences have their largest at 3
    to 4."""

    columns = ("gold", "loglikelihoods")

    def in_message(self, part: Slice) -> Mapping[str, Sequence[float]]:
        return part.gold_logprobs

    def sizes(self, part: Slice) -> Mapping[str, int]:
        return part.gold_items_per_task

    def in_rows(self, rows: Iterable[tuple[Any, ...]]) -> tuple[float, ...]:
        return tuple(choices[gold] for gold, choices in rows if gold >= 0)

    def numbers(self, values: ItemValues) -> np.ndarray:
        return np.array(tuple(values), dtype=np.float64)

    def largest_is_at_least(self, difference: float) -> float:
        return TYPICAL * abs(difference)  # a root mean square is no smaller than the mean

    def spread(self, rival: np.ndarray, trial: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
        wins = trial - rival
        squares = wins**2
        return squares, max(float(wins.max()), TYPICAL * math.sqrt(squares @ weights))

    def text(self, difference: float, standard_error: float) -> str:
        return f"{difference:.3f} ± {standard_error:.3f} nats"


ACCURACY, GOLD_LOGPROB = Measure(), GoldLogprob()
RACES = {"race": ACCURACY, "race-gold": GOLD_LOGPROB}  # schedulers that race, and by what


@dataclass(frozen=True)
class Verdict:
    """Why a trial is stopped. Differences are fractions of accuracies, or nats."""

    rival: str  # key of the trial that it is furthest behind, in standard errors
    difference: float  # rival minus trial, of the means on the items below
    standard_error: float  # of the difference, if the trial were as good as its rival: sqrt(V + M * L * D)
    limit: float  # z: standard errors at which a trial is stopped
    items: int  # seen by both


class Race:
    """The race of the configurations of one model at one pruning ratio. Deterministic given the order of calls.

    `num_configs`: all that the search may visit, whether they come to run or not. `task_sizes`: task -> its number of
    items in the protocol, of those that have a score. `num_slices`: the last one has all items and is no look.
    """

    def __init__(
        self,
        num_configs: int,
        task_sizes: Mapping[str, int],
        num_slices: int,
        confidence: float = 0.95,
        measure: Measure = ACCURACY,
    ) -> None:
        self._looks = num_slices - 1
        self._measure = measure
        self._sizes = dict(task_sizes)  # [k]
        comparisons = max(1, num_configs - 1) * max(1, self._looks)
        self.limit = NormalDist().inv_cdf(1 - (1 - confidence) / comparisons)
        self._slices: list[_Slice] = []
        self._scores: dict[str, np.ndarray] = {}  # key -> [items seen]: by slice, then by task, then in order
        self._means: dict[str, list[float]] = {}  # key -> mean of the tasks' means after each slice it has reached

    def add(self, key: str, slice_index: int, outcomes: Mapping[str, ItemValues]) -> Verdict | None:
        """Take the items that a slice adds to a trial: task -> "0" or "1" per item, or nats, in the order that is the same for all.

        Returns a verdict if the trial should stop, else None. Slice 0 of a trial that is known starts it over (it crashed
        and was tried again).
        """
        added = [self._measure.numbers(outcomes.get(task, "")) for task in self._sizes]
        if slice_index == 0:
            self._scores[key], self._means[key] = self._measure.numbers(""), []
        if slice_index == len(self._slices):
            counts = np.array([len(of_task) for of_task in added])
            self._slices.append(_Slice.after(self._slices, counts, np.array([*self._sizes.values()])))
        self._scores[key] = scores = np.concatenate([self._scores[key], *added])
        finite = np.isfinite(scores).all()
        self._means[key].append(float(scores @ self._slices[slice_index].weights) if finite else math.nan)
        return self._verdict(key) if slice_index < self._looks and finite else None

    def forget(self, key: str) -> None:
        """Compare nothing with this trial any more."""
        self._scores.pop(key, None)
        self._means.pop(key, None)

    def _verdict(self, key: str) -> Verdict | None:
        mine, worst = self._means[key], None
        for rival, means in self._means.items():
            shared = min(len(mine), len(means), self._looks)
            if rival == key or not shared or math.isnan(means[-1]):
                continue
            common = self._slices[shared - 1]
            difference = means[shared - 1] - mine[shared - 1]
            least = self._measure.largest_is_at_least(difference)
            if not difference > self.limit**2 * common.heaviest * least:  # whatever V is; most pairs end here
                continue
            theirs, its_own = (self._scores[one][: len(common.weights)] for one in (rival, key))
            squares, largest = self._measure.spread(theirs, its_own, common.weights)
            variance = float(squares @ common.variances) + common.heaviest * largest * difference
            verdict = Verdict(rival, difference, math.sqrt(variance), self.limit, len(common.weights))
            if difference > self.limit * verdict.standard_error and (worst is None or _ratio(verdict) > _ratio(worst)):
                worst = verdict
        return worst


def _ratio(verdict: Verdict) -> float:
    return verdict.difference / verdict.standard_error if verdict.standard_error else math.inf


@dataclass(frozen=True)
class _Slice:
    """The parts of D, V and M, of the items seen after a slice; arrays [items] are in the order of Race._scores."""

    added: np.ndarray  # [k] items that it adds
    seen: np.ndarray  # [k] items after it: n_t
    weights: np.ndarray  # [items] 1 / (n_t k)
    variances: np.ndarray  # [items] (1 - n_t/N_t) / (n_t k)^2
    heaviest: float  # M; infinite where a task has no item yet, of which nothing can be said

    @classmethod
    def after(cls, before: Sequence[_Slice], added: np.ndarray, sizes: np.ndarray) -> _Slice:
        seen = added + (before[-1].seen if before else 0)
        with np.errstate(divide="ignore"):
            weight, left = 1 / (seen * len(sizes)), 1 - seen / sizes
        task_of_item = np.concatenate(
            [np.repeat(np.arange(len(sizes)), counts) for counts in (*(s.added for s in before), added)]
        )
        return cls(added, seen, weight[task_of_item], (left * weight**2)[task_of_item], float((left * weight).max()))


class RaceRule(StoppingRule):
    """Stops a trial whose verdict is in: one race for each group, with the trials that an earlier start completed.

    `specs`: every configuration that the search may visit, by key. `known`: the scores of complete trials of earlier starts, by
    key, as `read_outcomes` gives them by the same `measure`. Where no item has a score nothing is stopped.
    """

    def __init__(
        self,
        specs: Mapping[str, TrialSpec],
        known: Mapping[str, Sequence[Mapping[str, ItemValues]]] | None = None,
        confidence: float = 0.95,
        measure: Measure = ACCURACY,
    ) -> None:
        super().__init__()
        self._measure = measure
        self._specs = dict(specs)
        self._confidence = confidence
        self._groups = groups_of_draws(specs.values())
        self._num_configs = Counter(self._groups.values())
        self._races: dict[str, Race] = {}  # by group's label; made when the sizes of its tasks are known
        for key, slices in (known or {}).items():
            tasks = dict.fromkeys(task for added in slices for task in added)
            sizes = {task: sum(len(added.get(task, "")) for added in slices) for task in tasks}
            for index, outcomes in enumerate(slices if sizes else ()):
                self._race(key, sizes).add(key, index, outcomes)

    def stops(self, message: TrialMessage) -> bool:
        if message.slice is None:
            return False  # a stage before the zero-shot items
        key, part = message.record.key, message.slice
        sizes = self._measure.sizes(part)
        if not sizes:
            return False
        verdict = self._race(key, sizes).add(key, part.index, self._measure.in_message(part))
        if verdict is not None:
            self.reasons[key] = self._sentence(verdict, sum(sizes.values()))
        return verdict is not None

    def forget(self, key: str) -> None:
        if race := self._races.get(self._groups[key]):
            race.forget(key)

    def _race(self, key: str, task_sizes: Mapping[str, int]) -> Race:
        label = self._groups[key]
        if label not in self._races:
            num_slices = len(self._specs[key].run.protocol.slices)
            self._races[label] = Race(self._num_configs[label], task_sizes, num_slices, self._confidence, self._measure)
        return self._races[label]

    def _sentence(self, verdict: Verdict, items_total: int) -> str:
        rival = f"{self._specs[verdict.rival].config.name}-{verdict.rival[:6]}"
        return (
            f"stopped by the race: behind {rival} by {self._measure.text(verdict.difference, verdict.standard_error)} on "
            f"{verdict.items:,} of {items_total:,} questions (limit {verdict.limit:.1f} standard errors, confidence "
            f"{self._confidence:.0%} for all trials of the model)"
        )


def read_outcomes(path: Location, num_slices: int, measure: Measure = ACCURACY) -> list[dict[str, Any]]:
    """Return the scores in a complete trial's items.parquet, slice by slice: task -> those of its items, in scoring order, as a
    message would have them ("0" or "1" per item, or nats). No task without any.

    Raises UserError if the file is missing, is no such table or holds other slices than 0 to num_slices - 1.
    """
    collected: list[dict[str, list[tuple[Any, ...]]]] = [{} for _ in range(num_slices)]
    try:
        content = trial_file(path.parent, path.name)
        if content is None:
            raise FileNotFoundError(f"{path} is missing")
        columns = ["task", "slice", *measure.columns]
        rows = pyarrow.parquet.read_table(pyarrow.BufferReader(content), columns=columns).to_pydict()
        for task, index, *values in zip(*(rows[name] for name in columns), strict=True):
            collected[index].setdefault(task, []).append(tuple(values))
        scores = [{task: measure.in_rows(items) for task, items in slices.items()} for slices in collected]
    except (OSError, pyarrow.ArrowException, KeyError, IndexError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"the answers of a complete trial cannot be read from {path} ({cause}); restore the file, or delete "
            f"{path.parent.name}.json in the folder ledger to run that trial again"
        ) from error
    return [{task: of_task for task, of_task in slices.items() if of_task} for slices in scores]


REDUCTION_FACTOR = 2  # the better half goes on: the limit is the median
SMALLEST_LEVEL = 0.25  # of the items


class AshaRule(StoppingRule):
    """Stops a trial below the median of those that were at its level before it: asynchronous successive halving (ASHA, Li et al.
    2020, arXiv:1810.05934). `specs`: by trial key.

    The levels are the first slice with a quarter of the zero-shot items and its doublings. Finer slices before it are no levels:
    ASHA stops about half of the trials at its first level, whether the items can tell them apart or not. From a sixteenth of the
    items it stopped the best configuration in 2.5% of 200 simulated grids. A search that is started again compares with the trials
    of that start only.
    """

    def __init__(self, specs: Mapping[str, TrialSpec]) -> None:
        super().__init__()
        self._groups = groups_of_draws(specs.values())
        self._levels = {key: _levels_of_asha(spec.run.protocol.slices) for key, spec in specs.items()}
        # The accuracies of the trials that reached a level, by group and level.
        self._reached: defaultdict[tuple[str, float], dict[str, float]] = defaultdict(dict)

    def stops(self, message: TrialMessage) -> bool:
        key, accuracy = message.record.key, message.record.accuracy
        if message.slice is None or message.stage is None or accuracy is None:
            return False
        level = max((level for level in self._levels[key] if level <= message.slice.fraction), default=None)
        if level is None or key in (others := self._reached[self._groups[key], level]):
            return False  # no level yet; or its second attempt, or a slice between two levels
        weak = bool(others) and comparable(accuracy) < comparable(median(others.values()))
        others[key] = accuracy
        if weak:
            questions = f"{message.stage.items_scored} of {message.stage.items_total} questions"
            self.reasons[key] = f"stopped by the scheduler at acc_mean {accuracy:.4f} after {questions}"
        return weak

    def forget(self, key: str) -> None:
        for accuracies in self._reached.values():
            accuracies.pop(key, None)


def _levels_of_asha(slices: tuple[float, ...]) -> list[float]:
    """Return the fractions of the items at which trials are compared, the last below 1."""
    levels = [next(fraction for fraction in slices if fraction >= SMALLEST_LEVEL)]
    while levels[-1] * REDUCTION_FACTOR < 1:
        levels.append(levels[-1] * REDUCTION_FACTOR)
    return [level for level in levels if level < 1]


class KlFilterRule(StoppingRule):
    """Stops a trial after its KL, or leaves it to the rule `then`. `specs`: every configuration that the search may visit, by key;
    `known`: the records of trials that earlier starts completed or stopped, which are earlier trials.

    KL(dense || pruned) on text and on questions costs little beside zero-shot items. A trial is stopped after it if

        kl_text > FACTOR * median(kl_text of the trials before it)   and   kl_tasks > FACTOR * median(kl_tasks of the same)

    over at least FEWEST trials of its group. Both have to be far off, as a method may move the text alone. The KLs of stopped
    trials count as well, else the median would fall with every one that is stopped. KL tells bad configurations from good ones, not
    good ones from each other: no guarantee comes with it (docs/studies/methods.md).
    """

    def __init__(
        self, specs: Mapping[str, TrialSpec], known: Iterable[TrialRecord] = (), then: StoppingRule | None = None
    ) -> None:
        self._then = then or StoppingRule()
        self.reasons = self._then.reasons
        self._labels = groups_of_draws(specs.values())
        self._seen: dict[str, Mapping[str, float]] = {}  # the KLs of trials, by key
        # By group's label and KL, those of the trials so far that are finite, sorted.
        self._before: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in KLS})
        for record in known:
            self._add(record.key, record.metrics)

    def stops(self, message: TrialMessage) -> bool:
        if message.stage is None or message.stage.stage != "kl":
            return self._then.stops(message)
        key = message.record.key
        if key in self._seen:
            return False  # its second attempt: the first went on
        too_large = self._add(key, message.stage.metrics)
        if len(too_large) < len(KLS):
            return False
        self.reasons[key] = f"stopped by the KL filter: {'; '.join(too_large)}"
        return True

    def _add(self, key: str, metrics: Mapping[str, float]) -> list[str]:
        """Take the KLs of the next trial, and return of each that is too large why.

        One that is not finite is larger than any other and joins no median."""
        self._seen[key], too_large = metrics, []
        for name, before in self._before[self._labels[key]].items():
            value = metrics.get(name)
            if value is None:
                continue
            finite = math.isfinite(value)
            if len(before) >= FEWEST and (not finite or value > FACTOR * median(before)):
                above = f"above {FACTOR:g} times" if finite else "not finite, beside"
                middle = f"{median(before):.4g}, the median of {len(before)} earlier trials"
                too_large.append(f"{name} {value:.4g} is {above} {middle}")
            if finite:
                insort(before, value)
        return too_large

    def forget(self, key: str) -> None:
        self._then.forget(key)
        for name, value in self._seen.pop(key, {}).items():
            if name in KLS and math.isfinite(value):
                self._before[self._labels[key]][name].remove(value)
