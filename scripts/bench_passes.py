"""Gradient and removal passes of a grid: shared by its trials, against each trial making its own.

    python scripts/bench_passes.py                                            the published grid on small models, minutes
    python scripts/bench_passes.py --model 20M --seq-len 16,32 --num-samples 16,32,64
    python scripts/bench_passes.py --only-ways --model smollm2 --seq-len 128 --num-samples 16

Shared: one gradient pass per seq_len with a snapshot for every num_samples, one removal pass per seq_len whose losses are
kept per sample, each removed model starting from the hidden states in front of the removed layer. Per trial: a gradient
pass of its own length for each configuration, and for methods that ask for removals one whole forward pass without the
block for every layer, on the samples of that configuration. Each distinct (seq_len, num_samples) is timed once and counted
for every configuration that has it: 45 timed passes would say the same.

Shows the number of passes, tokens and seconds of both, that the shared results equal direct ones bit for bit, and the
largest difference between the removal losses of both ways.

The shared gradient passes are also made in every way to hold the model, in turn: whole (its gradients at once), by layer, and
streamed (by layer, weights read from their files): seconds and CPU seconds, their ratio to whole, and whether the bits are the
same. `--only-ways` makes no others.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import (
    Subject,
    benchmark_parser,
    counts,
    median_times,
    sizes_of,
    subject,
    table,
    write_json,
)

from tune_prune.core.config import PruningConfig
from tune_prune.core.ending import exit_code
from tune_prune.data import calibration
from tune_prune.models import catalog, loading
from tune_prune.models.families import decoder_layers
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.mapped_model import map_model
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.passes.batches import batch_size
from tune_prune.pruning.statistics import parse
from tune_prune.pruning.statistics.block_removal import removal_losses
from tune_prune.pruning.statistics.taylor import Importance, taylor
from tune_prune.tuning import space as search_space


def removal_kinds(method: str) -> tuple[str, ...]:
    """The blocks whose removal losses the method decides by."""
    named = [parse(name) for name in load_method(method).statistics]
    return tuple(kind for statistic, kind in named if statistic == "block_removal")


def measure(subject: Subject, configs: list[PruningConfig], repeats: int, only_ways: bool) -> dict[str, Any]:
    """Passes, tokens and seconds of both ways for the trials `configs` of one model, and what `measure_ways` finds."""
    run = subject.run()
    source = catalog.resolve(run.model)
    loaded = loading.load_model(source, torch.float32, "cpu")
    tokens = calibration.tokenize(loaded.tokenizer, calibration.load_text(run.calibration))
    about = {"model": subject.name, **sizes_of(run), "ways": measure_ways(loaded, tokens, configs, repeats, run.seed)}
    if only_ways:
        return about
    gradient: dict[str, Any] = {"seconds": {"shared": 0.0, "per_trial": 0.0}, "bit_equal": True}
    removal: dict[str, Any] = {"seconds": {"shared": 0.0, "per_trial": 0.0}, "largest_difference": 0.0}
    for seq_len in sorted({config.seq_len for config in configs}):
        here = [config for config in configs if config.seq_len == seq_len]
        windows = calibration.windows(tokens, seq_len, max(c.num_samples for c in here), run.seed)
        _gradient_passes(loaded, windows, here, repeats, gradient)
        _removal_passes(loaded, windows, here, repeats, removal)
    kinds = {config: removal_kinds(config.method) for config in configs}
    seq_lens = {config.seq_len for config in configs}
    gradient["passes"] = {"shared": len(seq_lens), "per_trial": len(configs)}
    gradient["samples"] = {
        "shared": sum(max(c.num_samples for c in configs if c.seq_len == length) for length in seq_lens),
        "per_trial": sum(c.num_samples for c in configs),
    }
    gradient["tokens"] = {
        "shared": sum(length * max(c.num_samples for c in configs if c.seq_len == length) for length in seq_lens),
        "per_trial": sum(c.seq_len * c.num_samples for c in configs),
    }
    layers = loaded.geometry.num_layers
    removing = [config for config in configs if kinds[config]]
    all_kinds = {kind for config in removing for kind in kinds[config]}
    samples = {
        length: max((c.num_removal_samples for c in removing if c.seq_len == length), default=0) for length in seq_lens
    }
    removal["passes"] = {"shared": len(seq_lens) if removing else 0, "per_trial": len(removing)}
    # What a pass forwards, in tokens times layers: the removed layer is not run, the ones before it are not run again.
    behind = layers * (layers - 1) // 2
    removal["token_layers"] = {
        "shared": sum(length * n * (layers + len(all_kinds) * behind) for length, n in samples.items()),
        "per_trial": sum(
            c.seq_len * c.num_removal_samples * (layers + len(kinds[c]) * layers * (layers - 1)) for c in removing
        ),
    }
    for part in (gradient, removal):
        for values in [values for values in part.values() if isinstance(values, dict)]:
            values["ratio"] = values["per_trial"] / values["shared"] if values["shared"] else float("nan")
    return about | {"gradient": gradient, "removal": removal}


def measure_ways(
    loaded: LoadedModel, tokens: torch.Tensor, configs: list[PruningConfig], repeats: int, seed: int
) -> dict[str, Any]:
    """Seconds of the gradient passes of `configs` in every way to hold the model, their ratio to those of the whole model at once,
    and whether the results are the same bits."""
    mapped = map_model(loaded.source, torch.float32, "cpu")
    found: dict[str, Any] = {"bit_equal": True}
    for clock in ("seconds", "cpu_seconds"):  # a machine that others use is fair by the second
        found[clock] = dict.fromkeys(("whole", "by layer", "streamed"), 0.0)
    for seq_len in sorted({config.seq_len for config in configs}):
        counts = sorted({config.num_samples for config in configs if config.seq_len == seq_len})
        windows = calibration.windows(tokens, seq_len, counts[-1], seed)

        ways = {
            "whole": (loaded, RESIDENT),
            "by layer": (loaded, Residency(gradients_by_layer=True)),
            "streamed": (mapped, mapped.residency),
        }
        cpu: dict[str, list[float]] = {way: [] for way in ways}

        def passes(way: str, ways: Any = ways, windows: Any = windows, counts: Any = counts, cpu: Any = cpu) -> Any:
            held, residency = ways[way]
            started = time.process_time()
            result = taylor(held.model, held.family, windows, counts, residency)
            cpu[way].append(time.process_time() - started)
            return result

        seconds, results = median_times({way: partial(passes, way) for way in ways}, repeats)
        for way, taken in seconds.items():
            found["seconds"][way] += taken
            found["cpu_seconds"][way] += statistics.median(cpu[way])
            found["bit_equal"] &= all(_equal(results[way][n], results["whole"][n]) for n in counts)
    for ratio, clock in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds")):
        found[ratio] = {way: taken / found[clock]["whole"] for way, taken in found[clock].items()}
    return found


def _equal(one: Importance, other: Importance) -> bool:
    one_arrays, other_arrays = one.arrays(), other.arrays()
    return one_arrays.keys() == other_arrays.keys() and all(
        np.array_equal(one_arrays[name], other_arrays[name]) for name in other_arrays
    )


def _gradient_passes(
    loaded: LoadedModel, windows: torch.Tensor, here: list[PruningConfig], repeats: int, found: dict[str, Any]
) -> None:
    counts = sorted({config.num_samples for config in here})

    def passes(snapshots: list[int]) -> Callable[[], dict[int, Importance]]:
        return lambda: taylor(loaded.model, loaded.family, windows, snapshots)

    calls = {"shared": passes(counts)} | {str(n): passes([n]) for n in counts}
    seconds, results = median_times(calls, repeats)
    found["seconds"]["shared"] += seconds["shared"]
    for n in counts:
        found["seconds"]["per_trial"] += seconds[str(n)] * sum(config.num_samples == n for config in here)
        found["bit_equal"] &= _equal(results["shared"][n], results[str(n)][n])


def _removal_passes(
    loaded: LoadedModel, windows: torch.Tensor, here: list[PruningConfig], repeats: int, found: dict[str, Any]
) -> None:
    wanted = {(removal_kinds(c.method), c.num_removal_samples) for c in here if removal_kinds(c.method)}
    if not wanted:
        return
    kinds = sorted({kind for removals, _ in wanted for kind in removals})
    longest = max(n for _, n in wanted)

    def direct(removals: tuple[str, ...], n: int) -> Callable[[], dict[str, np.ndarray]]:
        return lambda: naive_removal_losses(loaded, windows[:n], removals)

    calls: dict[str, Callable[[], Any]] = {
        "shared": lambda: removal_losses(loaded.model, loaded.family, windows[:longest], kinds)
    }
    calls |= {f"{removals} {n}": direct(removals, n) for removals, n in wanted}
    seconds, results = median_times(calls, repeats)
    found["seconds"]["shared"] += seconds["shared"]
    for removals, n in wanted:
        users = sum(removal_kinds(c.method) == removals and c.num_removal_samples == n for c in here)
        found["seconds"]["per_trial"] += seconds[f"{removals} {n}"] * users
        for kind in removals:
            shared = results["shared"].removed[kind][:, :n]
            difference = float(np.abs(shared - results[f"{removals} {n}"][kind]).max())
            found["largest_difference"] = max(found["largest_difference"], difference)


@torch.inference_mode()
def naive_removal_losses(loaded: LoadedModel, windows: torch.Tensor, kinds: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Losses in nats [layers, samples] without each block, one whole forward pass for every layer, and the dense one."""
    losses = NextTokenLosses(loaded.model)
    parts: dict[str, list[np.ndarray]] = {kind: [] for kind in ("dense", *kinds)}
    for batch in windows.split(batch_size(windows.shape[1], loaded.model.device.type)):
        parts["dense"].append(_means(losses(batch))[None])
        for kind in kinds:
            rows = []
            for layer in decoder_layers(loaded.model, loaded.family):
                with without_block(loaded, layer, kind):
                    rows.append(_means(losses(batch)))
            parts[kind].append(np.stack(rows))
    return {kind: np.concatenate(arrays, axis=1) for kind, arrays in parts.items()}


