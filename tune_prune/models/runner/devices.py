"""The devices that a model is on: their names, the memory that was taken on them, and work that a GPU is given as one."""

from __future__ import annotations

import math
import platform
import re
import resource
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch

# Behind what `lacks_kernels` says; the command's own flag for it follows.
NO_KERNELS_STEP = "leave it out with CUDA_VISIBLE_DEVICES, install a torch built for it, or compute on the CPU"

GAIN = 1.5  # by which bfloat16 must be faster than float32 to be computed in where nobody names a data type


def device_key(device: torch.device) -> str:
    """Return what keys say of a device: "cpu", or the GPU's name, as another GPU has other kernels."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kernels_from(capability: tuple[int, int], architectures: Iterable[str]) -> str:
    """Return from which compute capability on a torch built for `architectures` (sm_75, sm_90a, compute_120) has kernels, as in
    "7.5", where `capability` (major, minor) is below it; else empty, also where none is named so: on a CPU, and by ROCm."""
    named = [int(number) for name in architectures for number in re.findall(r"^(?:sm|compute)_(\d+)", name)]
    first = divmod(min(named, default=0), 10)
    return f"{first[0]}.{first[1]}" if capability < first else ""


def lacks_kernels(index: int) -> str:
    """Say why this torch cannot compute on its GPU `index`, as the beginning of a sentence; empty where it can."""
    about = torch.cuda.get_device_properties(index)
    first = kernels_from((about.major, about.minor), torch.cuda.get_arch_list())
    return first and (
        f"GPU {index} ({about.name}) is of compute capability {about.major}.{about.minor}, for which this torch "
        f"({torch.__version__}) has no kernels (from {first} on)"
    )


@cache
def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's as far as the system tells it: its model on x86 Linux, else what kind it is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@cache
def bfloat16_speed() -> float:
    """Measure how many times as fast as float32 this CPU multiplies matrices in bfloat16: above 1.5 with instructions for it (AMX,
    AVX512_BF16), far below 1 without. Measured once by a process, in some tens of milliseconds."""
    factors = {dtype: torch.ones(512, 1024, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    seconds = dict.fromkeys(factors, math.inf)
    for _ in range(4):  # in turns; the first of each sets up its kernels
        for dtype, factor in factors.items():
            began = time.process_time()
            factor @ factor.T
            seconds[dtype] = min(seconds[dtype], time.process_time() - began)
    return seconds[torch.float32] / max(seconds[torch.bfloat16], 1e-9)


def fast_at_bfloat16(device: str) -> bool:
    """Return whether "cpu" or "cuda" gains by computing in bfloat16."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bfloat16_speed() >= GAIN


def reset_peak(devices: Iterable[torch.device]) -> None:
    """Let `peak_memory` count from here on what a GPU allocates."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory(devices: Iterable[torch.device]) -> int:
    """Return the bytes of memory that were taken on the fullest device: another one must be as large."""
    return max(_peak_memory_bytes(device) for device in devices)


def _peak_memory_bytes(device: torch.device) -> int:
    """GPU: the most torch has allocated since its peak was reset; CPU: the process's peak resident set, which only grows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """Return `step` of a GPU as a CUDA graph: all of its kernels are launched as one, on the tensors that it uses now. It is run
    once before that, on a side stream, as torch asks for: libraries set themselves up in it. Raises RuntimeError where it cannot be
    captured."""
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return the one side stream of a GPU: on every stream cuBLAS takes a workspace of its own, and keeps it."""
    return torch.cuda.Stream(device)
