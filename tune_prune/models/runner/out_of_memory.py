"""Out of memory: which errors say so, and work after which there is as much memory as before it was tried."""

from __future__ import annotations

import errno
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

from tune_prune.core import machine
from tune_prune.core.errors import UserError
from tune_prune.core.machine import size
from tune_prune.models.runner.residency import Residency

log = logging.getLogger(__name__)

# What RuntimeErrors say where torch has no class of its own: the CUDA driver, its libraries, the CPU's allocator, and the system
# that is to map a file. A library that finds no room for its handle says only that it is not initialized, or had an internal error.
SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "ALLOCATION_FAILED",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_..., and ..._HOST_...
    "calling `cublasCreate(handle)`",
    "calling `cusolverDnCreate(handle)`",
    "DefaultCPUAllocator",
    os.strerror(errno.ENOMEM),
)
# How allocators say what they were asked for (CUDA's, the CPU's, numpy's), and CUDA's what was free.
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_AMOUNT = rf"([\d.]+) ?({'|'.join(_UNITS)})"
_ASKED = re.compile(rf"(?:tried to allocate|unable to allocate) {_AMOUNT}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_AMOUNT} is free", re.IGNORECASE)

T = TypeVar("T")


class OutOfMemory(UserError):
    """Memory does not suffice in any way there is; the message has the figures."""


@dataclass(frozen=True)
class Shortage:
    """An allocation that failed. Bytes; None where nobody said."""

    asked: int | None
    free: int
    shared: bool = False  # the process may take a part of the GPU, and no more

    def __str__(self) -> str:
        return f"{'an unknown amount' if self.asked is None else size(self.asked)} asked for, {size(self.free)} free"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory does not suffice, and nothing else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def attempt(run: Callable[[], T], device: torch.device) -> T | Shortage:
    """Return what `run` gives, or why memory did not suffice; then all that it had is given back."""
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free = _bytes(_FREE, str(error))
        if free is None:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.memory().available
        shortage = Shortage(_bytes(_ASKED, str(error)), free, " allowed;" in str(error))
        traceback.clear_frames(error.__traceback__)  # their variables hold what the failed work had
    release(device)  # out here, where the exception and its frames are gone
    return shortage


def release(device: torch.device) -> None:
    """Give back what nothing holds any more, also in a circle."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_that_fits(
    what: str,
    ways: Iterable[Residency],
    run: Callable[[Residency], T],
    device: torch.device,
    step: Callable[[], str] = str,
) -> T:
    """Return what `run` gives in the first of `ways` in which memory suffices; the next one is asked for when all that the one
    before had is given back. Raises OutOfMemory where none does, which begins its advice with `step`."""
    tried: list[str] = []
    for way in ways:
        result = attempt(partial(run, way), device)
        if not isinstance(result, Shortage):
            return result
        log.warning("out of memory in %s (%s): %s", what, way, result)
        tried.append(str(way))
        shortage = result
    before = f"; the first of {len(tried)} ways tried: {tried[0]}" if tried[1:] else ""
    room = f"free some of this {'GPU' if device.type == 'cuda' else device.type}'s memory"
    larger = "use a larger --gpus-per-trial" if shortage.shared else ""
    advice = ", ".join(filter(None, [step(), larger, room, "take a machine with more", "or a smaller model"]))
    raise OutOfMemory(f"{what} does not fit into memory, even {tried[-1]} ({shortage}{before}); {advice}")


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    amount = pattern.search(message)
    return None if amount is None else int(float(amount[1]) * _UNITS[amount[2].lower()])
