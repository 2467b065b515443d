"""Search the best way to prune a model: `python -m tune_prune.search --model mistral`.

Runs every configuration of a search space (or those that Optuna picks) as a trial that prunes the model for real and
measures what is left, by Ray Tune or, with --inline, in this process, and writes the best one with its evidence to
ray_results/<experiment>/. The same command again runs only what is missing. In Python, `tune_prune.search("mistral")` does
the same (tune_prune/api.py).
"""

from __future__ import annotations

import argparse
import inspect
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tune_prune import api
from tune_prune.cli import flags
from tune_prune.cli.search_flags import COMMAND, parser, settings_from
from tune_prune.core.errors import UserError
from tune_prune.core.terminal import progress
from tune_prune.tuning.ray_cluster.local import LocalRay, started_early

if TYPE_CHECKING:
    from tune_prune.results import Results

_BESIDE_THE_LINE_S = 0.5  # a stage that is shorter has no bar


class _Callable(ModuleType):
    """This module, which can be called: it has the name of a function of the API, and `tune_prune.search(...)` must not depend on
    whether somebody has imported the module."""

    __signature__ = inspect.signature(api.search)

    def __call__(self, *arguments: Any, **keywords: Any) -> Results:
        return api.search(*arguments, **keywords)


sys.modules[__name__].__class__ = _Callable


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return flags.run(lambda: _main(argv))


def _main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    with started_early(not (args.inline or args.address or args.dry_run)) as local_ray:
        _search(args, argv, local_ray)


def _search(args: argparse.Namespace, argv: list[str], local_ray: LocalRay | None) -> None:
    settings = settings_from(args)
    from tune_prune.analysis.cost import cost_line
    from tune_prune.cli.plan_text import describe, shown_path
    from tune_prune.planning.preflight import make_plan
    from tune_prune.results import run

    with progress.shown():
        plan = make_plan(settings)
    if args.save_best and not isinstance(plan.experiment_dir, Path):
        raise UserError(
            f"--save-best writes a checkpoint into the experiment's folder, and {plan.experiment_dir} is none; leave it out, "
            "and keep the model afterwards with the line `keep` that the search ends with"
        )
    print(describe(plan), flush=True)
    if args.dry_run:
        print("\ndry run: nothing was started")
        return
    print(flush=True)
    command = [*COMMAND, *argv]
    again = shlex.join(command)

    def at_end(results: Results) -> None:
        print(f"\n{results}\n\n{cost_line(results.cost)}")
        if args.save_best:
            with progress.shown():
                _save_best(results)

    try:
        with progress.shown(
            _BESIDE_THE_LINE_S
        ):  # of trials in this process, in the place of the line that says how far all are
            results = run(plan, command, at_end, local_ray)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"finished trials are kept; to go on, run the same command again:\n  {again}") from None
    folder = shown_path(plan.experiment_dir)
    planned = {key for model in plan.models for _, key in model.trials}
    failed = sum(results.trials["key"].isin(planned) & (results.trials["status"] == "failed"))
    print(f"results      {folder}/: global_best_config.json, all_methods_results.csv, ledger/, trials/")
    for name, next_command in next_commands(str(folder), [] if args.save_best else list(results.best.index)):
        print(f"{name:<12} {shlex.join(next_command)}")
    if failed:
        print(
            f"failed       {failed} of {len(planned)} trials (see all_methods_results.csv); the same command tries them again:\n"
            f"             {again}"
        )


def next_commands(folder: str, labels: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What can be done with a finished search, by name; `labels`: the models whose best configuration can be saved."""
    python = ["python", "-m"]
    commands = [
        ("view curves", ["tensorboard", "--logdir", f"{folder}/tensorboard"]),
        ("report", [*python, "tune_prune.analysis", folder]),
    ]
    for label in labels:
        which = ["--model", label] if len(labels) > 1 else []
        commands.append(
            ("keep", [*python, "tune_prune.prune", "--config", folder, *which, "--output", f"{label}-pruned"])
        )
    return commands


def _save_best(results: Results) -> None:
    """The best configuration of every model as a checkpoint, in place of an earlier one. Raises UserError."""
    from tune_prune import prune
    from tune_prune.cli import prune_request
    from tune_prune.core.store import SAVED_MODELS
    from tune_prune.opened import Model

    assert isinstance(results.folder, Path)  # else the search has not started
    for label in results.best.index:
        request = prune_request.from_config(str(results.folder), label)
        folder = results.folder / SAVED_MODELS / label
        saved = prune.save(Model(request.run, prune.device_of(request)), request, folder, overwrite=True)
        print(f"{prune.describe(folder, saved)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
