"""The GPUs that this process sees, those that a plan can be made for without having one, and calls in a process that ends.

A process keeps what it has taken of a GPU, a CUDA context of some hundred megabytes at least, until it ends. A search is planned in
a process that lives as long as its trials, which need that memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from tune_prune.core.errors import MachineError, did_you_mean
from tune_prune.core.machine import Memory, parse_size, size

MOST_OF_A_KIND = 16  # GPUs of one machine


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees; of its memory, what no process holds is available."""

    name: str
    memory: Memory
    bfloat16: bool  # whether it computes in it, not only by way of float32
    problem: str = ""  # why torch cannot compute on it


@dataclass(frozen=True)
class Card:
    """GPUs of one machine that need not be there."""

    name: str
    memory: int  # bytes that torch finds on one: less than it is sold with
    peaks: Mapping[str, float]  # by dtype, operations per second of matrix products; none of a size alone
    bfloat16: bool = True
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count} x {self.name} ({size(self.memory)}{' each' * (self.count > 1)})"


def _card(name: str, gib: float, bfloat16: float | None, float32: float) -> Card:
    peaks = {"float32": float32 * 1e12} | ({} if bfloat16 is None else {"bfloat16": bfloat16 * 1e12})
    return Card(name, int(gib * 2**30), peaks, bfloat16 is not None)


# Memory as torch's out-of-memory errors state it; TFLOP/s of NVIDIA's data sheets: bfloat16 with float32 sums and without
# sparsity, float32 without TF32, which is off.
CARDS = tuple(
    _card(*row)
    for row in (
        ("T4", 14.5, None, 8.1),
        ("RTX 3090", 23.6, 71, 35.6),
        ("RTX 4090", 23.6, 165, 82.6),
        ("RTX 5090", 31.3, 209, 105),
        ("A10G", 21.9, 70, 31.2),
        ("L4", 21.9, 121, 30.3),
        ("L40S", 44.4, 362, 91.6),
        ("RTX A6000", 47.4, 155, 38.7),
        ("A100 40GB", 39.3, 312, 19.5),
        ("A100 80GB", 79.1, 312, 19.5),
        ("H100", 79.1, 989, 67),
        ("H200", 139.7, 989, 67),
        ("B200", 178.3, 2250, 75),
    )
)


def parse_card(text: str) -> Card:
    """Find the GPU of a name such as "RTX 4090", h100 or 2x4090, or of an amount of memory such as 24GB, of unknown speed.

    Raises ValueError for any other text.
    """
    counted = re.fullmatch(r"\s*(?:(\d{1,4})\s*x\s*)?(\S.*?)\s*", text, re.IGNORECASE)
    count, name = (int(counted[1] or 1), counted[2]) if counted else (1, text)
    if not 1 <= count <= MOST_OF_A_KIND:
        raise ValueError(f"{text!r} is {count} GPUs of a machine; it can be from 1 to {MOST_OF_A_KIND} of them")
    by_letters = {_letters(card.name): card for card in CARDS}
    if card := by_letters.get(_letters(name)):
        return replace(card, count=count)
    try:
        memory = parse_size(name)
    except ValueError:
        raise ValueError(
            f"{text!r} is no GPU that is known here, and no amount of memory such as 24GB; "
            f"{did_you_mean(name, [card.name for card in CARDS])}"
        ) from None
    return Card("GPU", memory, {}, count=count)


def _letters(name: str) -> str:
    """Reduce a name to what tells kinds apart: "NVIDIA GeForce RTX 4090" is 4090."""
    letters = re.sub(r"nvidia|geforce|rtx|tesla|[^a-z0-9]", "", name.lower())
    return {"a100": "a10080gb", "h10080gb": "h100"}.get(letters, letters)


def visible_gpus() -> list[Gpu]:
    """List every GPU. To ask for free memory takes a CUDA context on each, which stays until the process ends:
    `call(visible_gpus)` leaves none behind."""
    import torch  # here: flags are read without it

    from tune_prune.models.runner.devices import lacks_kernels

    gpus = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bfloat16 = bool(torch.version.hip) or about.major >= 8
        gpus.append(Gpu(about.name, Memory(total, free), bfloat16, lacks_kernels(index)))
    return gpus


Result = TypeVar("Result")


def call(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `function(*arguments)` gives in a process of its own, as multiprocessing does; but the main module of whoever
    calls is not run once more. Raises what it raises, and MachineError where its process dies."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((function, arguments)), capture_output=True, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise MachineError(
            f"the process that was to look at this machine ended with code {done.returncode} ({lines[-1]}); see whether other "
            "programs fill its memory, then try again"
        )
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return cast(Result, result)


def _serve() -> None:
    """Do the call in the process of its own: it comes in on standard input, its result alone goes out on standard output."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what a library prints is no answer
        gc.disable()  # to look through what torch makes for garbage takes a second
        function, arguments = pickle.load(sys.stdin.buffer)
        result: tuple[Any, Exception | None]
        try:
            result = function(*arguments), None
        except Exception as error:  # noqa: BLE001  # raised again on the side that called
            result = None, error
        pickle.dump(result, answer)
    gc.freeze()  # at the exit, too
