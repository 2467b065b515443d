"""Out of memory: which errors say so, and work after which there is as much memory as before it was tried."""

from __future__ import annotations

import gc
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from tune_prune.core.errors import UserError
from tune_prune.models.runner.residency import Residency

log = logging.getLogger(__name__)

# What RuntimeErrors say where torch has no class of its own: the CUDA driver, its libraries, and the CPU's allocator.
SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator",
)
# How allocators say what they were asked for: CUDA's, the CPU's, numpy's.
_ASKED = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)

T = TypeVar("T")


class OutOfMemory(UserError):
    """Memory does not suffice in any way there is; the message has the figures."""


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed. Bytes; None where nobody said."""

    asked: int | None
    free: int | None

    def __str__(self) -> str:
        asked, free = ("an unknown amount" if count is None else size(count) for count in (self.asked, self.free))
        return f"{asked} asked for, {free} free"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory does not suffice, and nothing else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def attempt(run: Callable[[], T], device: torch.device) -> T | Shortage:
    """What `run` gives, or why memory did not suffice; then all that it had is given back. Raises whatever else `run` raises."""
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        shortage = Shortage(_asked(str(error)), _free(device))
        traceback.clear_frames(error.__traceback__)  # their variables hold what the failed work had
    # Out here, where the exception and its frames are gone; what hooks hold in a circle goes with the garbage.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return shortage


def first_that_fits(what: str, ways: Iterable[Residency], run: Callable[[Residency], T], device: torch.device) -> T:
    """What `run` gives in the first of `ways` in which memory suffices; the next one is asked for when all that the one before had
    is given back. Raises OutOfMemory where none does, and whatever else `run` raises."""
    tried: list[str] = []
    for way in ways:
        found = attempt(partial(run, way), device)
        if not isinstance(found, Shortage):
            return found
        log.warning("out of memory in %s (%s): %s", what, way, found)
        tried.append(str(way))
        shortage = found
    before = f"; before that: {', then '.join(tried[:-1])}" if tried[1:] else ""
    raise OutOfMemory(
        f"{what} does not fit into memory, even {tried[-1]} ({shortage}{before}); free memory on {device.type}, take a device with "
        "more, or a smaller model"
    )


def size(count: int) -> str:
    """Bytes as text."""
    unit, name = next(
        ((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= unit), (1, "bytes")
    )
    return f"{count / unit:.1f} {name}" if unit > 1 else f"{count} {name}"


def _asked(message: str) -> int | None:
    found = _ASKED.search(message)
    if found is None:
        return None
    units = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    return int(float(found[1]) * units[found[2].lower()])


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
