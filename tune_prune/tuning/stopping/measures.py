"""What a race compares item by item: whether an item is right, or the log-probability of its right choice.

A measure says where its scores stand in a worker's message and in items.parquet, how they become numbers, and what one
item that was not seen yet can weigh; the rule itself (tune_prune.tuning.stopping.racing) is the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tune_prune.tuning.messages import Slice

ItemValues = str | Sequence[float]  # of one task's items, as messages have them
TYPICAL = 3.0  # root mean squares: what a log-probability may differ by where nothing larger was seen


class Measure(Protocol):
    """A score that every trial has of the same items."""

    columns: tuple[str, ...]  # of items.parquet, besides task and slice

    def in_message(self, part: Slice) -> Mapping[str, ItemValues]:
        """The scores of the items that a slice adds, by task."""

    def sizes(self, part: Slice) -> Mapping[str, int]:
        """How many items of each task have a score in the whole protocol; no task without any."""

    def in_rows(self, rows: Iterable[tuple[Any, ...]]) -> ItemValues:
        """The scores of the items with these values of `columns`."""

    def numbers(self, values: ItemValues) -> np.ndarray:
        """The scores [items]. Raises ValueError for what is none."""

    def largest_is_at_least(self, difference: float) -> float:
        """A bound below what `spread` gives for two trials whose means differ by that: whether to compute it at all."""

    def spread(self, rival: np.ndarray, trial: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
        """Squares of the differences [items], and by how much the trial may win an item that was not seen. `weights` [items]
        are those of the mean."""

    def text(self, difference: float, standard_error: float) -> str:
        """A difference of means in words."""


class Accuracy:
    """Right or wrong, by the accuracy that a task is reported by: an item can differ by 1."""

    columns: tuple[str, ...] = ("score",)

    def in_message(self, part: Slice) -> Mapping[str, str]:
        return part.outcomes

    def sizes(self, part: Slice) -> Mapping[str, int]:
        return part.items_per_task

    def in_rows(self, rows: Iterable[tuple[Any, ...]]) -> str:
        return "".join("1" if score else "0" for (score,) in rows)

    def numbers(self, values: ItemValues) -> np.ndarray:
        scores = np.frombuffer(str(values).encode(), dtype=np.uint8) - ord("0")
        if scores.size and scores.max() > 1:
            raise ValueError("an outcome is neither 0 nor 1")
        return scores.astype(bool)

    def largest_is_at_least(self, difference: float) -> float:
        return 1.0

    def spread(self, rival: np.ndarray, trial: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
        return rival != trial, 1.0

    def text(self, difference: float, standard_error: float) -> str:
        return f"{100 * difference:.1f} ± {100 * standard_error:.1f} points"


class GoldLogprob:
    """The log-probability of the right choice in nats, as gold_logprob_<task> averages it. Items without a single right choice
    have none.

    Nothing bounds it, so what an item not seen yet can differ by is taken from those that were: as much as the trial has
    won any item by, and at least TYPICAL root mean squares (the mean square of the tasks, averaged), as few items seen may
    hold no large win. Real differences have their largest at 3 to 4 of them.
    """

    columns: tuple[str, ...] = ("gold", "loglikelihoods")

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


ACCURACY, GOLD_LOGPROB = Accuracy(), GoldLogprob()
