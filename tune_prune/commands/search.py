"""Search the best way to prune a model: `tune-prune search --model mistral`.

Runs every configuration of a search space (or those that Optuna picks) as a trial that prunes the model for real and
measures what is left, by Ray Tune or, with --inline, in this process, and writes the best one with its evidence to
ray_results/<experiment>/. The same command again runs only what is missing. In Python, `tune_prune.search("mistral")` does
the same (tune_prune/commands/api.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tune_prune import __version__
from tune_prune.commands import flags
from tune_prune.core import ending, terminal
from tune_prune.core.errors import UserError
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.records import failure_counts
from tune_prune.core.terminal import say
from tune_prune.tuning.local_ray import started_early

if TYPE_CHECKING:
    from tune_prune.commands.results import Results
    from tune_prune.tuning.observers.json_log import JsonLog
    from tune_prune.tuning.plan import SearchSettings

_BESIDE_THE_LINE_S = 0.5  # a stage that is shorter has no bar


def main(argv: list[str] | None = None) -> int:
    return flags.run("search", argv, _main)


def _main(args: argparse.Namespace) -> None:
    if args.status is not None:
        from tune_prune.commands import status

        say(status.shown(args.status, args.storage_path, args.json))
        return
    with started_early(not (args.inline or args.address or args.dry_run)):
        _search(args)


def _search(args: argparse.Namespace) -> None:
    with terminal.shown(), terminal.waiting("starting: loading torch and transformers ..."):
        asked = flags.settings_from(vars(args))
    with _log(args.log_json) as log:
        log.event(
            "start", command=[*flags.SEARCH, *args.argv], host=platform.node(), pid=os.getpid(), version=__version__
        )
        _run(args, asked, log)


@contextlib.contextmanager
def _log(wanted: bool) -> Iterator[JsonLog]:
    """Write events to standard output, and everything else to standard error; or no events. What ends the search is one, too."""
    from tune_prune.tuning.observers.json_log import JsonLog

    if not wanted:
        yield JsonLog(None)
        return
    log = JsonLog(sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield log
        except BaseException as error:
            reason = ending.signal_in_words() if isinstance(error, KeyboardInterrupt) else str(error)
            log.event("failure", error=type(error).__name__, reason=reason)
            raise


def _run(args: argparse.Namespace, asked: SearchSettings, log: JsonLog) -> None:
    from tune_prune.analysis.cost import cost_line
    from tune_prune.analysis.render.messages import one_line
    from tune_prune.analysis.verdict import winners
    from tune_prune.commands import plan_page
    from tune_prune.commands.plan_page import shown_path
    from tune_prune.commands.results import run
    from tune_prune.tuning.observers.tracking import trackers
    from tune_prune.tuning.preflight import make_plan

    trackers(args.track or (), "")  # their packages are there
    with terminal.shown(), terminal.waiting("starting: reading model and data, timing this machine ..."):
        plan = make_plan(asked, args.gpu)
    if args.save_best and not isinstance(plan.experiment_dir, Path):
        raise UserError(
            f"--save-best writes a checkpoint into the experiment's folder, and {plan.experiment_dir} is none; leave it out, and "
            "keep the model afterwards with the line `keep` that the search ends with"
        )
    log.event(
        "plan",
        folder=str(plan.experiment_dir),
        trials={model.run.label: len(model.trials) for model in plan.models},
        recorded=plan.recorded,
        slots=plan.slots,
        predicted_seconds=plan.cost and plan.cost.wall_range,
        predicted_gpu_hours=plan.cost and plan.cost.gpu_hours,
    )
    say(plan_page.details(plan) if args.verbose else plan_page.summary(plan))
    if args.dry_run:
        say("\ndry run: nothing was started")
        return
    say()
    command, started = [*flags.SEARCH, *args.argv], time.monotonic()
    again = shlex.join(command)
    kept = ending.advised(f"finished trials are kept; to go on, run the same command again:\n  {again}")

    def at_end(results: Results) -> None:
        say(f"\n{results}\n")
        if args.save_best:
            with terminal.shown():
                _save_best(results)

    # Bars of trials in this process stand in the place of the line that says how far all are.
    with kept, terminal.shown(_BESIDE_THE_LINE_S):
        results = run(plan, command, at_end, [log, *trackers(args.track or (), plan.experiment_dir.name)])
    folder = shown_path(plan.experiment_dir)
    trials = results.trials
    # Those that were run: an adaptive search, --draws and --recover leave some out.
    planned = {spec.key for spec in plan.trials} & set(trials["key"])
    failed = trials[trials["key"].isin(planned) & (trials["status"] == "failed")]
    statuses = trials["status"].value_counts().to_dict()
    best = [
        {name: None if name in HYPERPARAMETERS and value != value else value for name, value in row.items()}
        for row in results.best.reset_index().to_dict("records")  # NaN, which no setting can be: it does not apply
    ]
    log.event("end", trials=statuses, best=best, seconds=time.monotonic() - started, folder=str(plan.experiment_dir))
    to_keep = {} if args.save_best else winners(results.findings)
    for name, next_command in next_commands(str(folder), to_keep, results.findings.rule):
        if name == "report" and not results.findings.models:
            continue  # an analysis needs a complete trial
        say(f"{name:<12} {shlex.join(next_command)}")
    say(f"results      {folder}/: global_best_config.json, all_methods_results.csv, ledger/, trials/")
    if results.cost:  # else a warning has said why not
        say(cost_line(results.cost))
    if len(failed):
        classes = failure_counts(failed["failure"])
        first = failed.iloc[0]
        say(f"failed       {len(failed)} of {len(planned)} trials: {classes}; reasons are in all_methods_results.csv")
        say(f"             e.g. {first['model']} {first['name']}: {one_line(first['reason'])}")
        say(f"try again    {again}")


def next_commands(folder: str, kept: Mapping[str, str], rule: str = "accuracy") -> list[tuple[str, list[str]]]:
    """Return the commands for a finished search, by name; `kept`: by model the label whose best configuration is saved; `rule`: by
    which it was chosen."""
    from tune_prune.analysis.verdict import folder_name

    commands = []
    for model, label in kept.items():
        which = ["--model", label] if len(kept) > 1 else []
        commands.append(("keep", ["tune-prune", "prune", "--config", folder, *which, "--output", folder_name(model)]))
    by = [] if rule == "accuracy" else ["--rule", rule]
    commands.append(("report", ["tune-prune", "analysis", folder, *by]))
    return [*commands, ("curves", ["tensorboard", "--logdir", f"{folder}/tensorboard"])]


def _save_best(results: Results) -> None:
    """Save the best configuration of every model as a checkpoint, in place of an earlier one. Raises UserError."""
    from tune_prune.analysis.verdict import winners
    from tune_prune.commands import prune, prune_request
    from tune_prune.commands.opened import Model
    from tune_prune.commands.plan_page import shown_path
    from tune_prune.core.store import SAVED_MODELS

    assert isinstance(results.folder, Path)  # else the search has not started
    for model, label in winners(results.findings).items():
        request = prune_request.from_config(str(results.folder), label)
        folder = results.folder / SAVED_MODELS / model
        dense = Model(request.run, prune.device_of(request))
        saved = prune.save(dense, request, folder, overwrite=True)
        say(f"{prune.describe(folder, saved, dense, prune.again(shown_path(results.folder), label))}\n")
