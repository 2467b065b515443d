"""A filter by KL: a trial whose predictions have moved far more than those of earlier trials ends before perplexity and items.

Every trial measures KL(dense || pruned) on text and on questions first, which costs little beside its zero-shot items: the lowest
rung of a search by growing fidelities, as ASHA's are (tune_prune.tuning.stopping.asha). A trial is stopped there if

    kl_text > FACTOR * median(kl_text of the trials before it)   and   kl_tasks > FACTOR * median(kl_tasks of the same)

over at least FEWEST trials of its group. Both have to be far off, as a method may move the text alone. The KLs of stopped trials
count as well, else the median would fall with every one that is stopped. KL tells bad configurations from good ones, not good ones
from each other: no guarantee comes with it (scripts/replay_kl_filter.py says what it would have done to finished searches).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from tune_prune.core.measures import MEASURES
from tune_prune.core.records import TrialRecord
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.stopping.rule import StoppingRule
from tune_prune.tuning.worker import TrialSpec, groups_of_draws

FACTOR = 1.5
FEWEST = 5  # earlier trials: the median of fewer says little
KLS = MEASURES["kl"][1]  # kl_text, kl_tasks


@dataclass(frozen=True)
class Excess:
    """One KL of a trial that is too large."""

    measure: str
    value: float  # nats
    median: float  # of the earlier trials
    trials: int  # that it is of

    def __str__(self) -> str:
        if math.isfinite(self.value):
            what = f"is above {FACTOR:g} times {self.median:.4g}, the median"
        else:
            what = f"is not finite, and {self.median:.4g} is the median"
        return f"{self.measure} {self.value:.4g} {what} of {self.trials} earlier trials"


class KlGroup:
    """The trials that are compared with each other, one after the other."""

    def __init__(self) -> None:
        self._earlier: dict[str, list[float]] = {name: [] for name in KLS}  # finite ones, sorted

    def add(self, metrics: Mapping[str, float]) -> tuple[Excess, ...]:
        """The KLs of the next trial, of which each is too large; none if it goes on. One that is not finite is larger than any
        other and joins no median; without one of the two nothing is stopped."""
        found = []
        for name, earlier in self._earlier.items():
            value = metrics.get(name)
            if value is None:
                continue
            finite = math.isfinite(value)
            if len(earlier) >= FEWEST and (not finite or value > FACTOR * median(earlier)):
                found.append(Excess(name, value, median(earlier), len(earlier)))
            if finite:
                insort(earlier, value)
        return tuple(found) if len(found) == len(KLS) else ()

    def remove(self, metrics: Mapping[str, float]) -> None:
        """The KLs of a trial that was added, out of the medians."""
        for name, earlier in self._earlier.items():
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                earlier.remove(value)


class KlFilterRule(StoppingRule):
    """Stops a trial after its KL, or leaves it to the rule `then`. `specs`: every configuration that the search may visit, by key;
    `known`: the records of trials that earlier starts completed or stopped, which are earlier trials."""

    def __init__(
        self, specs: Mapping[str, TrialSpec], known: Iterable[TrialRecord] = (), then: StoppingRule | None = None
    ) -> None:
        self._then = then or StoppingRule()
        self.reasons = self._then.reasons
        self._labels = groups_of_draws(specs.values())
        self._groups: defaultdict[str, KlGroup] = defaultdict(KlGroup)  # by label
        self._seen: dict[str, Mapping[str, float]] = {}  # their KLs, by key
        for record in known:
            self._seen[record.key] = record.metrics
            self._groups[self._labels[record.key]].add(record.metrics)

    def stops(self, message: TrialMessage) -> bool:
        if message.stage is None or message.stage.stage != "kl":
            return self._then.stops(message)
        key = message.progress.key
        if key in self._seen:
            return False  # its second attempt: the first went on
        self._seen[key] = message.stage.metrics
        found = self._groups[self._labels[key]].add(message.stage.metrics)
        if found:
            self.reasons[key] = f"stopped by the KL filter: {'; '.join(map(str, found))}"
        return bool(found)

    def forget(self, key: str) -> None:
        self._then.forget(key)
        if (metrics := self._seen.pop(key, None)) is not None:
            self._groups[self._labels[key]].remove(metrics)
