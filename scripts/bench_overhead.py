"""What a trial costs besides arithmetic: seconds outside the model, and memory over hundreds of trials.

    python scripts/bench_overhead.py                         a random 20M model on 100 real items a task, then memory
    python scripts/bench_overhead.py --trials 0 --search-space ""      memory over 200 trials alone

In one process, without Ray: the shared passes, the dense baseline and `--trials` trials, with a clock on every forward
pass, backward pass and softmax over the vocabulary. What is left of their wall time is outside: slicing weights, choosing
groups, moving scores, judging items, writing files. Loading the model and building the requests come once per model and are
stated by themselves.
As a command: a search of `--search-space`, by Ray and with --inline, each with nothing cached. Its wall time times its slots
is held against the seconds of the stages in its ledger and passes; the rest is starting (Python, imports, plan, Ray and
workers: from the command to the first stage), loading, requests, idle slots at the end and tables.
Memory: `--memory-trials` trials of an embedded model, each of another pruning ratio so that nothing is served from the
cache; resident set of the process, and bytes in live tensors, between trials.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_common import (
    COUNT,
    FROM_ZERO,
    Subject,
    benchmark_parser,
    sizes_of,
    subject,
    table,
    timed,
    write_json,
)
from bench_grid import run_search

from tune_prune.commands.flags import task_names
from tune_prune.core.config import ZERO_SHOT_TASKS, PruningConfig, Samples
from tune_prune.core.ending import exit_code
from tune_prune.core.files import parse_json
from tune_prune.core.ledger import Ledger, PassLog, read_baselines
from tune_prune.core.machine import cpus
from tune_prune.core.store import ITEMS, PASSES, TRIALS, FolderStore
from tune_prune.trial.context import TrialContext
from tune_prune.trial.statistics import needs_of
from tune_prune.trial.trial import prepare, run_trial
from tune_prune.tuning import space

METHODS = ("taylor", "layerwise", "blockwise")
MEMORY_AFTER = (10, 50, 100, 200)  # trials


class Clock:
    """Seconds spent in each kind of arithmetic; what is nested counts for the outermost kind."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0, "softmax": 0.0}
        self._running = False

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return call(*args, **kwargs)
            self._running, started = True, time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._running = False
                self.seconds[kind] += time.perf_counter() - started

        return run

    @contextmanager
    def on(self, model_class: Any) -> Iterator[None]:
        """Within it every arithmetic of models of that class is timed."""
        places = [
            (model_class, "__call__", "forward"),
            (torch.nn.Linear, "__call__", "forward"),  # heads that are called by themselves
            (torch.Tensor, "backward", "backward"),
            (torch, "log_softmax", "softmax"),
            (F, "cross_entropy", "softmax"),
        ]
        originals = [getattr(owner, name) for owner, name, _ in places]
        own = [name in vars(owner) for owner, name, _ in places]
        for (owner, name, kind), original in zip(places, originals, strict=True):
            setattr(owner, name, self.timed(kind, original))
        try:
            yield
        finally:
            for (owner, name, _), original, was_own in zip(places, originals, own, strict=True):
                if was_own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)  # inherited, as before


