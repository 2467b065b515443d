"""A whole grid by the search, against the same trials done the published way: each alone, recomputing everything.

    python scripts/bench_grid.py                                           45 trials of tiny-llama, 9 of them the published way
    python scripts/bench_grid.py --model 20M --limit 100 --sample 5        random weights, real task items

The search is `tune-prune search` on a fresh folder: preparation, dense baseline, trials and tables, from start to
end of its process. The published way runs every trial in a process of its own that imports everything, loads the model, makes
its own passes as the published code makes them (published_way.py), prunes, and evaluates with lm-eval's HFLM; no baseline. As
many processes as CPUs run at once, one thread each, as the search's trials do.

That code calls plain transformers and measures removals that its method does not use. What sharing and the engine alone gain is
reported, too: each published trial makes its passes once more, uncounted, with the search's kernels and batches and
only the removals that it uses, and a second ratio takes the seconds of those.

With a `--limit` the perplexity text is cut to the same share; the gradient passes stay whole, so they weigh more than with
all items.

With `--sample K` only every (trials / K)-th configuration is run the published way, taken evenly from their order by method,
seq_len and num_samples, and the time is scaled up to the grid: gradient and removal passes by their tokens, the rest by the
number of trials. The accuracies of the trials that both ways ran must be the same; those that are not are counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_common import Subject, benchmark_parser, measure_models, sizes_of, title
from published_way import removal_kinds
from script_tools import COUNT, FROM_ZERO, table

from tune_prune.core.config import PruningConfig
from tune_prune.core.ending import exit_code
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.ledger import Ledger
from tune_prune.core.machine import cpus
from tune_prune.core.store import FolderStore
from tune_prune.data import calibration, perplexity_text
from tune_prune.evaluation.item_scores import metric_of
from tune_prune.pruning.methods import load_method
from tune_prune.pruning.statistics.block_removal import KINDS
from tune_prune.tuning import space as search_space

ROOT = Path(__file__).resolve().parents[1]
# Of a published trial, in their order.
PARTS = ("start and imports", "load", "gradients", "removal", "unused removal", "pruning", "perplexity", "zero_shot")


def run_search(
    subject: Subject, args: argparse.Namespace, storage: Path, more: Sequence[str] = ()
) -> tuple[float, dict[str, dict[str, float]]]:
    """Run the search; return the seconds of its process, which has `more` flags, and the metrics of its trials by configuration
    name."""
    command = [sys.executable, "-m", "tune_prune.search", "--model", subject.location]
    command += ["--search-space", args.search_space, "--storage-path", str(storage), "--name", "grid"]
    command += ["--tasks", ",".join(args.tasks), "--pruning-ratio", str(args.pruning_ratio), "--shape", "free"]
    command += ["--dtype", subject.dtype, "--gpus-per-trial", "0", "--cpus-per-trial", "1"]
    command += ["--limit", str(args.limit)] if args.limit else []
    command += ["--data-dir", subject.data] if subject.data else []
    command += more
    started = time.perf_counter()
    _call(command)
    seconds = time.perf_counter() - started
    records = Ledger(FolderStore(storage / "grid")).records()
    complete = [record for record in records if record.status == "complete"]
    if len(complete) < len(records) or not records:
        raise RuntimeError(f"only {len(complete)} of {len(records)} trials of the search are complete")
    return seconds, {record.config.name: record.metrics for record in complete if record.config}


def run_published(
    subject: Subject, configs: list[PruningConfig], args: argparse.Namespace, work: Path
) -> list[dict[str, Any]]:
    """Run the trials; return the results of each and the seconds of its parts; as many at once as there are slots."""
    work.mkdir()

    def one(config: PruningConfig) -> dict[str, Any]:
        order = work / f"{config.name}.order.json"
        values = {"subject": asdict(subject), "config": asdict(config), "tasks": args.tasks, "limit": args.limit}
        atomic_write_text(order, to_json(values | {"batch_size": args.batch_size, "folder": str(work / config.name)}))
        started = time.perf_counter()
        _call([sys.executable, __file__, "--published-trial", str(order)])
        seconds = time.perf_counter() - started
        result = json.loads((work / config.name / "result.json").read_text(encoding="utf-8"))
        parts = result["parts"]
        parts["start and imports"] = seconds - sum(parts.values()) - sum(result["own_kernels"].values())
        return result | {"config": config.name}

    with ThreadPoolExecutor(args.slots) as pool:
        return list(pool.map(one, configs))


def _call(command: list[str]) -> None:
    """Run `command` quietly on one thread a process. Raises RuntimeError with the end of its output where it fails."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # By default Ray's workers run at a lower priority than other processes; the published trials do not.
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def published_trial(order: dict[str, Any]) -> None:
    """Run one trial, with nothing kept from another and nothing kept for another."""
    marks = {"": time.perf_counter()}
    import published_way
    from bench_lm_eval import write_definitions
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from tune_prune.data.sources import task_source, uses_embedded_data
    from tune_prune.evaluation import perplexity
    from tune_prune.models import catalog, loading
    from tune_prune.pruning.methods import Dense
    from tune_prune.pruning.selection import select
    from tune_prune.pruning.statistics.block_removal import LOSS_FLOOR, RemovalLosses
    from tune_prune.pruning.statistics.taylor import taylor
    from tune_prune.pruning.surgery import prune

    torch.set_num_threads(1)
    config, folder = PruningConfig.from_dict(order["config"]), Path(order["folder"])
    tasks = tuple(order["tasks"])
    run = Subject(**order["subject"]).run(tasks, order["limit"] or None)
    loaded = loading.load_model(catalog.resolve(run.model), getattr(torch, run.dtype), "cpu")
    text = calibration.tokenize(loaded.tokenizer, calibration.load_text(run.calibration))
    windows = calibration.windows(text, config.seq_len, config.num_samples, run.seed)
    few = config.num_removal_samples
    marks["load"] = time.perf_counter()

    groups = published_way.gradient_pass(loaded, windows)
    marks["gradients"] = time.perf_counter()
    statistics: dict[str, Any] = {"taylor": groups}
    kinds = removal_kinds(config.method)
    if kinds:
        losses = published_way.removal_passes(loaded, windows[:few], kinds)
        removal = RemovalLosses(losses.pop("dense")[0], losses)
        statistics |= {f"block_removal:{kind}": removal.increase(kind, few).clip(min=LOSS_FLOOR) for kind in kinds}
    marks["removal"] = time.perf_counter()
    if kinds:
        published_way.removal_passes(loaded, windows[:few], unused_removals(kinds))
    marks["unused removal"] = time.perf_counter()
    plan = select(
        load_method(config.method).scores(Dense(loaded.model, loaded.family, loaded.geometry, run.seed, statistics)),
        loaded.geometry,
        config.pruning_ratio,
    )
    model = prune(loaded.model, loaded.family, plan)
    marks["pruning"] = time.perf_counter()
    held_out = calibration.tokenize(loaded.tokenizer, perplexity_text.load_text(run.data_dir, uses_embedded_data(run)))
    window = min(run.protocol.perplexity_window, loaded.max_length)
    ppl = published_way.perplexity(model, held_out, window)
    marks["perplexity"] = time.perf_counter()
    lm = HFLM(
        pretrained=model,
        tokenizer=loaded.tokenizer,
        max_length=loaded.max_length,
        batch_size=order["batch_size"],
        softmax_dtype=torch.float32,
        device="cpu",
    )
    results = simple_evaluate(
        lm,
        tasks=[f"own_{name}" for name in tasks],
        task_manager=write_definitions(task_source(run), tasks, folder),
        limit=order["limit"] or None,
        bootstrap_iters=0,
    )["results"]
    marks["zero_shot"] = time.perf_counter()
    accuracies = {f"acc_{name}": results[f"own_{name}"][f"{metric_of(name)},none"] for name in tasks}

    again = {"": time.perf_counter()}
    taylor(loaded.model, loaded.family, windows, [config.num_samples])
    again["gradients"] = time.perf_counter()
    if kinds:
        published_way.removal_passes(loaded, windows[:few], kinds, in_batches=True)
    again["removal"] = time.perf_counter()
    perplexity.perplexity(model, held_out, window)
    again["perplexity"] = time.perf_counter()
    values = {"metrics": accuracies | {"ppl": ppl}, "parts": _between(marks), "own_kernels": _between(again)}
    atomic_write_text(folder / "result.json", to_json(values))


