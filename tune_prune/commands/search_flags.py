"""The flags of a search, and what they ask for."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tune_prune.commands import flags
from tune_prune.core.errors import did_you_mean
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.measures import MEASURES
from tune_prune.core.parser import Parser

if TYPE_CHECKING:
    from tune_prune.tuning.gpus import Card
    from tune_prune.tuning.plan import SearchSettings

TRACKERS = ("mlflow", "wandb")  # tuning.observers.tracking.TRACKERS, without its imports
COMMAND = ("tune-prune", "search")


# The flags that --help shows, by wish; --help-all has all of them.
COMMON = {
    "what to prune": ("--model", "--search-space"),
    "how much, and for where (this cannot be changed after a search)": ("--pruning-ratio", "--shape"),
    "faster or more thorough": ("--limit", "--inline", "--gpus-per-trial", "--calibration", "--recover", "--draws"),
    "before you start, and while it runs": ("--data-dir", "--dry-run", "--gpu", "--status"),
}


def parser() -> Parser:
    p = Parser(
        prog="tune-prune search",
        usage="--model NAME",
        description="Try many ways to prune a model, test each, and report the best.\n"
        "Stop it at any time: the same command goes on where it stopped.",
        examples={
            "--model tiny-llama --search-space smoke": "a first try, in a minute on a CPU",
            "--model mistral --dry-run": "what it will do, and what that costs",
            "--model DIR --data-dir DATA --gpus-per-trial 0.5": "no hub, two trials share a GPU",
        },
        common=COMMON,
    )
    what = p.add_argument_group("what is searched")
    what.add_argument(
        "--model", type=flags.text, action="append", metavar="NAME",
        help=f"{flags.MODEL_HELP}; again for more",
    )  # fmt: skip
    what.add_argument("--revision", type=flags.text, metavar="REV", help=flags.REVISION_HELP)
    what.add_argument(
        "--search-space", type=flags.text, default="paper_grid", metavar="SPACE",
        help="""which ways to try (default: %(default)s)
        recommended  12, the best in our tests: start here with a real model
        paper_grid   45, those of a published search (docs/methods.md)
        smoke        6, quick: does everything work?
        FILE.yaml    your own (docs/search_spaces.md)

        minimal      3, with little sample text
        control      1, removes at random: what every method must beat
        adaptive     297, of which Optuna tries 20
        extended     450, of which Optuna tries 60""",
    )  # fmt: skip
    what.add_argument(
        "--search", choices=("grid", "optuna"), metavar="HOW",
        help="""how configurations are chosen from the search space (default: as the space says)
        grid    try every one
        optuna  let Optuna's TPE sampler choose --num-trials of them""",
    )  # fmt: skip
    what.add_argument(
        "--num-trials", type=flags.whole_number(1, 10**9), metavar="N",
        help="with optuna: trials of each model, pruning ratio and training (default: as the space says, else 20)",
    )  # fmt: skip
    what.add_argument(
        "--objective", choices=tuple(MEASURES), default="accuracy", metavar="SCORE",
        help="""what optuna looks for and chooses the best by; after a grid: analysis --rule (default: %(default)s)
        accuracy      share of questions answered right
        perplexity    how well it predicts text
        gold_logprob  how likely it finds the right answers; tells models apart where accuracy is guessing
        kl            distance from the original model's predictions, mean of text and questions""",
    )  # fmt: skip
    flags.add_hyperparameter_flags(what, ["pruning_ratio"], "as the space says, else 0.2")
    flags.add_hyperparameter_flags(what, ["shape"], "as the space says, else free, from 1B aligned")
    what.add_argument(
        "--seeds", type=_seeds, metavar="A,B",
        help="run every configuration once with each of these values of --seed, e.g. 0,1,2, and report the mean: how much does "
        "luck matter? (default: as the space says, else --seed alone)",
    )  # fmt: skip
    what.add_argument(
        "--draws", type=flags.whole_number(2, 100), metavar="N",
        help="repeat what could still be the best, up to N runs with other sample text\n\n(default: one run; less work than "
        "--seeds)",
    )  # fmt: skip
    what.add_argument(
        "--draws-by", choices=("accuracy", "gold_logprob", "kl"), default="accuracy", metavar="SCORE",
        help="""the score by which --draws decides what could still be the best (default: %(default)s)
        accuracy      share of questions answered right
        gold_logprob  how likely the right answers are
        kl            distance from the original model's predictions, mean of text and questions""",
    )  # fmt: skip
    what.add_argument(
        "--recover", type=flags.whole_number(1, 1000), metavar="N",
        help="at the end, train the N best briefly to imitate the original; try 2\n\nUp to N of each model and pruning ratio that "
        "could still be the best: docs/methods.md, Recovery (default: as the space says)",
    )  # fmt: skip
    measured = p.add_argument_group("what it is measured on")
    measured.add_argument("--calibration", type=flags.text, metavar="TEXT", help=flags.CALIBRATION_HELP)
    flags.add_measurement_flags(measured)
    measured.add_argument(
        "--seed", type=flags.whole_number(0, 2**32 - 1), default=0, metavar="S",
        help="number that decides which pieces of sample text are taken (unless --seeds says more), the order of questions and "
        "Optuna's choices: the same number, the same results (default: 0)",
    )  # fmt: skip
    how = p.add_argument_group("how it runs")
    how.add_argument(
        "--scheduler", choices=("none", "race", "race-gold", "asha"), default="none", metavar="RULE",
        help="""stop hopeless trials early; not with several --seeds (default: %(default)s)
        none       test all of them in full
        race       stop one that is, with 95%% confidence, not the most accurate
        race-gold  the same by how likely right answers are: takes fewer questions, but may stop the most accurate
        asha       stop the weaker half after a quarter and after half of the questions""",
    )  # fmt: skip
    how.add_argument(
        "--kl-filter", action="store_true",
        help="skip the slow tests of a pruned model whose KL, on text and on questions, is over 1.5 times the median of at least 5 "
        "trials before it (docs/methods.md); not with several --seeds",
    )  # fmt: skip
    flags.add_memory_flag(how, "a trial")
    how.add_argument(
        "--gpus-per-trial", default="auto", metavar="X",
        help="0.25: four trials share a GPU; 2: one is spread over two (default: auto)\n\nauto goes by the memory that a trial "
        "needs, 0 uses none.",
    )  # fmt: skip
    how.add_argument(
        "--cpus-per-trial", default="auto", metavar="X",
        help="CPUs and threads of a trial (default: auto, 1, or up to 4 where it has a GPU)",
    )  # fmt: skip
    how.add_argument(
        "--trial-timeout", type=flags.seconds, metavar="SECONDS",
        help="end a trial that takes longer, and record it as failed (hung); what prepares the trials is tried once more (default: "
        "no limit)",
    )  # fmt: skip
    how.add_argument("--inline", action="store_true", help="one trial after the other, without Ray; the same results")
    how.add_argument(
        "--address", type=flags.text, metavar="HOST:PORT",
        help="a Ray cluster that runs, or auto for one started on this machine (default: start an own Ray)",
    )  # fmt: skip
    how.add_argument(
        "--storage-path", type=flags.text, default="ray_results", metavar="DIR",
        help="folder of all experiments, or s3://bucket/prefix or gs://bucket/prefix (default: %(default)s)",
    )  # fmt: skip
    how.add_argument(
        "--name", type=flags.text, metavar="NAME",
        help="name of the experiment, a folder in --storage-path (default: of model, ratio, search space, shape, limit and tokens)",
    )  # fmt: skip
    how.add_argument(
        "--save-best", action="store_true",
        help="at the end, save the best pruned model of each model to best/ in the experiment",
    )  # fmt: skip
    how.add_argument(
        "--dry-run", action="store_true", help="check everything, say whether it fits and how long it takes, and stop"
    )
    how.add_argument(
        "--verbose", action="store_true", help="print the whole plan: time, tokens and memory of each stage"
    )
    how.add_argument(
        "--gpu", type=_card, metavar="KIND",
        help="with --dry-run, for a GPU that you need not own: 4090, 2x4090, h100, 24GB\n\n(docs/costs.md has the kinds; default: "
        "what is here)",
    )  # fmt: skip
    seen = p.add_argument_group("how it is followed")
    seen.add_argument(
        "--status", type=flags.text, metavar="NAME",
        help="how far the search of that name is; reads only, at any time\n\nNAME may be a path; from any machine that sees the "
        "storage: trials done, running and failed, the best so far, time left, GPU-hours.",
    )  # fmt: skip
    seen.add_argument("--json", action="store_true", help="with --status: one JSON object instead of text")
    seen.add_argument(
        "--log-json", action="store_true",
        help="write one JSON object a line to standard output (docs/watching.md): start, plan, stages, ends of trials; text goes "
        "to standard error",
    )  # fmt: skip
    seen.add_argument(
        "--track", type=_trackers, action="extend", metavar="NAME",
        help="write every trial as a run of mlflow or wandb, too, or of both (mlflow,wandb); each where its own environment "
        "variables say, else below this folder and offline (default: neither)",
    )  # fmt: skip
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
    from tune_prune.tuning.gpus import parse_card

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
    from tune_prune.commands.names import check_names
    from tune_prune.tuning import space
    from tune_prune.tuning.resources import parse_amount

    gpus_per_trial = parse_amount(args.gpus_per_trial, "--gpus-per-trial", allow_zero=True)
    cpus_per_trial = parse_amount(args.cpus_per_trial, "--cpus-per-trial", allow_zero=False)
    check_names(args.model, args.data_dir, args.tasks, args.calibration)
    space.load(args.search_space)
    from tune_prune.tuning.plan import SearchSettings

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
