"""Operations per second of every stage, against what a matrix product reaches on this machine.

    python scripts/bench_flops.py                        Llamas of 20M and 50M parameters in their layers, minutes
    python scripts/bench_flops.py --model tiny-llama     small tensors: overhead instead of arithmetic
    python scripts/bench_flops.py --profile 8            the eight operators that take most of each stage's time

Operations are those of tune_prune/tuning/cost.py; the peak is the best median of square float32 products, which take
turns with the stages, on the same threads. Zero-shot counts the tokens and scored positions that the engine forwards,
without padding. With --profile each stage runs once more under torch's profiler, whose table names what is not a matrix
product.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import (
    COUNT,
    FROM_ZERO,
    Subject,
    benchmark_parser,
    median_times,
    sizes_of,
    subject,
    table,
    write_json,
)
from torch.profiler import ProfilerActivity, profile

from tune_prune.core.config import PruningConfig
from tune_prune.core.ending import exit_code
from tune_prune.data import calibration, perplexity_text
from tune_prune.data.sources import task_source, uses_embedded_data
from tune_prune.evaluation import perplexity
from tune_prune.evaluation.engine.prefix_trees import score_planned
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models import catalog, loading
from tune_prune.pruning.passes.batches import batch_size
from tune_prune.pruning.statistics import Need, load_statistic, statistic_names
from tune_prune.tuning.cost import SAMPLED_ITEMS, Arithmetic, suite_tokens

PEAK_SIZES = (512, 1024, 2048)


def main(argv: list[str] | None = None) -> int:
    p = benchmark_parser(__doc__, ("20M", "50M"))
    p.add_argument(
        "--seq-len", type=COUNT, default=128, metavar="N", help="of calibration samples (default: %(default)s)"
    )
    p.add_argument("--samples", type=COUNT, default=8, metavar="N", help="of the gradient pass (default: %(default)s)")
    p.add_argument(
        "--limit", type=COUNT, default=5, metavar="N", help="items per task, at most 64 (default: %(default)s)"
    )
    p.add_argument(
        "--profile",
        type=FROM_ZERO,
        default=5,
        metavar="N",
        help="operators to show, 0: none (default: %(default)s)",
    )
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    rows: list[list[object]] = [["model", "stage", "tokens", "GFLOP", "seconds", "GFLOP/s", "of peak"]]
    results = {}
    with tempfile.TemporaryDirectory(prefix="bench_flops_") as work:
        for name in args.model:
            one = subject(name, Path(work))
            result = measure(
                one, args.seq_len, args.samples, min(args.limit, SAMPLED_ITEMS), args.repeats, args.profile
            )
            results[one.name] = result
            print(
                f"{one.name}: a product reaches {result['peak_flops_per_second'] / 1e9:.1f} GFLOP/s on {args.threads} threads"
            )
            for stage, values in result["stages"].items():
                rows.append(
                    [
                        one.name,
                        stage,
                        values["tokens"],
                        values["flops"] / 1e9,
                        values["seconds"],
                        values["flops_per_second"] / 1e9,
                        f"{values['of_peak']:.0%}",
                    ]
                )
    print()
    print(table(rows))
    for name, result in results.items():
        for stage, operators in result["operators"].items():
            shares = ", ".join(f"{operator} {share:.0%}" for operator, share in operators.items())
            print(f"\n{name} {stage}: {shares}")
    write_json(args.output, {"models": results})
    return 0


def products() -> dict[str, tuple[float, Callable[[], Any]]]:
    """Square float32 products by name: their operations, and what computes them."""
    result: dict[str, tuple[float, Callable[[], Any]]] = {}
    for size in PEAK_SIZES:
        a, b = torch.randn(2, size, size)
        result[f"product {size}"] = 2.0 * size**3, partial(torch.matmul, a, b)
    return result


def measure(one: Subject, seq_len: int, samples: int, limit: int, repeats: int, num_operators: int) -> dict[str, Any]:
    """Tokens, operations, seconds of each stage of the dense model, and its operators by their share of the time."""
    run = one.run(limit=limit)
    loaded = loading.load_model(catalog.resolve(run.model), torch.float32, "cpu")
    model, family = loaded.model, loaded.family
    arithmetic = Arithmetic.of(loaded.geometry, model.config.vocab_size)
    text = calibration.tokenize(loaded.tokenizer, calibration.load_text(run.calibration))
    windows = calibration.windows(text, seq_len, samples, run.seed)
    window = min(run.protocol.perplexity_window, loaded.max_length)
    reported = calibration.tokenize(loaded.tokenizer, perplexity_text.load_text(run.data_dir, uses_embedded_data(run)))
    reported = reported[:window]
    items = suite_tokens(build_suite(loaded.tokenizer, run.protocol, task_source(run), loaded.max_length)).rows
    assert items is not None
    everything = (*items.plain, *items.trees)

    calls: dict[str, Callable[[], Any]] = {
        "perplexity": lambda: perplexity.perplexity(model, reported, window),
        "zero_shot": lambda: score_planned(model, items),
    }
    tokens = {
        "perplexity": len(reported),
        "zero_shot": items.num_tokens,
    }
    flops = {
        "perplexity": arithmetic.forward(len(reported), min(window, len(reported))),
        # every row has its own length, so its own attention
        "zero_shot": sum(
            arithmetic.forward(len(row.tokens), len(row.tokens), len(np.unique(row.scored))) for row in everything
        ),
    }
    config = PruningConfig("random", seq_len, samples)
    for name in statistic_names():
        statistic = load_statistic(name)
        needs = [Need(name, kind, statistic.num_samples(config)) for kind in statistic.kinds]
        work = statistic.work(needs, seq_len, arithmetic.layers, "cpu")
        calls[statistic.stage] = partial(statistic.collect, model, family, windows, needs)
        tokens[statistic.stage], flops[statistic.stage] = work.tokens, arithmetic.of_pass(work, seq_len)
    step = batch_size(seq_len, "cpu")
    assert samples <= step or samples % step == 0, "a batch would run twice"
    for call in calls.values():
        call()  # the first time includes what torch sets up
    square = products()
    seconds, _ = median_times(calls | {name: call for name, (_, call) in square.items()}, repeats)
    peak = max(operations / seconds[name] for name, (operations, _) in square.items())
    stages = {
        stage: {
            "tokens": tokens[stage],
            "flops": flops[stage],
            "seconds": seconds[stage],
            "flops_per_second": flops[stage] / seconds[stage],
            "of_peak": flops[stage] / seconds[stage] / peak,
        }
        for stage in calls
    }
    operators = {stage: top_operators(call, num_operators) for stage, call in calls.items()} if num_operators else {}
    return {"sizes": sizes_of(run), "peak_flops_per_second": peak, "stages": stages, "operators": operators}


def top_operators(call: Callable[[], Any], count: int) -> dict[str, float]:
    """The operators that take most time by themselves, and their share of all."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    averages = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in averages)
    largest = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:count]
    return {event.key: event.self_cpu_time_total / total for event in largest}


if __name__ == "__main__":
    sys.exit(exit_code(main))