def _between(marks: dict[str, float]) -> dict[str, float]:
    """Return seconds up to each mark since the one before."""
    seconds = [after - before for before, after in pairwise(marks.values())]
    return dict(zip(list(marks)[1:], seconds, strict=True))


def unused_removals(used: Sequence[str]) -> tuple[str, ...]:
    return tuple(kind for kind in KINDS if kind not in used)


def differences(published: list[dict[str, Any]], search: dict[str, dict[str, float]]) -> list[str]:
    """Return accuracies that are not the same in both ways, as text."""
    sentences = []
    for trial in published:
        ours = search[trial["config"]]
        for name, value in trial["metrics"].items():
            if not math.isclose(value, ours[name], rel_tol=1e-4 if name == "ppl" else 1e-9):
                sentences.append(
                    f"{trial['config']}: {name} is {ours[name]:.6g} in the search, {value:.6g} the published way"
                )
    return sentences


def pass_tokens(configs: Sequence[PruningConfig], num_layers: int) -> dict[str, float]:
    """Return tokens that a mean published trial forwards in each of its passes, once for every removal."""
    tokens = {"gradients": 0, "removal": 0, "unused removal": 0}
    for config in configs:
        tokens["gradients"] += config.seq_len * config.num_samples
        if used := removal_kinds(config.method):
            once = config.seq_len * config.num_removal_samples
            tokens["removal"] += once * (1 + num_layers * len(used))
            tokens["unused removal"] += once * (1 + num_layers * len(unused_removals(used)))
    return {name: total / len(configs) for name, total in tokens.items()}


