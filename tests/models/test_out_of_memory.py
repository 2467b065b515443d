"""Errors that say that memory does not suffice, memory that is given back after one, and the way that is tried next."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.limited_memory import LimitedMemory
from tune_prune.core import machine
from tune_prune.core.machine import Memory
from tune_prune.models.runner.out_of_memory import (
    OutOfMemory,
    Shortage,
    attempt,
    first_that_fits,
    is_out_of_memory,
)
from tune_prune.models.runner.residency import RESIDENT

CPU = torch.device("cpu")
HALVED = [replace(RESIDENT, halvings=halvings) for halvings in range(4)]
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("unable to mmap 8000 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError("Cannot allocate memory (os error 12)"),  # of safetensors
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_errors_that_say_so(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
        ValueError("CUDA out of memory"),
        OSError(28, "No space left on device"),
    ],
)
def test_other_errors_pass_untouched(error):
    runs = []

    def run(way):
        runs.append(way)
        raise error

    with pytest.raises(type(error)) as raised:
        first_that_fits("perplexity", HALVED, run, CPU)
    assert raised.value is error and runs == [RESIDENT]


def test_what_real_allocators_say_is_understood():
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for run in (lambda: torch.empty(2**45, dtype=torch.uint8), lambda: np.empty(2**45, dtype=np.uint8)):
        found = attempt(run, CPU)
        assert isinstance(found, Shortage) and found.asked == 2**45
        assert found.free < 100 * free


def test_what_the_failed_attempt_had_is_gone_when_the_next_one_begins():
    with LimitedMemory() as memory:
        held = []

        def run(way):
            held.append(memory.live)
            kept = torch.zeros(1000)
            circle = [kept]
            circle.append(circle)
            if way.halvings < 2:
                raise RuntimeError(CUBLAS)
            return kept.sum().item()

        gc.disable()  # by itself it would come at any time
        try:
            assert first_that_fits("pruning", HALVED, run, CPU) == 0
        finally:
            gc.enable()
    assert held == [0, 0, 0]


def test_where_nothing_fits_the_error_has_the_figures(monkeypatch):
    def run(_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8 GiB"
        )

    monkeypatch.setattr(machine, "memory", lambda: Memory(64 * 2**30, 3 * 2**30))  # in a container
    with pytest.raises(OutOfMemory) as raised:
        first_that_fits("perplexity", HALVED[:3], run, CPU, lambda: "stop")
    said = str(raised.value)
    assert said.startswith("perplexity does not fit into memory, even resident, 1/4 at once (20 MiB asked for, ")
    assert ", 3.0 GiB free; the first of 3 ways tried: resident); stop, free some of this cpu's memory" in said


def test_a_trial_that_fills_its_share_of_a_gpu_is_told_so():
    def run(_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.10 GiB is free. "
            "38.90 GiB allowed; Of the allocated memory 37.44 GiB is allocated by PyTorch"
        )

    with pytest.raises(OutOfMemory) as raised:
        first_that_fits("kl", HALVED[:1], run, torch.device("cuda"), lambda: "stop")
    told = "(2.0 GiB asked for, 1.1 GiB free); stop, use a larger --gpus-per-trial, free some"
    assert told in str(raised.value)
