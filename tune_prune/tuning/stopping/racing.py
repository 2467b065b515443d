"""Racing: a configuration is out of the search once paired differences on the same items say that it cannot be the best.

Trials are measured on nested slices of every task's items, the same items in the same order for all. After each slice
but the last (a look) a trial is compared with every other trial, each pair on all items that both have seen. Racing as
such is Maron and Moore's (Hoeffding races, NIPS 1993); there the items bound the differences, here their spread does.
What is compared is a measure (tune_prune.tuning.stopping.measures): whether an item is right, or the log-probability of
its right choice.

Guarantee. With probability >= `confidence` the configuration that would come out best on ALL items is never stopped,
however trials are ordered and however many run at a time. The probability is over the random order of the items; models
and items are fixed. It is an approximation by the normal distribution, with a guard for small numbers below, and is held
by simulation (tests/tuning/test_racing.py and test_race_gold.py, scripts/bench_racing.py), not a bound for every conceivable
set of scores.

The rule. k tasks; n_t of a task's N_t items have been seen; d_i is rival minus trial on item i: of accuracies -1, 0 or 1.

    D = sum_t (sum_i d_i / n_t) / k             difference of the means, acc_mean or gold_logprob_mean
    V = sum_t (1 - n_t/N_t) sum_i d_i^2 / (n_t k)^2
    M = max_t (1 - n_t/N_t) / (n_t k)           what one item can weigh
    L                                           what one item can differ by: 1 of accuracies
    stop when D > z * sqrt(V + M * L * D),      z = Phi^-1(1 - (1 - confidence) / (rivals * looks))

V is the variance of D when neither is better: d_i^2 and not (d_i - mean)^2 counts, as in McNemar's test (Psychometrika
1947), and 1 - n_t/N_t is the finite-population correction, since only the items of the protocol are to be predicted
(Cochran, Sampling Techniques, 1977, chapters 2 and 5). z is Bonferroni's over all rivals of the search and all looks, so
that comparisons need no order.

The guard M * L * D, first for accuracies, where L is 1. V counts the items that were seen to differ. A small task in which
no pair has differed yet would count as certain, though the trial may win it on items still to come. If the trial is in truth
no worse than its rival, such unseen wins make up for D; fewest items do when each weighs M, and then they are D / M items
that add M^2 each to the variance: M * D. This is Wilson's score interval (JASA 1927) for a Poisson count: the variance is
taken at the hypothesis and not at the sample. It also makes D > z^2 * M necessary: about a dozen items must differ before
anything is stopped, and rounding errors cannot.

Log-probabilities have no bound, heavy tails and skewed differences: a model may be a little ahead on most items and far
behind on a few. L is the largest win of the trial on an item that both have seen, or three root mean squares of d_i where
that is more. Squares about 0 and not about their mean, and no quantile of Student's t: where d_i is skewed a small sample
without the large losses of the rival has a small variance as well. Simulations say how much that is: the best trial and 19
rivals of equal means, 400 runs each on seven tasks of 240 items, on tasks of 12, 30 and 400, and on one of 120. How often
the best was stopped, by sample variances with t quantiles, by squares about 0 alone, and by this rule:

    normal, or Student's t with 3 degrees of freedom      2 to  5%     2 to  5%     0 to 1%
    the rivals' losses are exponential                   18 to 57%    18 to 32%     0 to 1%
    the rivals' losses are lognormal                     42 to 88%    43 to 75%     0 to 4%

Symmetric differences need no guard: their signs make D / sqrt(V) sub-Gaussian whatever their sizes are (Efron, JASA 1969).
What no sample can show the rule does not see: a rival that loses 30 nats on one item in a hundred and is a little ahead on the
others is taken for what it is on those until such an item comes.

A trial with a score that is not finite sits out from there on: no rival stops it, and it stops none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tune_prune.tuning.stopping.measures import ACCURACY, ItemValues, Measure


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
        if not 0 < confidence < 1 or num_configs < 1 or num_slices < 1 or not task_sizes:
            raise ValueError(
                f"no race of {num_configs} configurations, {num_slices} slices, {len(task_sizes)} tasks at {confidence=}"
            )
        self._num_configs = num_configs
        self._looks = num_slices - 1
        self._measure = measure
        self._tasks = tuple(task_sizes)
        self._sizes = np.array([task_sizes[task] for task in self._tasks])  # [k]
        comparisons = max(1, num_configs - 1) * max(1, self._looks)
        self.limit = NormalDist().inv_cdf(1 - (1 - confidence) / comparisons)
        self._slices: list[_Slice] = []
        self._scores: dict[str, np.ndarray] = {}  # key -> [items seen]: by slice, then by task, then in order
        self._means: dict[str, list[float]] = {}  # key -> mean of the tasks' means after each slice it has reached

    def add(self, key: str, slice_index: int, outcomes: Mapping[str, ItemValues]) -> Verdict | None:
        """The items that a slice adds to a trial, as task -> "0" or "1" per item, or nats, in the order that is the same for all.

        Returns a verdict if the trial should stop, else None. Slice 0 of a trial that is known starts it over (it crashed
        and was tried again). Raises ValueError for slices out of order, for items that are not those of the other trials,
        and for more trials than configurations.
        """
        scores, counts = self._read(outcomes)
        if slice_index == 0:
            self._scores[key], self._means[key] = self._measure.numbers(""), []
        reached = len(self._means.get(key, ()))
        if slice_index != reached or reached > self._looks:
            raise ValueError(
                f"trial {key} reports slice {slice_index}; {reached} of {self._looks + 1} slices are known"
            )
        if len(self._scores) > self._num_configs:
            raise ValueError(f"trial {key} is one more than the {self._num_configs} configurations of the race")
        if slice_index == len(self._slices):
            self._slices.append(_Slice.after(self._slices, counts, self._sizes))
        if not np.array_equal(counts, self._slices[slice_index].added):
            added = dict(zip(self._tasks, self._slices[slice_index].added.tolist(), strict=True))
            raise ValueError(
                f"trial {key} has other items in slice {slice_index} than the trials before it: "
                f"{dict(zip(self._tasks, counts.tolist(), strict=True))} instead of {added}"
            )
        self._scores[key] = np.concatenate([self._scores[key], scores])
        finite = np.isfinite(self._scores[key]).all()
        self._means[key].append(float(self._scores[key] @ self._slices[slice_index].weights) if finite else math.nan)
        return self._verdict(key) if slice_index < self._looks and finite else None

    def forget(self, key: str) -> None:
        """Nothing is compared with this trial any more."""
        self._scores.pop(key, None)
        self._means.pop(key, None)

    def _read(self, outcomes: Mapping[str, ItemValues]) -> tuple[np.ndarray, np.ndarray]:
        """Scores [items], task by task, and how many items each task has [k]."""
        if not outcomes.keys() <= set(self._tasks):
            raise ValueError(f"items of {sorted(outcomes.keys() - set(self._tasks))}, which are no tasks of the race")
        scores = [self._measure.numbers(outcomes.get(task, "")) for task in self._tasks]
        return np.concatenate(scores), np.array([len(of_task) for of_task in scores])

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
            theirs, own = (self._scores[one][: common.items] for one in (rival, key))
            squares, largest = self._measure.spread(theirs, own, common.weights)
            variance = float(squares @ common.variances) + common.heaviest * largest * difference
            verdict = Verdict(rival, difference, math.sqrt(variance), self.limit, common.items)
            if difference > self.limit * verdict.standard_error and (worst is None or _ratio(verdict) > _ratio(worst)):
                worst = verdict
        return worst


def _ratio(verdict: Verdict) -> float:
    return verdict.difference / verdict.standard_error if verdict.standard_error else math.inf


@dataclass(frozen=True)
class _Slice:
    """What D, V and M need of the items seen after a slice; arrays [items] are in the order of Race._scores."""

    added: np.ndarray  # [k] items that it adds
    seen: np.ndarray  # [k] items after it: n_t
    weights: np.ndarray  # [items] 1 / (n_t k)
    variances: np.ndarray  # [items] (1 - n_t/N_t) / (n_t k)^2
    heaviest: float  # M; infinite where a task has no item yet, of which nothing can be said

    @property
    def items(self) -> int:
        return len(self.weights)

    @classmethod
    def after(cls, before: Sequence[_Slice], added: np.ndarray, sizes: np.ndarray) -> _Slice:
        seen = added + (before[-1].seen if before else 0)
        if (seen > sizes).any():
            raise ValueError(f"more items were seen of tasks than they have: {seen.tolist()} of {sizes.tolist()}")
        with np.errstate(divide="ignore"):
            weight, left = 1 / (seen * len(sizes)), 1 - seen / sizes
        task_of_item = np.concatenate(
            [np.repeat(np.arange(len(sizes)), counts) for counts in (*(s.added for s in before), added)]
        )
        return cls(added, seen, weight[task_of_item], (left * weight**2)[task_of_item], float((left * weight).max()))