def mean_parts(trials: list[dict[str, Any]], scale: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds of a mean trial's parts, the published way and, with the same names, with the search's kernels."""

    def mean(name: str) -> dict[str, float]:
        parts = {part: sum(trial[name][part] for trial in trials) / len(trials) for part in trials[0][name]}
        return {part: seconds * scale.get(part, 1.0) for part, seconds in parts.items()}

    parts = mean("parts")
    return parts, parts | mean("own_kernels") | {"unused removal": 0.0}


def measure(subject: Subject, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    space = search_space.load(args.search_space)
    configs = replace(space, values=space.values | {"pruning_ratio": (args.pruning_ratio,)}).configs()
    count = min(args.sample or len(configs), len(configs))
    # Taken evenly from the order by method, seq_len and num_samples.
    ordered = sorted(configs, key=lambda c: (c.method, c.seq_len, c.num_samples))
    sample = [ordered[(2 * index + 1) * len(configs) // (2 * count)] for index in range(count)]
    sizes = sizes_of(subject.run())
    whole, sampled = (pass_tokens(some, sizes["layers"]) for some in (configs, sample))
    scale = {name: tokens / sampled[name] for name, tokens in whole.items() if sampled[name]}
    searches: list[float] = []
    published: list[dict[str, float]] = []  # parts of a mean trial
    own_kernels: list[dict[str, float]] = []
    for repeat in range(args.repeats):
        seconds, metrics = run_search(subject, args, work / f"{subject.name}-search-{repeat}", args.more)
        trials = run_published(subject, sample, args, work / f"{subject.name}-published-{repeat}")
        searches.append(seconds)
        for parts, means in zip((published, own_kernels), mean_parts(trials, scale), strict=True):
            parts.append(means)
    search_seconds = statistics.median(searches)
    published_seconds, own_seconds = (
        statistics.median(sum(means.values()) for means in parts) * len(configs) / args.slots
        for parts in (published, own_kernels)
    )
    return {
        "model": subject.name,
        **sizes,
        "trials": len(configs),
        "published_trials_run": count,
        "slots": args.slots,
        "search_seconds": search_seconds,
        "published_seconds": published_seconds,
        "own_kernels_seconds": own_seconds,
        "ratio": published_seconds / search_seconds,
        "own_kernels_ratio": own_seconds / search_seconds,
        "search_seconds_of_each": searches,
        "parts": published[-1],
        "own_kernels_parts": own_kernels[-1],
        "mismatches": differences(trials, metrics),
    }


def report(result: dict[str, Any]) -> str:
    count, trials = result["published_trials_run"], result["trials"]
    how = "all of them run" if count == trials else f"scaled up from {count} of them"
    rows: list[tuple[object, ...]] = [("", "trials", "seconds", "seconds a trial", "of the search")]
    for name, key in (
        ("search", "search_seconds"),
        (f"published way, {how}", "published_seconds"),
        ("the same with the search's kernels", "own_kernels_seconds"),
    ):
        seconds = result[key]
        rows.append((name, trials, seconds, seconds / trials, f"{seconds / result['search_seconds']:.1f}x"))
    parts: list[tuple[object, ...]] = [("seconds of a mean trial", "published way", "search's kernels")]
    parts += [(name, result["parts"][name], result["own_kernels_parts"][name]) for name in PARTS]
    lines = [
        f"{title(result)}, {result['slots']} processes at once",
        table(rows),
        "",
        table(parts),
        "",
        f"accuracies that differ: {len(result['mismatches'])} in {count} trials",
        *result["mismatches"],
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = benchmark_parser(__doc__, ["tiny-llama"], repeats=1, limit=0)
    p.add_argument(
        "--sample", type=FROM_ZERO, default=9, metavar="K", help="trials run the published way, 0: all (default: 9)"
    )
    p.add_argument("--search-space", default="paper_grid", metavar="NAME_OR_YAML", help="(default: %(default)s)")
    p.add_argument("--pruning-ratio", type=float, default=0.2, metavar="R")
    p.add_argument(
        "--batch-size", type=COUNT, default=16, metavar="N",
        help="of HFLM, bench_engine.py finds its best (default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--slots", type=COUNT, default=cpus(), metavar="N", help="processes at once (default: CPUs)")
    p.add_argument(
        "--inline", dest="more", action="store_const", const=["--inline"], default=[], help="search without Ray"
    )
    p.add_argument("--published-trial", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.published_trial is not None:
        published_trial(json.loads(args.published_trial.read_text(encoding="utf-8")))
        return {}
    return measure_models("grid", args, measure, report)


if __name__ == "__main__":
    sys.exit(exit_code(main))
