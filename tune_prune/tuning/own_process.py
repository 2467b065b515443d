"""A function call in a Python process of its own, which has ended when the call returns.

What a process takes of a GPU it keeps until it ends: a CUDA context of some hundred megabytes, and the blocks that torch holds for
later. A search is planned in a process that lives as long as its trials, which need that memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tune_prune.core.errors import MachineError

Result = TypeVar("Result")


def call(function: Callable[..., Result], *arguments: Any) -> Result:
    """`function(*arguments)`; both can be pickled. Raises what it raises, and MachineError where its process dies.

    Not by multiprocessing, which would run the main module of whoever calls once more.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import _serve; _serve()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((function, arguments)), capture_output=True, check=False
    )
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise MachineError(
            f"the process that was to look at this machine ended with code {done.returncode} ({told[-1]}); see whether other "
            "programs fill its memory, then try again"
        )
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return cast(Result, result)


def _serve() -> None:
    """The other side: the call comes in on standard input, what it gives or raises goes out on standard output, alone."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    gc.disable()  # what is imported now, torch perhaps, stays to the end: to look through it for garbage takes a second
    function, arguments = pickle.load(sys.stdin.buffer)
    gc.freeze()
    gc.enable()
    result: tuple[Any, Exception | None]
    try:
        result = function(*arguments), None
    except Exception as error:  # noqa: BLE001  # raised again on the side that called
        result = None, error
    with answer:
        pickle.dump(result, answer)
    gc.freeze()  # at the exit, too
