"""The devices that a model is on: their names, the memory that was taken on them, and work that a GPU is given as one."""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import torch


@cache
def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's as far as the system tells it: its model on x86 Linux, else what kind it is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def reset_peak(devices: Iterable[torch.device]) -> None:
    """From here on `peak_memory` counts what a GPU allocates."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory(devices: Iterable[torch.device]) -> int:
    """Bytes of memory on the fullest device: another one must be as large."""
    return max(_peak_memory_bytes(device) for device in devices)


def _peak_memory_bytes(device: torch.device) -> int:
    """GPU: the most torch has allocated since its peak was reset; CPU: the process's peak resident set, which only grows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if platform.system() == "Darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """`step` of a GPU as a CUDA graph: all of its kernels are launched as one, on the tensors that it uses now. It is run
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
    """One of each GPU: on every stream cuBLAS takes a workspace of its own, and keeps it."""
    return torch.cuda.Stream(device)
