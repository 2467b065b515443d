"""The flags of a search, and what they ask for."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tune_prune.cli import flags
from tune_prune.core.errors import did_you_mean
from tune_prune.core.terminal.parser import Parser
from tune_prune.core.values.hyperparameters import HYPERPARAMETERS
from tune_prune.core.values.measures import MEASURES

if TYPE_CHECKING:
    from tune_prune.cost_model.gpus import Card
    from tune_prune.planning.plan import SearchSettings

TRACKERS = ("mlflow", "wandb")  # tuning.observers.tracking.TRACKERS, without its imports
COMMAND = ("python", "-m", "tune_prune.search")


def parser() -> Parser:
    p = Parser(
        prog="python -m tune_prune.search",
        description="Find the best way to prune a language model: prune and measure it by every configuration of a space.\n"
        "A search may be stopped at any time: the same command goes on and runs only what is missing.",
        examples={
            "--model tiny-llama --search-space smoke": "a first try, in a minute on a CPU",
            "--model mistral --dry-run": "the plan, and what it will cost",
            "--model DIR --data-dir DATA --gpus-per-trial 0.5": "no hub, two trials share a GPU",
        },
    )
    what = p.add_argument_group("what is searched")
    what.add_argument(
        "--model", type=flags.text, action="append", metavar="NAME",
        help=f"{flags.MODEL_HELP}; give it again for more models",
    )  # fmt: skip
    what.add_argument("--revision", type=flags.text, metavar="REV", help=flags.REVISION_HELP)
    what.add_argument(
        "--search-space", type=flags.text, default="paper_grid", metavar="NAME_OR_YAML",
        help="paper_grid (45 configurations), recommended (12), extended (450, of which Optuna tries 60), adaptive (297, for "
        "--search optuna), control (1), minimal (3), smoke (6), or a YAML file (docs/search_spaces.md; default: %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--search",
        choices=("grid", "optuna"),
        help="grid tries every configuration, optuna lets its TPE sampler choose --num-trials of them (default: as the space says)",
    )
    what.add_argument(
        "--num-trials",
        type=flags.whole_number(1, 10**9),
        metavar="N",
        help="trials of optuna, per model, pruning ratio and recovery (default: as the space says, else 20)",
    )
    what.add_argument(
        "--objective",
        choices=tuple(MEASURES),
        default="accuracy",
        help="what optuna looks for, and what the best is chosen by at the end: accuracy; perplexity; the log-probability of right "
        "choices; KL to the dense model, mean of both texts (default: %(default)s)",
    )
    flags.add_hyperparameter_flags(what, ["pruning_ratio"], "as the space says, else 0.2")
    flags.add_hyperparameter_flags(what, ["shape"], "as the space says, else free, from 1B parameters on aligned")
    what.add_argument(
        "--seeds",
        type=_seeds,
        metavar="A,B",
        help="measure every configuration on these draws of calibration samples, e.g. 0,1,2 (default: as the space says, else the "
        "one of --seed)",
    )
    what.add_argument(
        "--draws",
        type=flags.whole_number(2, 100),
        metavar="N",
        help="one draw of calibration samples for every configuration, that of --seed, and up to N for those that may still be the "
        "best: seeds --seed + 1, ... (default: no more than --seeds says)",
    )
    what.add_argument(
        "--draws-by",
        choices=("accuracy", "gold_logprob", "kl"),
        default="accuracy",
        help="by what those of --draws may still be the best: accuracy; the log-probability of right choices; KL to the dense "
        "model, mean of both texts (default: %(default)s)",
    )
    what.add_argument(
        "--recover",
        type=flags.whole_number(1, 1000),
        metavar="N",
        help="once all are measured, train up to N configurations of each model and pruning ratio that may still be the best "
        "towards the dense model (docs/methods.md, Recovery; default: as the space says)",
    )
    measured = p.add_argument_group("what it is measured on")
    measured.add_argument(
        "--calibration", type=flags.text, metavar="TEXT",
        help=flags.CALIBRATION_HELP,
    )  # fmt: skip
    flags.add_measurement_flags(measured)
    measured.add_argument(
        "--seed",
        type=flags.whole_number(0, 2**32 - 1),
        default=0,
        metavar="S",
        help="seed of the calibration samples (unless --seeds names others), the order of test items and Optuna's sampler "
        "(default: 0)",
    )
    how = p.add_argument_group("how it runs")
    how.add_argument(
        "--scheduler",
        choices=("none", "race", "race-gold", "asha"),
        default="none",
        help="which trials are stopped early: race stops one as soon as it is, with 95%% confidence, not the most accurate; "
        "race-gold the same by log-probabilities of right choices, on fewer items (the most accurate may be among the stopped); "
        "asha stops the weaker half at a quarter and at half of the items; not with several --seeds (default: %(default)s)",
    )
    how.add_argument(
        "--kl-filter",
        action="store_true",
        help="with or without a scheduler: stop a trial before perplexity and items where its KL to the dense model, on text and "
        "on questions, is above 1.5 times the median of at least 5 trials before it (docs/methods.md; not with several --seeds)",
    )
    flags.add_memory_flag(how, "a trial")
    how.add_argument(
        "--gpus-per-trial",
        default="auto",
        metavar="X",
        help="GPUs of one trial: 0, 1, 1/k for k trials on each GPU, e.g. 0.25, or several, over which its layers are spread "
        "(default: auto, by the memory it needs)",
    )
    how.add_argument(
        "--cpus-per-trial",
        default="auto",
        metavar="X",
        help="CPUs of one trial, and its threads (default: auto, 1, or up to 4 where it has a GPU)",
    )
    how.add_argument(
        "--trial-timeout",
        type=flags.seconds,
        metavar="SECONDS",
        help="end a trial that takes longer, and record it as failed (hung); likewise a job that prepares what trials share, "
        "which is tried once more (default: no limit)",
    )
    how.add_argument(
        "--inline",
        action="store_true",
        help="run the trials one after the other in this process, without Ray: the same results, and a search begun in one way "
        "goes on in the other",
    )
    how.add_argument(
        "--address",
        type=flags.text,
        metavar="HOST:PORT",
        help="a running Ray cluster, or auto for the one that was started on this machine (default: a Ray of its own)",
    )
    how.add_argument(
        "--storage-path",
        type=flags.text,
        default="ray_results",
        metavar="DIR",
        help="folder of all experiments and what they share, or s3://bucket/prefix or gs://bucket/prefix (default: %(default)s)",
    )
    how.add_argument(
        "--name",
        type=flags.text,
        metavar="NAME",
        help="name of the experiment, a folder in --storage-path (default: of model, ratio, search space, shape, limit and tokens)",
    )
    how.add_argument(
        "--save-best",
        action="store_true",
        help="at the end, save the best pruned model of each model to best/ in the experiment",
    )
    how.add_argument("--dry-run", action="store_true", help="check everything, print the plan and stop")
    how.add_argument(
        "--verbose", action="store_true", help="print the whole plan: what each stage takes, of time, tokens and memory"
    )
    how.add_argument(
        "--gpu",
        type=_card,
        metavar="KIND",
        help="with --dry-run: plan for that GPU in the place of what this machine has, e.g. 4090, h100, 2x4090 for two, or 24GB of "
        "any (docs/costs.md has the kinds; default: what is here)",
    )
    seen = p.add_argument_group("how it is followed")
    seen.add_argument(
        "--status",
        type=flags.text,
        metavar="NAME",
        help="how far the experiment of that name in --storage-path, or of that path, is: trials done, running and failed, the "
        "best so far, time left, GPU-hours; reads only, from any machine that sees the storage, at any time",
    )
    seen.add_argument("--json", action="store_true", help="with --status: one JSON object instead of text")
    seen.add_argument(
        "--log-json",
        action="store_true",
        help="write one JSON object per line to standard output (docs/watching.md): start, plan, stages, ends of trials; text goes "
        "to standard error",
    )
    seen.add_argument(
        "--track",
        type=_trackers,
        action="extend",
        metavar="NAME",
        help="write every trial as a run of mlflow or wandb, too, or of both (mlflow,wandb); each where its own environment "
        "variables say, else below this folder and offline (default: neither)",
    )
    return p


def _seeds(text: str) -> tuple[int, ...]:
    kind = HYPERPARAMETERS["seed"].kind
    try:
        seeds = tuple(kind.read(part.strip()) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seeds, e.g. 0,1,2: each must be {kind}") from None
    if twice := [seed for seed, count in Counter(seeds).items() if count > 1]:
        raise argparse.ArgumentTypeError(f"{text!r} has the seed {twice[0]} twice; keep one")
    return seeds


def _card(text: str) -> Card:
    from tune_prune.cost_model.gpus import parse_card

    try:
        return parse_card(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _trackers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise argparse.ArgumentTypeError(f"unknown value {name!r}; {did_you_mean(name, TRACKERS)}")
    if not names:
        raise argparse.ArgumentTypeError(
            f"no tracker is named; use {' or '.join(TRACKERS)}, or both with a comma between them"
        )
    return names


def settings_from(args: argparse.Namespace) -> SearchSettings:
    if not args.model:
        parser().error("the following arguments are required: --model")
    from tune_prune.cli.names import check_names
    from tune_prune.planning import search_space
    from tune_prune.tuning.ray_cluster.resources import parse_amount

    gpus_per_trial = parse_amount(args.gpus_per_trial, "--gpus-per-trial", allow_zero=True)
    cpus_per_trial = parse_amount(args.cpus_per_trial, "--cpus-per-trial", allow_zero=False)
    check_names(args.model, args.data_dir, args.tasks, args.calibration)
    search_space.load(args.search_space)
    from tune_prune.planning.plan import SearchSettings

    return SearchSettings(
        models=tuple(dict.fromkeys(args.model)),
        search_space=args.search_space,
        search=args.search,
        num_trials=args.num_trials,
        objective=args.objective,
        pruning_ratio=args.pruning_ratio,
        shape=args.shape,
        align=args.align,
        revision=args.revision,
        calibration=args.calibration,
        data_dir=args.data_dir,
        trust_tasks=args.trust_tasks,
        tasks=args.tasks,
        limit=args.limit,
        perplexity_window=args.perplexity_window,
        perplexity_tokens=args.perplexity_tokens,
        seed=args.seed,
        seeds=args.seeds,
        draws=args.draws,
        draws_by=args.draws_by,
        recover=args.recover,
        dtype=args.dtype,
        scheduler=args.scheduler,
        kl_filter=args.kl_filter,
        memory=args.memory,
        gpus_per_trial=gpus_per_trial,
        cpus_per_trial=cpus_per_trial,
        trial_timeout_s=args.trial_timeout,
        inline=args.inline,
        address=args.address,
        storage_path=args.storage_path,
        name=args.name,
    )


def arguments(keywords: Mapping[str, Any]) -> list[str]:
    """The command line with these flags, by name: those that are not at their defaults. Text is checked when it is parsed."""
    argv, usual = [], parser()
    for name, value in keywords.items():
        if hasattr(value, "tolist"):  # of numpy
            value = value.tolist()
        if name == "memory" and type(value) is int:  # bytes
            value = f"{value / 2**20}MiB"
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        several = name == "model" and listed
        if name in ("tasks", "track", "seeds") and listed:
            value = ",".join(map(str, value))
        if value != usual.get_default(name):
            flag = f"--{name.replace('_', '-')}"
            argv += [flag] if value is True else [f"{flag}={one}" for one in (value if several else [value])]
    return argv
