"""Search the best way to prune a model: `python -m tune_prune.search --model mistral`.

Runs every configuration of a search space (or those that Optuna picks) as a Ray Tune trial that prunes the model for real
and measures what is left, and writes the best one with its evidence to ray_results/<experiment>/. The same command again
runs only what is missing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from typing import TYPE_CHECKING

from tune_prune.cli import flags
from tune_prune.core.errors import Parser

if TYPE_CHECKING:
    from pathlib import Path

    from tune_prune.core.store import FolderStore
    from tune_prune.planning.plan import Plan, SearchSettings
    from tune_prune.tuning.driver import SearchResult


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m tune_prune.search",
        description="Find the best way to prune a language model: a search over pruning configurations, each one tried for real.",
        epilog="Exit codes: 0 done, 2 something in the command must change, 130 interrupted (the same command goes on), 1 else.",
    )
    what = p.add_argument_group("what is searched")
    what.add_argument(
        "--model", type=flags.text, action="append", required=True, metavar="NAME",
        help="alias (llama, qwen2.5, mistral, tiny-llama, ...), hub id or local folder; give it again for more models",
    )  # fmt: skip
    what.add_argument(
        "--revision", type=flags.text, metavar="REV", help="branch, tag or commit of a hub model (default: main)"
    )
    what.add_argument(
        "--search-space", type=flags.text, default="paper_grid", metavar="NAME_OR_YAML",
        help="paper_grid (45 configurations), adaptive, minimal, smoke (6), or a YAML file (default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--search", choices=("grid", "optuna"), help="try all, or let Optuna's TPE pick (default: as the space says)"
    )
    what.add_argument(
        "--num-trials",
        type=flags.whole_number(1, 10**9),
        metavar="N",
        help="trials per model and pruning ratio with --search optuna",
    )
    flags.add_hyperparameter_flags(what, ["pruning_ratio"], "as the space says, else 0.2")
    flags.add_hyperparameter_flags(what, ["shape"], "as the space says, else free")
    measured = p.add_argument_group("what it is measured on")
    measured.add_argument(
        "--calibration", type=flags.text, metavar="TEXT",
        help="embedded, wikitext2, c4 or a text file (default: embedded for embedded models, else the text of --data-dir, "
        "else wikitext2)",
    )  # fmt: skip
    flags.add_measurement_flags(measured)
    measured.add_argument(
        "--seed",
        type=flags.whole_number(0, 2**32 - 1),
        default=0,
        metavar="S",
        help="of calibration windows, slices and sampler (default: 0)",
    )
    how = p.add_argument_group("how it runs")
    how.add_argument(
        "--scheduler",
        choices=("none", "race", "asha"),
        default="none",
        help="race stops a trial once its items say, with 95%% confidence, that it cannot be the best; asha stops the weaker "
        "half at each level (default: %(default)s)",
    )
    how.add_argument(
        "--gpus-per-trial",
        default="auto",
        metavar="X",
        help="auto, 0, 1, or 1/k such as 0.25 (default: auto)",
    )
    how.add_argument("--cpus-per-trial", default="auto", metavar="X", help="auto or a number of CPUs (default: auto)")
    how.add_argument(
        "--trial-timeout",
        type=flags.seconds,
        metavar="SECONDS",
        help="end a trial that takes longer (default: never)",
    )
    how.add_argument(
        "--address",
        type=flags.text,
        metavar="HOST:PORT",
        help="a running Ray cluster, or auto (default: a local Ray of its own)",
    )
    how.add_argument(
        "--storage-path",
        type=flags.text,
        default="ray_results",
        metavar="DIR",
        help="where experiments are kept (default: %(default)s)",
    )
    how.add_argument(
        "--name",
        type=flags.text,
        metavar="NAME",
        help="of the experiment (default: from model, ratio, search space and shape)",
    )
    how.add_argument(
        "--save-best",
        action="store_true",
        help="at the end, save each model's best pruned model to best/ in the experiment",
    )
    how.add_argument("--dry-run", action="store_true", help="check everything, print the plan and stop")
    return p


def settings_from(args: argparse.Namespace) -> SearchSettings:
    from tune_prune.models import catalog
    from tune_prune.planning import search_space
    from tune_prune.tuning.ray_cluster.resources import parse_amount

    gpus_per_trial = parse_amount(args.gpus_per_trial, "--gpus-per-trial", allow_zero=True)
    cpus_per_trial = parse_amount(args.cpus_per_trial, "--cpus-per-trial", allow_zero=False)
    for name in args.model:
        catalog.resolve(name)  # what is misspelt is said at once: the plan imports torch, which takes seconds
    search_space.load(args.search_space)
    from tune_prune.planning.plan import SearchSettings

    return SearchSettings(
        models=tuple(dict.fromkeys(args.model)),
        search_space=args.search_space,
        search=args.search,
        num_trials=args.num_trials,
        pruning_ratio=args.pruning_ratio,
        shape=args.shape,
        align=args.align,
        revision=args.revision,
        calibration=args.calibration,
        data_dir=args.data_dir,
        tasks=args.tasks,
        limit=args.limit,
        seed=args.seed,
        dtype=args.dtype,
        scheduler=args.scheduler,
        gpus_per_trial=gpus_per_trial,
        cpus_per_trial=cpus_per_trial,
        trial_timeout_s=args.trial_timeout,
        address=args.address,
        storage_path=args.storage_path,
        name=args.name,
    )


def search(plan: Plan, command: list[str], save_best: bool = False) -> SearchResult:
    """Run a plan to its end, write every view of its results, print the final table and, with `save_best`, save each model's
    best pruned model. Raises UserError (also where another search runs on the experiment), KeyboardInterrupt (the ledger stays
    whole) or what stopped the preparation."""
    from tune_prune.core.store import FolderStore

    store = FolderStore(plan.experiment_dir)
    with store.lock():
        result = _search(plan, store, command)
        if save_best:
            _save_best(plan.experiment_dir)
    return result


def _search(plan: Plan, store: FolderStore, command: list[str]) -> SearchResult:
    from tune_prune.analysis.cost import cost_line, totals, write_cost
    from tune_prune.analysis.export import write_views
    from tune_prune.analysis.input.reading import study_of_search
    from tune_prune.analysis.statistics.findings import find
    from tune_prune.analysis.tables.final_table import final_table
    from tune_prune.core import artifact_cache
    from tune_prune.core.ledger import Ledger, PassLog, read_baselines
    from tune_prune.core.store import COST
    from tune_prune.planning import experiment
    from tune_prune.tuning.driver import TrialSpec, TuneOptions, run_search

    started = time.monotonic()
    settings, folder = plan.settings, plan.experiment_dir
    ledger, passes = Ledger(store), PassLog(store)
    before = totals(ledger.records(), read_baselines(store), passes.read())
    models = experiment.write(store, plan, command)  # those of earlier starts, too
    jobs = [TrialSpec(model.run, config, key) for model in plan.models for config, key in model.trials]
    options = TuneOptions(
        experiment_dir=folder,
        artifact_dir=folder.parent / artifact_cache.FOLDER,
        search="optuna" if plan.space.search == "optuna" else "grid",
        num_trials=plan.space.num_trials,
        seed=settings.seed,
        scheduler=settings.scheduler,
        address=settings.address,
        resources=plan.resources,
        trial_timeout_s=settings.trial_timeout_s,
        cost=plan.cost,
    )
    result = run_search(jobs, options)
    records = ledger.records()
    findings = find(study_of_search(folder, {"models": models}, result.baselines, records))
    write_views(store, records, findings)
    cost = write_cost(
        folder / COST,
        records,
        result.baselines,
        passes.read(),
        plan.cost.to_dict() if plan.cost is not None else None,
        before,
        time.monotonic() - started,
    )
    print()
    print(final_table(findings))
    print()
    print(cost_line(cost))
    return result


def _save_best(experiment_dir: Path) -> None:
    """The best configuration of every model as a checkpoint, in place of an earlier one. Raises UserError."""
    from tune_prune import prune
    from tune_prune.cli import prune_request
    from tune_prune.core.files import parse_json
    from tune_prune.core.store import BEST_CONFIG, SAVED_MODELS

    for label in parse_json(experiment_dir / BEST_CONFIG)["models"]:
        request = prune_request.from_config(str(experiment_dir), label)
        folder = experiment_dir / SAVED_MODELS / label
        print(f"{prune.describe(folder, prune.save(request, folder, overwrite=True))}\n", flush=True)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return flags.run(lambda: _main(argv))


def _main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    settings = settings_from(args)
    from tune_prune.cli.plan_text import describe, shown_path
    from tune_prune.planning.preflight import make_plan

    plan = make_plan(settings)
    print(describe(plan), flush=True)
    if args.dry_run:
        print("\ndry run: nothing was started")
        return
    print(flush=True)
    again = shlex.join(["python", "-m", "tune_prune.search", *argv])
    try:
        result = search(plan, ["python", "-m", "tune_prune.search", *argv], args.save_best)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"finished trials are kept; to go on, run the same command again:\n  {again}") from None
    folder = shown_path(plan.experiment_dir)
    failed = result.count("failed")
    print(f"results      {folder}/: global_best_config.json, all_methods_results.csv, ledger/, trials/")
    print(f"view curves  tensorboard --logdir {shlex.quote(f'{folder}/tensorboard')}")
    print(f"report       python -m tune_prune.analysis {shlex.quote(str(folder))}")
    if failed:
        print(
            f"failed       {failed} trials (reasons in all_methods_results.csv); the same command tries them again:\n"
            f"             {again}"
        )


if __name__ == "__main__":
    sys.exit(main())
