"""How many items of each task a slice of the protocol has seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def even_slices(task_sizes: Mapping[str, int], fractions: Sequence[float]) -> list[dict[str, int]]:
    """Items of each task seen after each slice when a slice takes its fraction of ALL items, as evenly from the tasks as
    their sizes allow: min(N_t, level), rounded up.

    acc_mean weighs tasks and not items alike, so its error is that of the smallest samples: for the same number of items
    equal samples give the smallest one if outcomes spread alike in all tasks (Neyman's allocation; Cochran 1977, 5.5).
    """
    sizes = sorted(task_sizes.values())
    slices = []
    for fraction in fractions:
        left, level = fraction * sum(sizes), 0.0
        for index, size in enumerate(sizes):  # smallest first: each takes all it has or an equal share of what is left
            level = left / (len(sizes) - index)
            if level <= size:
                break
            left -= size
        # The small number keeps a level of 3.0000000000000004 from becoming 4.
        slices.append({task: math.ceil(min(size, level) - 1e-9) for task, size in task_sizes.items()})
    return slices
