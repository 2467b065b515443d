"""Early stopping by racing (tune_prune.tuning.stopping.racing) as a rule: one race per model, pruning ratio and draw of
calibration samples, nothing waits for anything.

A message says the outcome of every item that a slice adds, and the log-probability of its right choice. The trial goes on,
or is stopped at once. Trials that an earlier start of the search completed go on eligible; those that it stopped have left
no items and do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from tune_prune.core.errors import UserError
from tune_prune.core.ledger import trial_file
from tune_prune.core.store import Location
from tune_prune.tuning.messages import TrialMessage
from tune_prune.tuning.stopping.measures import ACCURACY, ItemValues, Measure
from tune_prune.tuning.stopping.racing import Race, Verdict
from tune_prune.tuning.stopping.rule import StoppingRule
from tune_prune.tuning.worker import TrialSpec, groups_of_draws


class RaceRule(StoppingRule):
    """Stops a trial whose verdict is in; see `tune_prune.tuning.stopping.racing` for the rule and its guarantee.

    `specs`: every configuration that the search may visit, by key. `known`: the scores of complete trials of earlier
    starts, by key: one dict task -> items' scores for each slice, as `read_outcomes` gives them by the same `measure`.
    `confidence` holds for all configurations of one model at one pruning ratio on one draw together. Where no item has a
    score nothing is stopped.
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
        key, part = message.progress.key, message.slice
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
    """The scores in a complete trial's items.parquet, slice by slice: task -> those of its items, in scoring order, as a message
    would have them ("0" or "1" per item, or nats). No task without any.

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