def _means(losses: torch.Tensor) -> np.ndarray:
    return losses.mean(dim=1).double().numpy()


@contextmanager
def without_block(loaded: LoadedModel, layer: torch.nn.Module, kind: str) -> Iterator[None]:
    """`layer` without its block of that kind, which is not run; everything else is."""
    family = loaded.family
    name = {"layer": None, "attention": family.attention, "mlp": family.mlp}[kind]
    block = layer if name is None else layer.get_submodule(name)

    def nothing(hidden_states: torch.Tensor, *_: object, **__: object) -> object:
        if kind == "layer":
            return hidden_states
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if kind == "attention" else zeros

    block.forward = nothing
    try:
        yield
    finally:
        del block.forward  # the class's own is back


def report(results: list[dict[str, Any]]) -> str:
    titles = [
        f"{result['model']} ({result['layer_params'] / 1e6:.2f}M in layers, {result['params'] / 1e6:.2f}M in all)"
        for result in results
    ]
    ways = list(results[0]["ways"]["seconds"])
    rows: list[tuple[object, ...]] = [("gradient passes", *ways, *(f"{way} / whole" for way in ways[1:]))]
    for title, result in zip(titles, results, strict=True):
        for clock, ratio in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
            of = result["ways"]
            name = clock.replace("cpu_", "CPU ")
            rows.append((f"{title}, {name}", *of[clock].values(), *(of[ratio][way] for way in ways[1:])))
    lines = [table(rows), ""]
    for result in results:
        equal = "are the same bits in every way" if result["ways"]["bit_equal"] else "DIFFER between the ways"
        lines.append(f"{result['model']}: importances {equal}")
    rows = [("model, passes, what", "shared", "per trial", "ratio")]
    for title, result in zip(titles, results, strict=True):
        for part in ("gradient", "removal"):
            for what in ("passes", "samples", "tokens", "token_layers", "seconds"):
                values = result.get(part, {}).get(what)
                if values is not None:
                    name = what.replace("token_layers", "tokens x layers")
                    rows.append((f"{title}, {part}, {name}", values["shared"], values["per_trial"], values["ratio"]))
    if len(rows) == 1:
        return "\n".join(lines)
    lines += ["", table(rows), ""]
    for result in results:
        equal = "equals a direct pass bit for bit" if result["gradient"]["bit_equal"] else "DIFFERS from a direct pass"
        lines.append(f"{result['model']}: every importance {equal}")
        lines.append(
            f"{result['model']}: removal losses differ by {result['removal']['largest_difference']:.1e} nats at most"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    space = search_space.load("paper_grid").values
    p = benchmark_parser(__doc__, ["tiny-llama", "stories260K"])
    numbers: dict[str, Any] = {"type": counts, "metavar": "A,B"}
    p.add_argument("--seq-len", default=space["seq_len"], help="of the grid (default: %(default)s)", **numbers)
    p.add_argument("--num-samples", default=space["num_samples"], help="of the grid (default: %(default)s)", **numbers)
    p.add_argument("--only-ways", action="store_true", help="gradient passes in every way to hold the model, no others")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    methods = space["method"]
    configs = [
        PruningConfig(method, seq_len, n) for method in methods for seq_len in args.seq_len for n in args.num_samples
    ]
    with tempfile.TemporaryDirectory() as work:
        results = [measure(subject(name, Path(work)), configs, args.repeats, args.only_ways) for name in args.model]
    print(
        f"{len(configs)} configurations: {', '.join(methods)} x seq_len {args.seq_len} x num_samples {args.num_samples}\n"
    )
    print(report(results))
    values = {"benchmark": "passes", "configurations": len(configs), "repeats": args.repeats, "models": results}
    write_json(args.output, values)
    return values


if __name__ == "__main__":
    sys.exit(exit_code(main))