def in_process(subject: Subject, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Wall and arithmetic seconds of what a search does with one model, without Ray."""
    run = subject.run(args.tasks, args.limit or None)
    loading, context = timed(lambda: TrialContext.open(run, work / "artifacts", "cpu"))
    requests, _ = timed(lambda: context.suite)
    texts, _ = timed(
        lambda: (context.calibration_tokens(run.calibration), context.perplexity_tokens, context.key(None))
    )
    configs = [
        PruningConfig(METHODS[index % 3], args.seq_len, n)
        for index, n in enumerate(n for n in _sample_counts(args) for _ in METHODS)
    ][: args.trials]
    clock = Clock()
    parts: list[dict[str, Any]] = []

    def part(name: str, call: Callable[[], Any]) -> None:
        before = dict(clock.seconds)
        wall, _ = timed(call)
        arithmetic = {kind: clock.seconds[kind] - before[kind] for kind in before}
        parts.append({"part": name, "wall": wall, **arithmetic, "outside": wall - sum(arithmetic.values())})

    with clock.on(type(context.loaded.model)):
        part("passes", lambda: list(prepare(context, Samples(args.seq_len), needs_of(configs))))
        part("baseline", lambda: run_trial(None, context, FolderStore(work / "dense")))
        for index, config in enumerate(configs):
            at = FolderStore(work / str(index))
            part(f"trial {index + 1}", partial(run_trial, config, context, at))
    trials = [values for values in parts if values["part"].startswith("trial")]
    wall, outside = (sum(values[name] for values in parts) for name in ("wall", "outside"))
    softmax = sum(values["softmax"] for values in parts)
    return {
        "model": subject.name,
        **sizes_of(run),
        "items": context.suite.num_items,
        "once": {"loading": loading, "requests": requests, "texts": texts},
        "parts": parts,
        "trials": len(trials),
        "wall": wall,
        "outside_share": outside / wall,
        "outside_share_with_softmax": (outside + softmax) / wall,
        "outside_per_trial": sum(values["outside"] for values in trials) / max(1, len(trials)),
    }


def _sample_counts(args: argparse.Namespace) -> list[int]:
    return [max(1, args.num_samples * (index + 1) // 4) for index in range(-(-args.trials // 3))]


def as_command(subject: Subject, args: argparse.Namespace, work: Path, way: str) -> dict[str, Any]:
    """Wall time times slots of a search's process, its start, and the seconds of its stages. `way`: Ray or --inline."""
    began = time.time()
    seconds, _ = run_search(subject, args, work / way, [way] if way == "--inline" else [])
    folder = work / way / "grid"
    store = FolderStore(folder)
    records = [*Ledger(store).records()]
    baselines = read_baselines(store).values()
    passes = sum(values["duration_s"] for values in PassLog(store).read())
    stages = sum(record.elapsed_time_s for record in (*records, *baselines)) + passes
    slots = 1 if way == "--inline" else cpus()
    # What a job writes, it writes when it is done.
    first = [path.stat().st_mtime - parse_json(path)["duration_s"] for path in (folder / PASSES).iterdir()]
    first += [(folder / TRIALS / record.key / ITEMS).stat().st_mtime - record.elapsed_time_s for record in baselines]
    return {
        "model": subject.name,
        "way": way,
        "start": min(first) - began,
        "trials": len(records),
        "wall": seconds,
        "slots": slots,
        "stage_seconds": stages,
        "outside_share": 1 - stages / (seconds * slots),
    }


def memory(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Resident set and live tensors of this process after so many trials."""
    run = subject(args.memory_model, work).run(
        args.tasks, args.memory_limit, perplexity_window=64
    )  # short ones are quick
    context = TrialContext.open(run, work / "memory", "cpu")
    list(prepare(context, Samples(16), needs_of(PruningConfig(method, 16, 32) for method in METHODS)))
    resident, tensors = {}, []
    for trial in range(1, args.memory_trials + 1):
        config = PruningConfig(METHODS[trial % 3], 16, 32, pruning_ratio=0.05 + 0.3 * trial / args.memory_trials)
        run_trial(config, context, FolderStore(work / "memory-trials" / str(trial)))
        if trial in MEMORY_AFTER or trial == args.memory_trials:
            resident[trial] = resident_bytes()
        if trial in (1, args.memory_trials) or trial % 10 == 0:  # looking through all objects takes a while
            tensors.append(live_tensor_bytes())
    first, last = resident[min(resident)], resident[max(resident)]
    return {
        "model": run.label,
        "trials": args.memory_trials,
        "resident_bytes": resident,
        "growth_bytes": last - first,
        "tensor_bytes": {"first": tensors[0], "largest": max(tensors), "last": tensors[-1]},
    }


def resident_bytes() -> int:
    """Resident set of this process, from Linux's /proc."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def live_tensor_bytes() -> int:
    """Bytes of the distinct storages of all tensors that Python knows."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # Not isinstance, which asks the object and wakes what is lazy.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def report_in_process(result: dict[str, Any]) -> str:
    once = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result["once"].items())
    rows: list[tuple[object, ...]] = [("", "wall s", "forward", "backward", "softmax", "outside")]
    for row in result["parts"]:
        rows.append((row["part"], *(row[name] for name in ("wall", "forward", "backward", "softmax", "outside"))))
    return (
        f"{result['model']}: {result['layer_params'] / 1e6:.2f}M parameters in layers, {result['params'] / 1e6:.2f}M in all, "
        f"{result['items']:,} items; once per model: {once}\n{table(rows)}\n"
        f"outside arithmetic {result['outside_share']:.1%} ({result['outside_share_with_softmax']:.1%} where the softmax is "
        f"counted as outside), {result['outside_per_trial']:.3f} s a trial\n"
    )


def report_commands(results: list[dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = [
        ("search", "command to first stage s", "wall s", "slots", "in stages s", "outside")
    ]
    for result in results:
        share = f"{result['outside_share']:.1%}"
        rows.append((result["way"], *(result[name] for name in ("start", "wall", "slots", "stage_seconds")), share))
    return f"{results[0]['model']}: the search of {results[0]['trials']} trials as a command\n{table(rows)}\n"


def report_memory(found: dict[str, Any]) -> str:
    after = ", ".join(f"{trial}: {size / 2**20:.0f}" for trial, size in found["resident_bytes"].items())
    tensors = ", ".join(f"{name} {size / 2**20:.2f}" for name, size in found["tensor_bytes"].items())
    return (
        f"memory of {found['model']} over {found['trials']} trials: resident MiB after trial {after}; growth "
        f"{found['growth_bytes'] / 2**20:+.1f} MiB; MiB in tensors between trials: {tensors}"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = benchmark_parser(__doc__, ["20M"], repeats=1)
    p.add_argument(
        "--trials", type=FROM_ZERO, default=6, metavar="N", help="in this process, 0: none (default: %(default)s)"
    )
    p.add_argument(
        "--limit", type=FROM_ZERO, default=100, metavar="N", help="items per task, 0: all (default: %(default)s)"
    )
    p.add_argument("--tasks", type=task_names, default=ZERO_SHOT_TASKS, metavar="A,B")
    p.add_argument("--seq-len", type=COUNT, default=32, metavar="T", help="of the trials (default: %(default)s)")
    p.add_argument("--num-samples", type=COUNT, default=128, metavar="N", help="of the trials (default: %(default)s)")
    p.add_argument(
        "--search-space", default="smoke", metavar="NAME", help='of the search, "": none (default: %(default)s)'
    )
    p.add_argument("--memory-model", default="tiny-llama", metavar="NAME", help="(default: %(default)s)")
    p.add_argument("--memory-trials", type=FROM_ZERO, default=200, metavar="N", help="0: none (default: %(default)s)")
    p.add_argument("--memory-limit", type=COUNT, default=20, metavar="N", help="items per task (default: %(default)s)")
    p.set_defaults(pruning_ratio=0.2)
    args = p.parse_args(argv)
    if args.search_space:
        space.load(args.search_space)  # a wrong one is refused now, not after the trials
    torch.set_num_threads(args.threads)
    values: dict[str, Any] = {"benchmark": "overhead", "in_process": [], "commands": [], "memory": {}}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in args.model:
            one = subject(name, work, args.limit)
            room = work / f"{one.name}-overhead"
            if args.trials:
                values["in_process"].append(in_process(one, args, room))
                print(report_in_process(values["in_process"][-1]), flush=True)
            if args.search_space:
                found = [as_command(one, args, room, way) for way in ("Ray", "--inline")]
                values["commands"] += found
                print(report_commands(found), flush=True)
        if args.memory_trials:
            values["memory"] = memory(args, work)
            print(report_memory(values["memory"]), flush=True)
    write_json(args.output, values)
    return values


if __name__ == "__main__":
    sys.exit(exit_code(main))
