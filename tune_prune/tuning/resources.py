"""How many CPUs and GPUs one trial takes, and how many trials therefore run at once.

Ray counts fractions of a GPU but does not hold anyone to them, so a fraction comes from a memory plan and is held in
the worker by `limit_process`. Only 1/k and whole numbers are used: other fractions never fill a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tune_prune.core.errors import UserError
from tune_prune.core.machine import Memory, TooLittleMemory, size
from tune_prune.tuning.gpus import Gpu

MAX_TRIALS_PER_GPU = 4  # beyond that the trials of one GPU only wait for each other
USABLE_GPU_MEMORY = 0.9  # the rest is left to fragmentation and to what other programs may come to need
MAX_AUTO_CPUS = 4  # a GPU trial spends its CPU time on tokenising and on feeding the GPU


@dataclass(frozen=True)
class TrialResources:
    """CPUs and GPUs that Ray reserves for one trial: each a whole number or 1/k; `gpus` may be 0."""

    cpus: float = 1.0
    gpus: float = 0.0

    def to_ray(self) -> dict[str, float]:
        return {"cpu": self.cpus, "gpu": self.gpus}

    @property
    def device(self) -> str:
        """The device of a trial: without a reserved GPU the CPU, whatever the worker happens to see."""
        return "cuda" if self.gpus > 0 else "cpu"


@dataclass(frozen=True)
class Node:
    """A node of a cluster, as Ray knows it and, where trials run on it, as it tells."""

    node_id: str
    name: str  # host and address
    resources: Mapping[str, float]  # Ray's, in all
    runs_trials: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages
    memory: Memory | None = None  # None: it was not asked
    file_room: int = 0  # bytes that are free for hidden states in a file, where it was asked
    bfloat16: bool = False  # whether its CPU gains by computing in it, where trials run on CPUs
    gpus: tuple[Gpu, ...] = ()  # those that were free to be asked; at least one where trials run on GPUs


def parse_amount(text: str | float, name: str, *, allow_zero: bool) -> float | None:
    """Return a number of CPUs or GPUs per trial from a flag: None for "auto", else a whole number or 1/k.

    1/k may be written rounded to two digits (0.33 is 1/3); it is rounded down to Ray's four digits, so that k fit.
    Raises UserError for anything else, naming the nearest amounts that fill a device.
    """
    if str(text).strip().lower() == "auto":
        return None
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not (1e-4 <= amount < math.inf or (allow_zero and amount == 0)):  # Ray counts in steps of 1/10,000
        zero = ", or 0 for none" if allow_zero else ""
        raise UserError(f"{name} is {text}; it must be a whole number or 1/k such as 0.5 or 0.25{zero}, or auto")
    if amount == int(amount):
        return amount
    share = max(1, round(1 / amount))
    if share > 1 and abs(amount - 1 / share) <= 0.005:
        return math.floor(1e4 / share) / 1e4
    below, above = float(math.floor(amount)), float(math.ceil(amount))
    if amount < 1:
        below, above = 1 / math.ceil(1 / amount), 1 / math.floor(1 / amount)
    raise UserError(f"{name} is {text}, by which part of a device would stay idle: use {below:.4g} or {above:.4g}")


def fitting_trials(trial_bytes: int, gpu: Memory) -> int:
    """Return the most trials of `trial_bytes` each (their CUDA contexts included) whose sum stays within 90% of a GPU's memory and
    what of it is free. Raises UserError when not even one fits."""
    usable = usable_bytes(gpu)
    if trial_bytes > usable:
        raise TooLittleMemory(
            f"a trial needs about {size(trial_bytes)} but the fullest GPU has {size(usable)} of {size(gpu.total)} to use: ",
            "use a larger GPU, or others by CUDA_VISIBLE_DEVICES, or choose a smaller model or --dtype bfloat16",
        )
    return usable // max(1, trial_bytes)


def usable_bytes(gpu: Memory) -> int:
    """Return the bytes that trials may take of a GPU, all together."""
    return min(int(gpu.total * USABLE_GPU_MEMORY), gpu.available)


def plan_resources(
    cpus: float | None,
    gpus: float | None,
    nodes: Sequence[Mapping[str, float]],
    trial_bytes: int | None = None,
    gpu: Memory | None = None,
    most: int = MAX_TRIALS_PER_GPU,
) -> TrialResources:
    """Fill in what was left to "auto" (None), from the nodes' Ray resources and the memory one trial needs.

    Without any GPU: 0 GPUs and one CPU. With GPUs: the smallest share that holds `trial_bytes` on `gpu`, the one with the
    least usable memory (a whole GPU when either is unknown), for `most` trials on it, and an even share of the node's CPUs, at
    most 4. Raises UserError where as many trials as a share means do not fit.
    """
    gpu_nodes = [node for node in nodes if node.get("GPU", 0) > 0]
    fit = 1
    if gpu_nodes and gpus != 0 and trial_bytes and gpu:
        fit = fitting_trials(trial_bytes, gpu)
        if gpus is not None and (asked := sharing_trials(gpus)) > fit:
            raise UserError(
                f"--gpus-per-trial is {gpus:g}, but {asked} trials of about {trial_bytes / 2**30:.1f} GiB each do not fit into the "
                f"{usable_bytes(gpu) / 2**30:.1f} GiB that the smallest GPU has to use: use {1 / fit:.4g} or more, or auto"
            )
    if gpus is None:
        gpus = math.floor(1e4 / min(MAX_TRIALS_PER_GPU, most, fit)) / 1e4 if gpu_nodes else 0.0
    if cpus is None:
        cpus = 1.0
        if gpus > 0 and gpu_nodes:
            of_gpu = sharing_trials(gpus) if gpus < 1 else 1 / gpus
            share = min(node.get("CPU", 1) / (node["GPU"] * of_gpu) for node in gpu_nodes)
            cpus = float(min(MAX_AUTO_CPUS, max(1, int(share + 1e-9))))
    return TrialResources(cpus, gpus)


def sharing_trials(gpus: float) -> int:
    """Return how many trials of that share of a GPU run on one at once."""
    return math.floor(1 / gpus + 1e-9) if 0 < gpus < 1 else 1


def trial_slots(resources: TrialResources, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many trials run at once on these nodes. Raises UserError when no node can run even one: Ray would wait."""
    slots = sum(slots_on(resources, node) for node in nodes)
    if slots == 0:
        cpus, gpus = (max((node.get(name, 0) for node in nodes), default=0) for name in ("CPU", "GPU"))
        raise UserError(
            f"a trial asks for {resources.cpus:g} CPUs and {resources.gpus:g} GPUs but no node has them together (at most "
            f"{cpus:g} CPUs, {gpus:g} GPUs on one): lower --cpus-per-trial or --gpus-per-trial, or join a cluster with --address"
        )
    return slots


