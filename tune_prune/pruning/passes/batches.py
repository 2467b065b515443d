"""How calibration samples are run: batches that end at the same samples in every pass, whatever else it is made for.

A statistic of n samples is a prefix of that of more, so one pass serves several numbers of samples. So that it equals, bit
for bit, a pass over n samples alone, a batch in which n falls is run twice: up to n for that snapshot, and whole. (On GPUs the
backward pass of attention adds up in an order of its own every time: there equal means up to rounding.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

# Of a batch. A CPU wants activations that stay in its caches: at a hidden size of 512, batches of 8,192 tokens take 1.6 times as
# long. On a GPU this fills matrix products of 7B models, whose layers save 6.5 MB a token for the backward pass.
BATCH_TOKENS = {"cpu": 1024, "cuda": 2048}


def batch_size(seq_len: int, device: str) -> int:
    """Return the samples per batch on "cpu" or "cuda": a power of two, from the length alone, so that batches end at the same
    samples in every pass."""
    return 2 ** max(0, int(math.log2(max(1, BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"]) // seq_len))))


def check_snapshots(snapshots: Sequence[int], samples: int) -> list[int]:
    """Return the numbers of samples asked for, each once, growing. Raises ValueError unless all are within 1..samples."""
    wanted = sorted(set(snapshots))
    if not wanted or wanted[0] < 1 or wanted[-1] > samples:
        raise ValueError(f"snapshots {wanted} must lie within 1..{samples} samples")
    return wanted


def batches(wanted: Sequence[int], step: int) -> Iterator[tuple[int, list[int], int | None]]:
    """Return the batches of a pass with snapshots at the growing `wanted`: (start, snapshots inside the batch, its end), in
    samples.

    The samples from start to each snapshot inside are run for that snapshot alone, those up to the end for all that follows;
    end None: nothing follows.
    """
    for start in range(0, wanted[-1], step):
        end = start + step
        yield start, [n for n in wanted if start < n < end], end if end <= wanted[-1] else None


def runs(wanted: Sequence[int], step: int) -> list[tuple[int, int]]:
    """Return what such a pass runs, one after the other: from this sample up to that."""
    return [
        (start, stop)
        for start, inside, end in batches(wanted, step)
        for stop in (*inside, *([] if end is None else [end]))
    ]


def growing_batches(samples: int, step: int) -> Iterator[tuple[int, int]]:
    """Return the batches in which each of the first `samples` samples lies, whatever their number: (start, size).

    They hold 1, 1, 2, 4, ... up to `step` samples (a power of two), then `step` each, so that few samples do not cost a
    whole batch. The last one may reach beyond `samples`: it is run at its full size all the same, as the last bits of a
    sample's numbers depend on the size of its batch.
    """
    start, size = 0, 1
    while start < samples:
        yield start, size
        start += size
        size = min(start, step)


def samples_run(wanted: Sequence[int], step: int) -> int:
    """Count the samples that such a pass runs, counting those that it runs again."""
    return sum(stop - start for start, stop in runs(sorted(wanted), step))


def needs_copy(wanted: Sequence[int], step: int) -> bool:
    """Return whether what was summed up before a batch is needed again: a snapshot inside it is not the last that is run."""
    parts = batches(sorted(wanted), step)
    return any(len(inside) > 1 or (inside and end is not None) for _, inside, end in parts)
