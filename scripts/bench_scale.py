"""What a search and its analysis cost when many trials are there: seconds and memory at 100, 1,000 and 5,000 finished ones.

    python scripts/bench_scale.py                       a few minutes, most of them for writing the experiments
    python scripts/bench_scale.py --trials 300 --keep DIR     one size, whose experiment stays in DIR

The experiments are synthetic: one real trial of each method of tiny-llama is run, and its record and items are multiplied with the
other configurations of a grid. Which items a configuration answers is drawn (`outcomes`): configurations find the same items hard,
better methods and more samples answer more of them, and neighbours differ little, so that hundreds are close to the best. The same
command that such an experiment names then finds every trial finished.

    start       of that command: the plan, and reading the ledger
    message     one stage of one trial in the live line, with the line written each time (a search writes it every ten seconds)
    end         of that command: comparison with the best, every view, the final table
    analysis    `tune-prune analysis` of the experiment, all of its files
    status      `search --status` of it
    study       `analysis --export-study` of it

Each is measured in a process of its own: seconds without imports, and the most memory beside what the process held after them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from bench_common import COUNT, counts

from tune_prune.commands.flags import output_file
from tune_prune.core.config import PruningConfig
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.ledger import Ledger, file_checksum, read_baselines, write_baselines
from tune_prune.core.store import ITEMS, TRIALS, FolderStore

METHODS = ("taylor", "layerwise", "blockwise", "wanda_sp")
BETTER = {"taylor": 0.3, "layerwise": 0.1, "blockwise": 0.4, "wanda_sp": -0.6}  # log-odds
MESSAGES = 500


def space(folder: Path, trials: int) -> Path:
    """A search space of so many configurations, rounded up to a grid."""
    lengths = max(1, round((trials / len(METHODS) / 2) ** 0.5))
    samples = -(-trials // (len(METHODS) * lengths))
    lines = {
        "search": "grid",
        "method": f"[{', '.join(METHODS)}]",
        "seq_len": str([8 + 4 * i for i in range(lengths)]),
        "num_samples": str([8 + 4 * i for i in range(samples)]),
    }
    path = folder / f"grid{trials}.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()), encoding="utf-8")
    return path


def search_argv(folder: Path, trials: int, *more: str) -> list[str]:
    return [
        *("--model", "tiny-llama", "--search-space", str(space(folder, trials)), "--storage-path", str(folder)),
        *("--inline", "--name", f"trials-{trials}", *more),
    ]


def outcomes(configs: Sequence[PruningConfig], items: int, generator: np.random.Generator) -> np.ndarray:
    """Which item each configuration answers, [items, configurations] of int8: it does where its ability is above the item's
    difficulty by a logistic draw, two thirds of which all configurations share."""
    ability = np.array(
        [
            BETTER[c.method]
            + 0.25 * np.log2(c.seq_len)
            - 0.02 * np.log2(c.seq_len) ** 2
            + 0.05 * np.log2(c.num_samples)
            for c in configs
        ]
    )
    hard = generator.logistic(-1.5, 1.5, (items, 1))
    own = generator.logistic(0, 0.8, (items, len(configs))).astype(np.float32)
    return (ability - hard + own > 0).astype(np.int8)


def make(folder: Path, trials: int, limit: int | None = None, seed: int = 0) -> Path:
    """The experiment of so many finished trials below `folder`."""
    from tune_prune.commands.flags import settings_from
    from tune_prune.commands.search import parser
    from tune_prune.tuning import experiment
    from tune_prune.tuning.preflight import make_plan

    more = [] if limit is None else ["--limit", str(limit)]
    with contextlib.redirect_stdout(io.StringIO()):
        code = importlib.import_module("tune_prune.commands.search").main(search_argv(folder, len(METHODS), *more))
    assert code == 0, "the templates' search has failed"
    templates = FolderStore(folder / f"trials-{len(METHODS)}")
    argv = search_argv(folder, trials, *more)
    plan = make_plan(settings_from(vars(parser().parse_args(argv))))
    assert isinstance(plan.experiment_dir, Path)
    store = FolderStore(plan.experiment_dir)
    experiment.write(store, plan, ["tune-prune", "search", *argv])

    write_baselines(store, read_baselines(templates))
    records = {record.config["method"]: record for record in Ledger(templates).records()}
    (model,) = plan.models
    configs = [config for config, _ in model.trials]
    first = next(iter(records.values()))
    items = pyarrow.parquet.read_table(templates.path(f"{TRIALS}/{first.key}/{ITEMS}"))
    tasks = np.asarray(items["task"])
    scores = outcomes(configs, len(tasks), np.random.default_rng(seed))
    for column, (config, key) in enumerate(model.trials):
        own = scores[:, column]
        written = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(with_scores(items, own), written)
        content = written.getvalue().to_pybytes()
        store.put(f"{TRIALS}/{key}/{ITEMS}", content)
        record = replace(
            records[config.method],
            key=key,
            config=asdict(config),
            metrics=records[config.method].metrics | accuracies(tasks, own) | {"ppl": 5.0 - 2.5 * float(own.mean())},
            files={ITEMS: file_checksum(content)},
        )
        Ledger(store).write(record)
    return plan.experiment_dir


def accuracies(tasks: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """As `evaluation.item_scores.summarize` has them."""
    found: dict[str, float] = {}
    errors: list[float] = []
    for task in dict.fromkeys(tasks.tolist()):
        of_task = scores[tasks == task]
        mean = float(of_task.sum() / len(of_task))
        errors.append((mean * (1 - mean) / (len(of_task) - 1)) ** 0.5)
        found |= {f"acc_{task}": mean, f"acc_{task}_stderr": errors[-1]}
    means = [value for name, value in found.items() if not name.endswith("_stderr")]
    stderr = sum(error**2 for error in errors) ** 0.5 / len(errors)
    return found | {"acc_mean": sum(means) / len(means), "acc_mean_stderr": stderr}


def with_scores(items: pyarrow.Table, scores: np.ndarray) -> pyarrow.Table:
    for name in ("acc", "acc_norm", "score"):
        column = pyarrow.array(scores.astype(np.float32))
        items = items.set_column(items.schema.get_field_index(name), name, column)
    return items


# What is measured: functions of the experiment's folder and the search's arguments that import first and give what is timed


def start(folder: Path, argv: Sequence[str]) -> Callable[[], object]:
    from tune_prune.commands.flags import settings_from
    from tune_prune.commands.search import parser
    from tune_prune.tuning.preflight import make_plan

    settings = settings_from(vars(parser().parse_args(list(argv))))

    def run() -> None:
        plan = make_plan(settings)
        assert plan.recorded == len(Ledger(FolderStore(folder)).records())

    return run


def end(folder: Path, argv: Sequence[str]) -> Callable[[], object]:
    from tune_prune.analysis.export import write_views
    from tune_prune.analysis.input.reading import study_of_search
    from tune_prune.analysis.statistics.findings import find
    from tune_prune.commands import results
    from tune_prune.core.store import EXPERIMENT

    store = FolderStore(folder)
    about, baselines, records = store.read(EXPERIMENT) or {}, read_baselines(store), Ledger(store).records()

    def run() -> None:
        findings = find(study_of_search(folder, about, baselines, records))
        write_views(store, records, findings)
        assert str(results.Results(folder, findings, {}))

    return run


def analysis(folder: Path, argv: Sequence[str]) -> Callable[[], object]:
    from tune_prune.analysis.figures import figures
    from tune_prune.analysis.render import page
    from tune_prune.commands import analysis as command

    assert figures and page
    return lambda: command.main([str(folder), "--output", str(folder.parent / "analysis")])


def message(folder: Path, argv: Sequence[str]) -> Callable[[], object]:
    from tune_prune.commands.flags import settings_from
    from tune_prune.commands.search import parser
    from tune_prune.core.records import StageReport
    from tune_prune.trial.trial import TrialProgress
    from tune_prune.tuning.cost import CostEstimate, ModelCost
    from tune_prune.tuning.messages import TrialMessage
    from tune_prune.tuning.preflight import make_plan
    from tune_prune.tuning.progress import LiveLine
    from tune_prune.tuning.work import TrialSpec

    (model,) = make_plan(settings_from(vars(parser().parse_args(list(argv))))).models
    specs = {key: TrialSpec(model.run, config, key) for config, key in model.trials}
    done = {r.key: r for r in Ledger(FolderStore(folder)).records()}
    trial = {"pruning": 1.0, "perplexity": 9.0, "zero_shot": 20.0}
    cost = CostEstimate((ModelCost(model.run.label, (), {}, trial, len(specs)),), 1, 0.0, 0.0)
    half = len(specs) // 2
    line = LiveLine(specs, len(specs), list(done.values())[:half], stream=io.StringIO(), cost=cost)
    report = StageReport("perplexity", 9.0, tokens=1)

    def run() -> None:
        for spec in itertools.islice(itertools.cycle(specs.values()), MESSAGES):
            progress = TrialProgress(spec.key, spec.run.label, spec.config, reports=(report,))
            line.on_start(spec)
            line.on_message(spec, TrialMessage(progress, report))
            line._write(line._text(running=1))

    return run


def status(folder: Path, argv: Sequence[str]) -> Callable[[], object]:
    from tune_prune.commands import status

    return lambda: status.shown(str(folder), ".")


def study(folder: Path, argv: Sequence[str]) -> Callable[[], object]:
    from tune_prune.analysis import optuna_study
    from tune_prune.commands import analysis as command

    assert optuna_study
    return lambda: command.main([str(folder), "--export-study", str(folder.parent / "study.db"), "--overwrite"])


PARTS: Mapping[str, Callable[[Path, Sequence[str]], Callable[[], object]]] = {
    "start": start,
    "message": message,
    "end": end,
    "analysis": analysis,
    "status": status,
    "study": study,
}


def _measure(part: str, folder: Path, argv: Sequence[str], pipe: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run = PARTS[part](folder, argv)
        before = _peak(reset=True)
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
    pipe.send({"seconds": seconds / (MESSAGES if part == "message" else 1), "bytes": _peak() - before})


def _peak(reset: bool = False) -> int:
    """The most bytes that this process had resident, since the last reset (of Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(part: str, folder: Path, argv: Sequence[str]) -> dict[str, float]:
    """Seconds and bytes of a part, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(part, folder, argv, theirs))
    process.start()
    theirs.close()
    found: dict[str, float] = mine.recv()
    process.join()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trials", type=counts, default="100,1000,5000", metavar="N,N", help="finished trials (default: %(default)s)"
    )
    parser.add_argument("--limit", type=COUNT, metavar="N", help="items of each task (default: all 240)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the experiments are made and stay")
    parser.add_argument(
        "--parts", default=",".join(PARTS), metavar="A,B", help="what is measured (default: %(default)s)"
    )
    parser.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers as JSON, too")
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts.split(",") if part not in PARTS]:
        parser.error(f"--parts names {', '.join(unknown)}; there are {', '.join(PARTS)}")
    work = args.keep or Path(tempfile.mkdtemp(prefix="bench_scale_"))
    work.mkdir(parents=True, exist_ok=True)
    found = []
    try:
        for trials in args.trials:
            folder = work / f"trials-{trials}"
            if not folder.exists():
                make(work, trials, args.limit)
            more = [] if args.limit is None else ["--limit", str(args.limit)]
            given = search_argv(work, trials, *more)
            row: dict[str, Any] = {"trials": len(Ledger(FolderStore(folder)).records())}
            for part in args.parts.split(","):
                row[part] = measure(part, folder, given)
            found.append(row)
            print(line_of(row), flush=True)
    finally:
        if args.keep is None:
            shutil.rmtree(work)
    if args.output is not None:
        atomic_write_text(args.output, to_json({"sizes": found}))
    return 0


def line_of(row: Mapping[str, Any]) -> str:
    parts = [
        f"{name} {v['seconds']:.3g} s, {v['bytes'] / 2**20:.0f} MiB" for name, v in row.items() if name != "trials"
    ]
    return f"{row['trials']:,} trials: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
