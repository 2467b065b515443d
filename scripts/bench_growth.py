"""How the cost of a search grows with the size of the model, with items and with configurations: predicted and measured.

    python scripts/bench_growth.py                       four sizes, three limits, three grids; about five minutes
    python scripts/bench_growth.py --output growth.json

Every point is a search of its own (the one that all three lines share is measured once), all of its trials one after the
other in this process (`trial.prepare` and `run_trial`, one thread, nothing cached before), predicted by the cost model as
`--dry-run` does. Seconds are those of the stages; starting workers is left out on both sides.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_common import Subject, benchmark_parser, counts, sizes_of, subject, table, write_json

from tune_prune.core.artifact_cache import ArtifactStore
from tune_prune.core.config import ModelRun, PruningConfig
from tune_prune.core.ending import exit_code
from tune_prune.models import catalog, loading
from tune_prune.pruning.selection import budget
from tune_prune.trial.context import TrialContext
from tune_prune.trial.trial import prepare, run_trial
from tune_prune.tuning.cost import (
    Arithmetic,
    CostEstimate,
    ModelWork,
    SpeedRequest,
    by_samples,
    estimate,
    measure,
    workload,
)

STAGES = ("importance", "removal", "perplexity", "zero_shot")
RATIO = 0.2


def main(argv: list[str] | None = None) -> int:
    p = benchmark_parser(__doc__, ("tiny-llama", "5M", "20M", "50M"), repeats=1, threads=False)
    p.add_argument("--limit", type=counts, default=(4, 8, 16), metavar="A,B", help="items per task (default: 4,8,16)")
    p.add_argument(
        "--num-samples", type=counts, default=(4, 8, 16), metavar="A,B",
        help="of the configurations, one more in each step (default: 4,8,16)",
    )  # fmt: skip
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    first_limit, first_grid = args.limit[0], args.num_samples[:1]
    # A point for every size; items and configurations grow on the second smallest one.
    middle = args.model[min(1, len(args.model) - 1)]
    points = [("model", name, first_limit, first_grid) for name in args.model]
    points += [("items", middle, limit, first_grid) for limit in args.limit]
    points += [
        ("configurations", middle, first_limit, args.num_samples[:n]) for n in range(1, len(args.num_samples) + 1)
    ]
    rows: list[list[object]] = [
        ["grows", "model", "items", "trials", "tokens", "predicted", "seconds", "predicted", "ratio"]
    ]
    results: list[dict[str, Any]] = []
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench_growth_") as work:
        for grows, name, limit, num_samples in points:
            one = subject(name, Path(work), limit)
            configs = [PruningConfig(m, 32, n, RATIO) for n in num_samples for m in ("taylor", "blockwise")]
            if (name, limit, num_samples) not in known:
                runs = [point(one, limit, configs, Path(work)) for _ in range(args.repeats)]
                middle_run = sorted(runs, key=lambda run: run["measured"]["total_seconds"])[len(runs) // 2]
                known[name, limit, num_samples] = middle_run
            result = known[name, limit, num_samples]
            results.append({"grows": grows, "model": one.name, "limit": limit, "trials": len(configs), **result})
            expected, measured = result["predicted"], result["measured"]
            rows.append(
                [
                    grows,
                    one.name,
                    result["items"],
                    len(configs),
                    measured["total_tokens"],
                    expected["total_tokens"],
                    measured["total_seconds"],
                    expected["total_seconds"],
                    expected["total_seconds"] / measured["total_seconds"],
                ]
            )
            print(table([rows[0], rows[-1]]).splitlines()[-1], flush=True)
    print()
    print(table(rows))
    write_json(args.output, {"points": results})
    return 0


def point(one: Subject, limit: int, configs: list[PruningConfig], work: Path) -> dict[str, Any]:
    """Tokens and seconds by stage of a search over `configs` with the baseline, predicted and measured."""
    run = one.run(limit=limit)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        predicted = predict(run, configs, Path(folder))
        context = TrialContext.open(run, folder, device="cpu")
        items = context.suite.num_items  # built here: the estimate of zero-shot leaves it out
        reports: list[dict[str, Any]] = []
        for samples, shared in by_samples(configs).items():
            for _, report in prepare(context, samples, shared):
                reports.append({"stage": report.stage, "tokens": report.tokens, "duration_s": report.duration_s})
        for config in (None, *configs):
            reports += run_trial(config, context).stages
    stages = {stage.stage: stage for stage in predicted.stages()}
    expected = _by_stage({name: (stages[name].tokens, stages[name].seconds) for name in STAGES})
    measured = _by_stage(
        {
            name: (
                sum(report["tokens"] for report in reports if report["stage"] == name),
                sum(report["duration_s"] for report in reports if report["stage"] == name),
            )
            for name in STAGES
        }
    )
    return {"sizes": sizes_of(run), "items": items, "predicted": expected, "measured": measured}


def predict(run: ModelRun, configs: list[PruningConfig], folder: Path) -> CostEstimate:
    """As a dry run does, without the building of the zero-shot suite."""
    source = catalog.resolve(run.model)
    config = loading.load_config(source)
    _, geometry = loading.config_geometry(config)
    load = workload(run, config, loading.load_tokenizer(source), ArtifactStore(folder), "")
    longest = max(load.perplexity_window, *(c.seq_len for c in configs))
    speed = measure(SpeedRequest(config, run.dtype, "cpu", 1, longest, load.zero_shot.rows))
    both = [
        ModelWork(
            label=run.label,
            arithmetic=Arithmetic.of(geometry, config.vocab_size),
            device="cpu",
            weight_bytes=0,
            speed=speed,
            passes=by_samples(configs) if baseline is False else {},
            baseline=False,
            trials=1 if baseline else len(configs),
            removed_params=0 if baseline else budget(geometry, RATIO),
            perplexity_tokens=load.perplexity_tokens,
            perplexity_window=load.perplexity_window,
            zero_shot=load.zero_shot,
        )
        for baseline in (True, False)
    ]
    return estimate(both, slots=1, gpus=0)


def _by_stage(values: dict[str, tuple[int, float]]) -> dict[str, Any]:
    return {
        "tokens": {name: tokens for name, (tokens, _) in values.items()},
        "seconds": {name: seconds for name, (_, seconds) in values.items()},
        "total_tokens": sum(tokens for tokens, _ in values.values()),
        "total_seconds": sum(seconds for _, seconds in values.values()),
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