def slots_on(resources: TrialResources, node: Mapping[str, float]) -> int:
    """Return how many trials run at once on a node."""
    slots = math.floor(node.get("CPU", 0) / resources.cpus + 1e-9)
    if 0 < resources.gpus < 1:
        return min(slots, int(node.get("GPU", 0)) * sharing_trials(resources.gpus))
    return min(slots, math.floor(node.get("GPU", 0) / resources.gpus)) if resources.gpus else slots


def limit_process(resources: TrialResources, gpu_free: Mapping[str, int]) -> None:
    """Hold this process to its reservation: CPU threads, and the share of the GPU's memory, of which torch counts all but the CUDA
    context. `gpu_free`: bytes by kind of GPU that were free before the first trial, as other programs may hold some; else all."""
    import torch  # here, so that a command line can check its flags without it

    from tune_prune.models import loading
    from tune_prune.tuning.memory import PROCESS_BYTES

    torch.set_num_threads(max(1, int(resources.cpus)))
    if resources.gpus > 0:
        loading.set_up_gpu()
    if 0 < resources.gpus < 1:
        total = torch.cuda.get_device_properties(0).total_memory
        share = resources.gpus * gpu_free.get(torch.cuda.get_device_name(), total) - PROCESS_BYTES["cuda"]
        torch.cuda.set_per_process_memory_fraction(max(0.0, share / total))
