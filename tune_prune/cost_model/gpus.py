"""The GPUs that this process sees."""

from __future__ import annotations

from dataclasses import dataclass

from tune_prune.core.process.machine import Memory


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees; of its memory, what no process holds is available."""

    name: str
    memory: Memory
    bfloat16: bool  # whether it computes in it, not only by way of float32
    problem: str = ""  # why torch cannot compute on it


def visible_gpus() -> list[Gpu]:
    """Every GPU. To ask for free memory takes a CUDA context on each, which stays until the process ends:
    `own_process.call(visible_gpus)` leaves none behind."""
    import torch  # here: flags are read without it

    from tune_prune.models.runner.devices import lacks_kernels

    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bfloat16 = bool(torch.version.hip) or about.major >= 8
        found.append(Gpu(about.name, Memory(total, free), bfloat16, lacks_kernels(index)))
    return found
