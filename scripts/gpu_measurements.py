"""Tools of the benchmarks of a GPU: flags, the device, its peak, versions; and `Slot`, for a machine that is lent for minutes:
every measurement is written when it is made, and the process ends in time, whatever hangs.

    with Slot("gpu", limit=540, output=None) as slot:
        if slot.begin("forward"):                # False, once the time is over: the rest is left out
            slot.add({"seconds": seconds()})     # a JSON line on standard output, and the file with all of them

At the limit a thread ends the process: its line says in which measurement, and its exit code is 0, as of a run that has told all it
could. A hang that no thread gets past (a kernel that holds Python's lock) is ended ten seconds later from outside Python, with
a traceback and exit code 1; what was measured is out by then.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_common import machine, median_times
from script_tools import COUNT, script_parser

from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.machine import cpus
from tune_prune.models.loading import set_up_gpu

LIMIT_S = 540.0  # of ten minutes, in which a machine also has to start
GRACE_S = 10.0


class Slot:
    """`limit`: seconds from now; `output`: of the file (None: none); `about`: what that says of them all."""

    def __init__(self, name: str, limit: float, output: Path | None, about: Mapping[str, Any] | None = None) -> None:
        self.limit = limit
        self.output = output
        self.about = {"benchmark": name, **(about or {})}
        self.lines: list[dict[str, Any]] = []
        self._ends = time.monotonic() + limit
        self._running = ""  # name of the measurement
        self._lock = threading.Lock()
        self._timer = threading.Timer(limit, self._stop)
        self._timer.daemon = True

    def __enter__(self) -> Slot:
        if self.limit > 0:  # else nothing begins
            self._timer.start()
            faulthandler.dump_traceback_later(self.limit + GRACE_S, exit=True, file=2)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def begin(self, name: str) -> bool:
        """Say whether there is time for the measurement of that name; what is left out is a line, too."""
        self._running = name
        if time.monotonic() < self._ends:
            return True
        self.add({"stopped before": name})
        return False

    def add(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self.lines.append(dict(line))
            print(to_json(self.lines[-1], indent=None).strip(), flush=True)
            self._write(complete=False)

    @staticmethod
    def result_or_reason(measure: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what `measure` finds, or why it cannot be measured here: the next one may."""
        try:
            return measure()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return {"out_of_memory": True}
        except Exception as error:  # noqa: BLE001  # whatever a machine does that nobody has seen: a line, and the exit code
            return {"error": f"{type(error).__name__}: {error}"}

    def finish(self, **more: Any) -> None:
        """Write `more` with all lines. Exits with code 1 where a measurement has failed by more than memory."""
        self._write(complete=not any("stopped before" in line for line in self.lines), **more)
        if failed := [line for line in self.lines if "error" in line]:
            raise SystemExit(f"error: {len(failed)} measurements failed, see their lines")

    def _write(self, **more: Any) -> None:
        if self.output is not None:
            atomic_write_text(self.output, to_json({**self.about, **more, "measurements": self.lines}))

    def _stop(self) -> None:
        self.add({"stopped in": self._running, "after_s": self.limit})
        os._exit(0)


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Measure the FLOP/s of the product of two square matrices of `size`: the median of five, after two that are not counted."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(a, b)
        synchronise(device)

    for _ in range(2):
        multiply()
    seconds, _ = median_times({"matmul": multiply}, 5)
    return 2 * size**3 / seconds["matmul"]


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory_beside(device: torch.device) -> Callable[[], dict[str, int]]:
    """Return a function that tells the peak since this call: whole, and beside what was there. On a CPU it tells nothing."""
    if device.type != "cuda":
        return dict
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def peak() -> dict[str, int]:
        most = torch.cuda.max_memory_allocated()
        return {"peak_bytes": most, "taken_bytes": most - before}

    return peak


def versions() -> dict[str, Any]:
    """Return what the numbers were measured with, and on."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    with_it = {"transformers": transformers.__version__, "cuda": torch.version.cuda, "commit": commit or None}
    return machine() | with_it


def gpu_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the flags that both benchmarks of a GPU have."""
    p = script_parser(doc, "write the numbers as JSON, too")
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--tiny", action="store_true", help="a model of toy size, to try the code")
    p.add_argument("--threads", type=COUNT, default=cpus(), metavar="N", help="of torch (default: %(default)s)")
    p.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="end after so many seconds (default: %(default)s)"
    )
    return p


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device, set up as workers have it. Exits with a sentence where there is none."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: torch finds no GPU here; try the code with --device cpu --tiny")
    set_up_gpu()
    torch.set_num_threads(args.threads)
    return torch.device(args.device)
