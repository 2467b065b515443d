"""Early stopping of weak trials by asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934), per model and
pruning ratio.

A trial is compared, at each level, with the trials of its own model and ratio that reached that level before it, and goes
on if its accuracy is at least their median: accuracies of other models and sizes say nothing about it. The levels are the
first slice with a quarter of the zero-shot items and its doublings. Finer slices before it are no levels: ASHA stops about
half of the trials at its first level, whether the items can tell them apart or not. From a sixteenth of the items it spent
27% of the tokens instead of 50% on 200 simulated grids (made as in scripts/bench_racing.py), but stopped the best
configuration in 2.5% of them. A search that is started again compares with the trials of that start only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from tune_prune.core.measures import comparable
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.stopping.rule import StoppingRule
from tune_prune.tuning.worker import TrialSpec, groups_of_draws

REDUCTION_FACTOR = 2  # the better half goes on: the limit is the median
SMALLEST_LEVEL = 0.25  # of the items; see above


class AshaRule(StoppingRule):
    """Stops a trial below the median of those that were at its level before it. `specs`: by trial key."""

    def __init__(self, specs: Mapping[str, TrialSpec]) -> None:
        super().__init__()
        self._groups = groups_of_draws(specs.values())
        self._levels = {key: _levels(spec.run.protocol.slices) for key, spec in specs.items()}
        # accuracy by trial, of those that reached a level of a group
        self._reached: defaultdict[tuple[str, float], dict[str, float]] = defaultdict(dict)

    def stops(self, message: TrialMessage) -> bool:
        key, accuracy = message.progress.key, message.accuracy
        if message.slice is None or message.stage is None or accuracy is None:
            return False
        level = max((level for level in self._levels[key] if level <= message.slice.fraction), default=None)
        if level is None:
            return False
        others = self._reached[self._groups[key], level]
        if key in others:
            return False  # its second attempt, or a slice between two levels
        weak = bool(others) and comparable(accuracy) < comparable(median(others.values()))
        others[key] = accuracy
        if weak:
            self.reasons[key] = (
                f"stopped by the scheduler at acc_mean {accuracy:.4f} after {message.stage.items_scored} of "
                f"{message.stage.items_total} questions"
            )
        return weak

    def forget(self, key: str) -> None:
        for accuracies in self._reached.values():
            accuracies.pop(key, None)


def _levels(slices: tuple[float, ...]) -> list[float]:
    """Fractions of the items at which trials are compared, the last below 1."""
    levels = [next(fraction for fraction in slices if fraction >= SMALLEST_LEVEL)]
    while levels[-1] * REDUCTION_FACTOR < 1:
        levels.append(levels[-1] * REDUCTION_FACTOR)
    return [level for level in levels if level < 1]
