"""The table of options: each option of each command once, with its values, its default and its help.

The command lines (`CommandLine`), the keywords of the Python API (`checked`), their docstrings (`documented`) and "did you mean"
come from it. A flag is an option's name with dashes: `num_trials` is `--num-trials`. A value that a Python caller gives is checked
by the same bounds as one on a command line, and never becomes text. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tune_prune.checkpoint.quantisation import GGUF_KINDS, KINDS
from tune_prune.commands.option_kinds import (
    Amount,
    Folder,
    GpuKind,
    LabelledAccuracy,
    LabelledPlace,
    Place,
    Repository,
    Several,
    Size,
    Switch,
    TaskName,
    Text,
    Wrong,
)
from tune_prune.core.config import PERPLEXITY_TOKENS, ZERO_SHOT_TASKS
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.kinds import Choice, Kind, Real, Whole, plain
from tune_prune.core.measures import MEASURES
from tune_prune.core.parser import Once, Parser, help_lines
from tune_prune.pruning.methods import method_names

TRACKERS = ("mlflow", "wandb")  # tuning.observers.tracking.TRACKERS, without its imports
LANGUAGES = ("en", "zh")
# By the names of analysis.statistics.rules.RULES, whose module is too heavy for --help.
RULES = {
    "accuracy": "the most questions answered right",
    "perplexity": "the best at predicting text",
    "gold_logprob": "how likely right answers are; where accuracy guesses",
    "kl": "predictions closest to the original model's",
    "one-standard-error": "the least sample text, within one standard error",
    "pareto": "the best trade-offs; of them the most accurate",
    "smallest": "the fewest parameters, at most --within less accurate",
    "retained-per-second": "accuracy for time, after tune-prune speed",
}
RUN_DEFAULTS = {
    "shape": "free, from 1B parameters on aligned",
    "seed": "0",
    "calibration": "embedded for toy models, else the text of --data-dir, else wikitext2",
}
_DTYPE_DEFAULT = "bfloat16 where weights are stored in 16 bits or fewer and the device is faster in it, else float32"


@dataclass(frozen=True)
class Option:
    """One row of the table. `help`: --help prints its first paragraph, --help-all and docstrings all of it."""

    name: str  # of the keyword
    kind: Kind
    metavar: str
    help: str
    default: Any = None
    required: bool = False
    once: bool = False  # is refused when it is given again, as another command takes several
    again: bool = False  # may be given again for more; its kind is Several
    keyword: bool = True  # is one in Python, too
    positional: bool = False  # is no flag, and known by its metavar

    @property
    def many(self) -> bool:
        """Say whether a command line gives any number of values."""
        return self.again or (self.positional and isinstance(self.kind, Several))

    @property
    def usual(self) -> Any:
        """Return the value where the option is not given."""
        return self.kind.read(self.default) if isinstance(self.default, str) else self.default

    @property
    def flag(self) -> str:
        return self.metavar if self.positional else f"--{self.name.replace('_', '-')}"

    def read(self, text: str) -> Any:
        """Return the value of a command line's text. Raises UserError, whose sentence begins with the flag."""
        try:
            return self.kind.read(text)
        except UserError:
            raise
        except Wrong as wrong:
            raise UserError(f"{self.flag}: {wrong}") from None
        except ValueError:
            clause = self.kind.unknown(text) if isinstance(self.kind, Choice) else f"{text!r} is not {self.kind}"
            raise UserError(f"{self.flag}: {clause}") from None

    def of(self, value: Any) -> Any:
        """Return the value for one that a Python caller gives, which may be numpy's. Raises UserError, whose sentence begins
        with the name."""
        if value is None and self.default is None and not self.required:
            return None
        try:
            return self.kind.of(plain(value))
        except UserError:
            raise
        except Wrong as wrong:
            raise UserError(f"{self.name}: {wrong}") from None
        except ValueError:
            if isinstance(self.kind, Choice):
                raise UserError(f"{self.name} is {value!r}; {did_you_mean(str(value), self.kind.names)}") from None
            raise UserError(f"{self.name} is {value!r}; it must be {self.kind}") from None


@dataclass(frozen=True)
class Command:
    """One command: all its options, and what its help says besides them.

    usage     the arguments that must be given
    examples  arguments, and what they do, the best first
    common    by wish the flags that --help shows; --help-all has all of them
    groups    all options, by the title of their paragraph
    """

    usage: str
    description: str
    examples: Mapping[str, str]
    common: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[Option, ...]]


def _hyperparameter(name: str, default: str = "") -> Option:
    """Return the option of a row of HYPERPARAMETERS; `default`: in words, where it is not the row's."""
    row = HYPERPARAMETERS[name]
    usual = "" if row.required else f" (default: {default or RUN_DEFAULTS.get(name, row.default)})"
    choices = f": {', '.join(method_names())}" if name == "method" else ""
    first, *values = f"{row.help}{choices}".split("\n")
    metavar = name.rpartition("_")[2].upper()
    help = "\n".join([f"{first}{usual}", *values])
    return Option(name, row.kind, metavar if len(metavar) < 8 else "VALUE", help)


def switch(name: str, help: str, keyword: bool = True) -> Option:
    """Return the option of a flag without a value, which is off unless it is given."""
    return Option(name, Switch(), "", help, False, keyword=keyword)


# fmt: off
# Options that several commands have; `replace` changes a help or a default.
MODEL = Option("model", Text(), "NAME", "alias (mistral, tiny-llama), hub id, folder or GGUF file", once=True)
REVISION = Option("revision", Text(), "REV", "branch, tag or commit of a hub model (default: main)")
BASE = Option("base", Text(), "DIR", "where the original model is now, hub id, folder or GGUF file")
ALIGN = Option("align", Whole(1, 10**6), "N",
    "widths of MLPs are multiples of N, with --shape aligned (default: 64, from 1B parameters on 256) or uniform (default: 1, "
    "from 1B parameters on 256); --shape aligned-N says the same"
)
TENSOR_PARALLEL = Option("tensor_parallel", Whole(1, 999), "N",
    "for vLLM on N GPUs: KV groups and MLP widths of every layer are multiples of N, with --shape aligned (then the default) or "
    "uniform (default: 1); --shape aligned-64-tpN says the same"
)
CALIBRATION = Option("calibration", HYPERPARAMETERS["calibration"].kind, "TEXT",
    "sample text, best of the kind that the model is for\n\nembedded, wikitext2, c4 or a text file, or several with + between "
    f"them, in equal parts (default: {RUN_DEFAULTS['calibration']})"
)
SEED = Option("seed", Whole(0, 2**32 - 1), "S", "decides the order of the questions (default: 0)", default=0)
DTYPE = Option("dtype", Choice(("float32", "bfloat16")), "", f"data type while it works (default: {_DTYPE_DEFAULT})")
DEVICE = Option("device", Choice(("auto", "cpu", "cuda")), "",
    "where it runs; auto: on a GPU if there is one (default: %(default)s)", default="auto"
)
MEMORY = Option("memory", Size(), "SIZE",
    "most memory for {}, e.g. 20GiB (default: what is free)\n\nA model that does not fit goes layer by layer: slower, with the "
    "same numbers."
)
UPLOAD_TO = Option("upload", Repository(), "ORG/NAME", "upload it to the Hugging Face hub, under that name")
PUBLIC = switch("public", "with --upload: let everybody read it (default: private)")
OVERWRITE = switch("overwrite", "replace a pruned model at --output")
# What a model is measured on, the same for every command that measures
DATA_DIR = Option("data_dir", Text(), "DIR",
    "your own benchmarks and texts (docs/data.md)\n\n(default: those of the hub; toy models have theirs)"
)
MEASURED_ON = (
    DATA_DIR,
    switch("trust_tasks",
        "let task files of --data-dir run code, such as their own functions and metrics: for files that you trust (default: refuse "
        "such files)"
    ),
    Option("tasks", Several(TaskName(), "boolq,piqa"), "A,B",
        f"benchmarks to test on, with commas between them (default: {', '.join(ZERO_SHOT_TASKS)})"
    ),
    Option("limit", Whole(1, 10**9), "N", "ask only the first N questions of each benchmark: faster (default: all)"),
    Option("perplexity_window", Whole(2, 10**6), "TOKENS",
        "tokens of each window of the perplexity text, at most what the model takes (default: 2048; for a toy model 128, as it was "
        "trained; for a pruned checkpoint as recorded)"
    ),
    Option("perplexity_tokens", PERPLEXITY_TOKENS, "N",
        "take only the first N tokens of the perplexity text: faster (default: all)"
    ),
    DTYPE,
)


def _memory(of: str) -> Option:
    return replace(MEMORY, help=MEMORY.help.format(of))


SHRINK = Command(
    usage="MODEL",
    description="Make a model smaller: search the best way, save the model, measure it, and say how to run it.\n"
    "Stop it at any time: the same command goes on where it stopped.",
    examples={
        "tiny-llama": "a toy model, in a minute on a CPU",
        "qwen2.5 --dry-run --gpu 4090": "what it would cost on a GPU that you need not own",
        "qwen2.5 --for llama.cpp --quantize q4_k_m": "a GGUF file for llama.cpp and Ollama",
    },
    common={
        "what to make": ("MODEL", "--pruning-ratio", "--for", "--quantize", "--output"),
        "faster or better": ("--quick", "--thorough", "--calibration"),
        "before you start": ("--data-dir", "--dry-run", "--gpu"),
        "publish it": ("--upload", "--public"),
    },
    groups={
        "options": (
            replace(MODEL, metavar="MODEL", once=False, positional=True),
            _hyperparameter("pruning_ratio"),
            Option("for", Choice(("transformers", "vllm", "llama.cpp", "mlx")), "ENGINE",
                """where it will run, which decides shape and files (default: %(default)s)
                transformers  PEFT and lm-eval, too
                vllm          an OpenAI server
                llama.cpp     GGUF, for Ollama, too
                mlx           Macs""", default="transformers"
            ),
            Option("quantize", Choice(KINDS), "KIND",
                "store it in fewer bits (default: as the original)\n\n"
                f"llama.cpp: {', '.join(GGUF_KINDS)}; transformers and vllm: int8, int4; docs/checkpoints.md"
            ),
            Option("output", Text(), "DIR", "folder to write, a new one (default: of model, ratio and engine)"),
            replace(TENSOR_PARALLEL, help="with --for vllm: GPUs over which every layer can be split (default: 1)"),
            switch("quick", "try 3 ways on few questions, and train none"),
            switch("thorough", "try 12 ways with more text on all questions, and train 4"),
            CALIBRATION,
            DATA_DIR,
            Option("name", Text(), "NAME",
                "name of the search in ray_results, and of the folder to write (default: of its settings)"
            ),
            switch("inline", "one trial after the other, without Ray; the same results"),
            switch("dry_run", "check everything, say whether it fits and how long it takes, and stop"),
            Option("gpu", GpuKind(), "KIND", "with --dry-run, for a GPU that you need not own: 4090, 2x4090, h100, 24GB"),
            UPLOAD_TO,
            PUBLIC,
        ),
    },
)

SEARCH = Command(
    usage="--model NAME",
    description="Try many ways to prune a model, test each, and report the best.\n"
    "Stop it at any time: the same command goes on where it stopped.",
    examples={
        "--model tiny-llama --search-space smoke": "a first try, in a minute on a CPU",
        "--model mistral --dry-run": "what it will do, and what that costs",
        "--model DIR --data-dir DATA --gpus-per-trial 0.5": "no hub, two trials share a GPU",
    },
    common={
        "what to prune": ("--model", "--search-space"),
        "how much, and for where (this cannot be changed after a search)": ("--pruning-ratio", "--shape"),
        "faster or more thorough": (
            *("--limit", "--inline", "--gpus-per-trial", "--calibration", "--recover"),
            "--draws",
        ),
        "before you start, and while it runs": ("--data-dir", "--dry-run", "--gpu", "--status"),
    },
    groups={
        "what is searched": (
            replace(MODEL, kind=Several(Text()), help=f"{MODEL.help}; again for more", once=False, again=True),
            REVISION,
            Option("search_space", Text(), "SPACE",
                """which ways to try (default: %(default)s)
                recommended  12, the best in our tests: start here with a real model
                quick        3 of these, with little text
                thorough     12 that take longer, with more text
                paper_grid   45, those of a published search (docs/methods.md)
                smoke        6, quick: does everything work?
                FILE.yaml    your own (docs/search_spaces.md)

                minimal      3, with little sample text
                control      1, removes at random: what every method must beat
                adaptive     297, of which Optuna tries 20
                extended     450, of which Optuna tries 60""", default="paper_grid"
            ),
            Option("search", Choice(("grid", "optuna")), "HOW",
                """how configurations are chosen from the search space (default: as the space says)
                grid    try every one
                optuna  let Optuna's TPE sampler choose --num-trials of them"""
            ),
            Option("num_trials", Whole(1, 10**9), "N",
                "with optuna: trials of each model, pruning ratio and training (default: as the space says, else 20)"
            ),
            Option("objective", Choice(tuple(MEASURES)), "SCORE",
                """what the best is chosen by, what --recover trains and optuna looks for (default: %(default)s)
                accuracy      share of questions answered right
                perplexity    how well it predicts text
                gold_logprob  how likely it finds the right answers; tells models apart where accuracy is guessing
                kl            distance from the original model's predictions, mean of text and questions""", default="accuracy"
            ),
            _hyperparameter("pruning_ratio", "as the space says, else 0.2"),
            _hyperparameter("shape", "as the space says, else free, from 1B aligned"),
            ALIGN,
            TENSOR_PARALLEL,
            Option("seeds", Several(HYPERPARAMETERS["seed"].kind, "0,1,2"), "A,B",
                "run every configuration once with each of these values of --seed, e.g. 0,1,2, and report the mean: how much does "
                "luck matter? (default: as the space says, else --seed alone)"
            ),
            Option("draws", Whole(2, 100), "N",
                "repeat what could still be the best, up to N runs with other sample text\n\n(default: one run; less work than "
                "--seeds)"
            ),
            Option("draws_by", Choice(("accuracy", "gold_logprob", "kl")), "SCORE",
                """the score by which --draws decides what could still be the best (default: %(default)s)
                accuracy      share of questions answered right
                gold_logprob  how likely the right answers are
                kl            distance from the original model's predictions, mean of text and questions""", default="accuracy"
            ),
            Option("recover", Whole(1, 1000), "N",
                "at the end, train the N best briefly to imitate the original; try 2\n\nUp to N of each model and pruning ratio "
                "that could still be the best: docs/methods.md, Recovery (default: as the space says)"
            ),
        ),
        "what it is measured on": (
            CALIBRATION,
            *MEASURED_ON,
            replace(
                SEED,
                help="number that decides which pieces of sample text are taken (unless --seeds says more), the order of questions "
                "and Optuna's choices: the same number, the same results (default: 0)",
            ),
        ),
        "how it runs": (
            Option("scheduler", Choice(("none", "race", "race-gold", "asha")), "RULE",
                """stop hopeless trials early; not with several --seeds (default: %(default)s)
                none       test all of them in full
                race       stop one that is, with 95%% confidence, not the most accurate
                race-gold  the same by how likely right answers are: takes fewer questions, but may stop the most accurate
                asha       stop the weaker half after a quarter and after half of the questions""", default="none"
            ),
            switch("kl_filter",
                "skip the slow tests of a pruned model whose KL, on text and on questions, is over 1.5 times the median of at "
                "least 5 trials before it (docs/methods.md); not with several --seeds"
            ),
            _memory("a trial"),
            Option("gpus_per_trial", Amount("gpus_per_trial", allow_zero=True), "X",
                "0.25: four trials share a GPU; 2: one is spread over two (default: auto)\n\nauto goes by the memory that a trial "
                "needs, 0 uses none.", default="auto"
            ),
            Option("cpus_per_trial", Amount("cpus_per_trial", allow_zero=False), "X",
                "CPUs and threads of a trial (default: auto, 1, or up to 4 where it has a GPU)", default="auto"
            ),
            Option("trial_timeout", Real(1, 1e9, "a number of seconds from 1 to 1e9, e.g. 3600"), "SECONDS",
                "end a trial that takes longer, and record it as failed (hung); what prepares the trials is tried once more "
                "(default: no limit)"
            ),
            switch("inline", "one trial after the other, without Ray; the same results"),
            Option("address", Text(), "HOST:PORT",
                "a Ray cluster that runs, or auto for one started on this machine (default: start an own Ray)"
            ),
            Option("storage_path", Text(), "DIR",
                "folder of all experiments, or s3://bucket/prefix or gs://bucket/prefix (default: %(default)s)",
                default="ray_results"
            ),
            Option("name", Text(), "NAME",
                "name of the experiment, a folder in --storage-path (default: of model, ratio, search space, shape, limit and "
                "tokens)"
            ),
            switch("save_best",
                "at the end, save the best pruned model of each model to best/ in the experiment", keyword=False
            ),
            switch("dry_run", "check everything, say whether it fits and how long it takes, and stop", keyword=False),
            switch("verbose", "print the whole plan: time, tokens and memory of each stage", keyword=False),
            Option("gpu", GpuKind(), "KIND",
                "with --dry-run, for a GPU that you need not own: 4090, 2x4090, h100, 24GB\n\n(docs/costs.md has the kinds; "
                "default: what is here)", keyword=False
            ),
        ),
        "how it is followed": (
            Option("status", Text(), "NAME",
                "how far the search of that name is; reads only, at any time\n\nNAME may be a path; from any machine that sees the "
                "storage: trials done, running and failed, the best so far, time left, GPU-hours.", keyword=False
            ),
            switch("json", "with --status: one JSON object instead of text", keyword=False),
            switch("log_json",
                "write one JSON object a line to standard output (docs/watching.md): start, plan, stages, ends of trials; text "
                "goes to standard error", keyword=False
            ),
            Option("track", Several(Choice(TRACKERS), "mlflow,wandb", least=0), "NAME",
                "write every trial as a run of mlflow or wandb, too, or of both (mlflow,wandb); each where its own environment "
                "variables say, else below this folder and offline (default: neither)", again=True
            ),
        ),
    },
)

PRUNE = Command(
    usage="--config EXPERIMENT --output DIR",
    description="Save a pruned model for transformers, vLLM or llama.cpp: the best of a search, or one by flags.",
    examples={
        "--config ray_results/NAME --output DIR": "the best of a search",
        "--model tiny-llama --method taylor --seq-len 64 --num-samples 128 --output DIR": "one by flags",
    },
    common={
        "the best of a search": ("--config", "--model"),
        "what is saved": ("--output", "--format", "--quantize", "--measure"),
        "without a search": (
            *("--method", "--seq-len", "--num-samples", "--calibration", "--pruning-ratio", "--shape"),
            *("--compensation", "--recovery"),
        ),
    },
    groups={
        "options": (Option("output", Text(), "DIR", "folder to write, a new one", required=True),),
        "what is pruned, and how: the best configuration of a search (--config), or one by flags": (
            Option("config", Text(), "FILE", "a search, as ray_results/NAME, or best_config.json of an analysis"),
            replace(
                MODEL, help=f"{MODEL.help}; with --config one of its models, as tiny-llama@0.3 (default: the only one)"
            ),
            replace(BASE, help=f"with --config: {BASE.help} (default: where it was)"),
            REVISION,
            *(
                option
                for name in HYPERPARAMETERS
                for option in (
                    replace(CALIBRATION, metavar="VALUE") if name == "calibration" else _hyperparameter(name),
                    *([ALIGN, TENSOR_PARALLEL] if name == "shape" else []),
                )
            ),
            replace(DATA_DIR, help="folder of your own texts, as in docs/data.md (default: none)"),
        ),
        "how it is saved": (
            Option("format", Choice(("hf", "vllm", "hf-padded", "gguf")), "FORMAT",
                """the files (default: %(default)s)
                hf         for transformers and vLLM; of shape uniform for the others, too
                vllm       the same, with zeros where a layer has lost its attention
                hf-padded  a plain model of its family, zeros fill it up: hardly smaller
                gguf       for llama.cpp and Ollama""", default="hf"
            ),
            Option("quantize", Choice(KINDS), "KIND",
                f"""fewer bits, as q4_k_m with --format gguf or int8 with hf (default: not quantised)

                gguf: {", ".join(GGUF_KINDS)}; all but q8_0 by llama.cpp's llama-quantize, which must be installed
                hf, for transformers and vLLM: int8, or int4 with --shape aligned; needs compressed-tensors"""
            ),
            Option("dtype", Choice(("float32", "bfloat16", "float16")), "",
                "data type of the saved weights (default: the original model's)"
            ),
            Option("shard_gb", Real(0.0001, 1e6, "a number of gigabytes from 0.0001 to 1e6, e.g. 5"), "GB",
                "largest size of a weight file, in 10^9 bytes (default: 5)", default=5.0
            ),
            OVERWRITE,
            switch("measure", "also measure speed and memory, of the original model, too"),
            UPLOAD_TO,
            PUBLIC,
            _memory("pruning"),
            DEVICE,
        ),
    },
)

EVALUATE = Command(
    usage="--model NAME",
    description="Test a model, original or pruned, as a search tests it: perplexity and accuracy on benchmarks.",
    examples={
        "--model DIR --limit 100": "a pruned model, on 100 questions of each benchmark",
        "--model tiny-llama": "an original model, on all",
        "--model DIR --kl": "and how far a pruned model is from its original",
        "--model DIR --data-dir DATA --tasks boolq,piqa": "without a hub, two benchmarks",
    },
    common={
        "what to test": ("--model", "--data-dir", "--tasks"),
        "faster or more thorough": ("--limit", "--perplexity-tokens", "--kl"),
        "where it runs": ("--device", "--memory", "--dtype"),
        "what is kept": ("--output",),
    },
    groups={
        "options": (
            replace(MODEL, required=True),
            REVISION,
            switch("kl", "for a pruned model, how far its predictions moved, too (KL; default: no)"),
            replace(BASE, help=f"with --kl, or for a GGUF file: {BASE.help} (default: where tune_prune.json says)"),
            *MEASURED_ON,
            SEED,
            _memory("the measurement"),
            DEVICE,
            Option("output", Text(), "FILE", "file for all numbers, as JSON"),
        ),
    },
)

SPEED = Command(
    usage="(--config EXPERIMENT | --model DIR)",
    description="Measure how fast pruned models read a prompt and write an answer, beside their original, in turns.",
    examples={
        "--config ray_results/NAME": "the best ones of a search; then run tune-prune analysis again",
        "--model DIR": "a pruned model",
        "--model DIR --prompt-tokens 2048 --new-tokens 128 --device cuda": "for longer requests, on a GPU",
        "--model DIR --engine vllm": "in vLLM, by its own benchmark",
    },
    common={
        "what to measure": ("--config", "--model", "--all"),
        "your requests": ("--prompt-tokens", "--new-tokens"),
        "where it runs": ("--engine", "--device", "--dtype"),
        "surer, and what is kept": ("--repeats", "--output"),
    },
    groups={
        "options": (
            Option("config", Text(), "FOLDER", "a search: measure its best configurations, and keep the speeds there"),
            replace(MODEL, help=f"{MODEL.help}; with --config one of its models, as tiny-llama@0.3 (default: all)"),
            REVISION,
            replace(BASE, help=f"{BASE.help} (default: where tune_prune.json or the search says)"),
            switch("all",
                "with --config: every complete configuration (default: what a rule of tune-prune analysis chooses)"
            ),
            replace(OVERWRITE, help="with --config: measure anew what was measured"),
            Option("prompt_tokens", Whole(1, 10**6), "N",
                "tokens of the prompt, at most what the model takes (default: %(default)s)", default=512
            ),
            Option("new_tokens", Whole(1, 10**6), "N", "tokens of the answer (default: %(default)s)", default=64),
            Option("repeats", Whole(1, 1000), "N",
                "times that both models take their turn, after one that does not count (default: %(default)s)", default=5
            ),
            Option("engine", Choice(("transformers", "vllm", "llama.cpp")), "",
                "what runs the models (default: %(default)s)\n\nWith --model. vllm: by `vllm bench latency`; llama.cpp: GGUF files "
                "by `llama-bench`. Both are programs on PATH, in any environment, and run where they were built for.",
                default="transformers"
            ),
            replace(DTYPE, help=f"data type of the weights (default: {_DTYPE_DEFAULT}; of a search as it was run)"),
            DEVICE,
            Option("output", Text(), "FILE", "with --model alone: file for all numbers, as JSON"),
        ),
    },
)

UPLOAD = Command(
    usage="DIR ORG/NAME",
    description="Upload a pruned model to the Hugging Face hub: private, unless you say --public.",
    examples={
        "my-smaller-model YOU/smaller-model": "for you alone",
        "my-smaller-model YOU/smaller-model --dry-run": "what would be uploaded",
        "my-smaller-model YOU/smaller-model --public": "for everybody",
    },
    common={"what, and where to": ("DIR", "REPO"), "who can read it": ("--public",), "first": ("--dry-run",)},
    groups={
        "options": (
            Option("folder", Text(), "DIR", "folder of a pruned model, as prune has written it", positional=True),
            Option("repo", Repository(), "REPO", "its name on the hub, ORG/NAME: yours, or an organisation's", positional=True),
            replace(PUBLIC, help="let everybody read it (default: private)"),
            switch("dry_run", "check everything, list the files, and stop"),
        ),
    },
)

REPRODUCE = Command(
    usage="WHERE",
    description="Make a pruned model again from its tune_prune.json, and compare: are the weights the same?",
    examples={
        "ORG/NAME": "a model of the hub",
        "my-smaller-model": "a folder",
        "tune_prune.json --base DIR --output again": "from the file alone, of a model in a folder; and keep what was made",
    },
    common={
        "what is made again": ("WHERE", "--revision"),
        "what it was made of, where that is no name of the hub": ("--base", "--calibration"),
        "what is kept": ("--output",),
        "where it runs": ("--device", "--memory"),
    },
    groups={
        "options": (
            Option("where", Text(), "WHERE", "tune_prune.json, the folder of a pruned model, or its hub id", positional=True),
            replace(REVISION, help="branch, tag or commit of a pruned model on the hub (default: main)"),
            replace(BASE, help=f"{BASE.help} (default: where tune_prune.json says)"),
            replace(CALIBRATION, help="the sample text, where it is a file (default: where tune_prune.json says)"),
            Option("output", Text(), "DIR", "folder to write, a new one (default: none is kept)"),
            _memory("pruning"),
            DEVICE,
        ),
    },
)

ANALYSIS = Command(
    usage="EXPERIMENT ...",
    description="Report on searches, finished or not: the best configuration, how sure that is, tables, figures.",
    examples={
        "ray_results/NAME": "a report on one search, in results/report.html",
        "ray_results/A ray_results/B --rule pareto": "several searches, models compared",
        "ray_results/NAME --rule smallest --within 2": "the smallest model within 2 points of the original",
        "--csv Llama=all_methods_results.csv --baseline Llama=0.651": "published results",
        "ray_results/NAME --export-study study.db": "for optuna-dashboard sqlite:///study.db",
    },
    common={
        "what to read": ("EXPERIMENT", "--csv", "--baseline"),
        "which is best": ("--rule", "--within"),
        "what to write": ("--output", "--percent", "--lang", "--export-study"),
    },
    groups={
        "options": (
            Option("folders", Several(Place()), "EXPERIMENT",
                "folder of a search, as ray_results/NAME, or of several\n\nor a consolidated_<Model>_<percent>/", positional=True
            ),
            Option("csv", Several(LabelledPlace()), "MODEL=PATH",
                "a results file of a model, such as all_methods_results.csv; again for more", again=True
            ),
            Option("baseline", Several(LabelledAccuracy()), "MODEL=ACCURACY",
                "with --csv: accuracy of the original model, as Llama=0.651; again for more", again=True
            ),
            Option("output", Folder(), "DIR", "folder of the report (default: %(default)s)", default="results"),
            Option("rule", Choice(tuple(RULES)), "RULE",
                "\n".join(["how the best is chosen (default: %(default)s)", *(f"{rule:21}{how}" for rule, how in RULES.items())]),
                default="accuracy"
            ),
            Option("within", Real(0, 100, "a number of percentage points from 0 to 100, e.g. 2 or 0.5"), "POINTS",
                "with smallest: points below the original model's accuracy (default: 2)"
            ),
            switch("percent", "write accuracies as 59.80, not .5980 (CSV and JSON files keep fractions)"),
            Option("export_study", Folder(), "FILE",
                "write only Optuna studies, to this SQLite file for optuna-dashboard"
            ),
            switch("overwrite", "replace the file of --export-study"),
            Option("lang", Choice(LANGUAGES), "", "language of the text report (default: %(default)s)", default="en"),
            replace(SEED, help="seed of the random parts of the statistics (default: 0)"),
        ),
    },
)
# fmt: on
COMMANDS = {
    "shrink": SHRINK,
    "search": SEARCH,
    "prune": PRUNE,
    "evaluate": EVALUATE,
    "speed": SPEED,
    "upload": UPLOAD,
    "reproduce": REPRODUCE,
    "analysis": ANALYSIS,
}
# By command and name; a function of the Python API has those of its command.
OPTIONS = {
    command: {option.name: option for group in about.groups.values() for option in group}
    for command, about in COMMANDS.items()
}
OPTIONS["open"] = OPTIONS["evaluate"] | {
    "name": replace(MODEL, name="name", required=True),
    "calibration": CALIBRATION,
    "seed": replace(
        SEED, help="decides which pieces of sample text are taken, and the order of questions (default: 0)"
    ),
    "memory": _memory("pruning and measuring"),
}

# Options that nothing reads without another one, by command: the option, the one that it needs, the end of the sentence.
# fmt: off
NEEDS = {
    "shrink": (
        ("gpu", "dry_run", "plans for a GPU that need not be here; add --dry-run, or leave it out"),
        ("public", "upload", "is for --upload; leave it out: a folder of this machine is for those who can read it"),
    ),
    "search": (
        ("json", "status", "is for --status; leave it out, or give --log-json for the events of a search"),
        ("gpu", "dry_run", "plans for a GPU that need not be here; add --dry-run, or leave it out to search with what is here"),
    ),
    "prune": (
        ("base", "config", "is for --config; name the model with --model"),
        ("public", "upload", "is for --upload; leave it out: a folder of this machine is for those who can read it"),
    ),
    "speed": (
        ("all", "config", "is for --config; leave it out"),
        ("overwrite", "config", "is for --config; leave it out"),
    ),
    "analysis": (
        ("overwrite", "export_study", "is for --export-study; leave it out: what is in --output is replaced by the newer"),
    ),
}
# fmt: on


class CommandLine(Parser):
    """The parser of a command: argparse splits a line, and the table says what its values may be."""

    def __init__(self, command: str) -> None:
        about = COMMANDS[command]
        super().__init__(f"tune-prune {command}", about.usage, about.description, about.examples, about.common)
        self._command = command
        for title, options in about.groups.items():
            group = self if title == "options" else self.add_argument_group(title)
            for option in options:
                if isinstance(option.kind, Switch):
                    group.add_argument(option.flag, action="store_true", help=option.help)
                    continue
                if option.positional:
                    count = "*" if option.many else None
                    group.add_argument(option.name, nargs=count, metavar=option.metavar, help=option.help)
                    continue
                choices = f"{{{','.join(option.kind.names)}}}" if isinstance(option.kind, Choice) else "VALUE"
                group.add_argument(
                    option.flag,
                    action=Once if option.once else "append" if option.again else "store",
                    default=option.default,
                    required=option.required,
                    metavar=option.metavar or choices,
                    help=option.help,
                )

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """Return the values of a line by the names of options. Raises UserError."""
        given = super().parse_args(args)
        for name, option in OPTIONS[self._command].items():
            text = getattr(given, name)
            try:
                if option.many:
                    setattr(given, name, tuple(value for one in text or () for value in option.read(one)))
                elif isinstance(text, str):
                    setattr(given, name, option.read(text))
            except UserError as error:
                self.error(str(error))
        for name, needed, sentence in NEEDS.get(self._command, ()):
            if getattr(given, name) and not getattr(given, needed):
                value = getattr(given, name)
                raise UserError(f"--{name}{f' {value}' if isinstance(value, str) else ''} {sentence}")
        return given


def checked(command: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of Python keywords, as the settings of that command hold them. Raises UserError for one out of its
    bounds."""
    return {name: OPTIONS[command][name].of(value) for name, value in keywords.items()}


def arguments(command: str, keywords: Mapping[str, Any]) -> list[str]:
    """Return the command line that asks for what these keywords do, as records hold it: those that are not at their defaults."""
    argv = []
    for name, value in keywords.items():
        option, asked = OPTIONS[command][name], plain(value)
        if asked is None or asked == option.default:
            continue
        if isinstance(option.kind, Switch):
            argv += [option.flag] * bool(asked)
            continue
        if isinstance(option.kind, Size) and isinstance(asked, int):
            asked = f"{asked / 2**20}MiB"
        values = [plain(one) for one in asked] if isinstance(asked, (list, tuple)) else [asked]
        if not option.again:
            values = [",".join(map(str, values))]
        argv += [f"{option.flag}={one}" for one in values]
    return argv


Function = TypeVar("Function", bound=Callable[..., Any])


def documented(command: str) -> Callable[[Function], Function]:
    """Decorate a function of the Python API: the line `{options}` of its docstring becomes the help of those of its keywords that
    are options of `command`."""

    def fill(function: Function) -> Function:
        names = [name for name in inspect.signature(function).parameters if name in OPTIONS[command]]
        width = max(8, *map(len, names)) + 2  # 8: on_stage, which is no option, stands below them
        lines = [line for name in names for line in _help_lines(OPTIONS[command][name], width)]
        text = function.__doc__ or ""  # none with python -OO
        function.__doc__ = re.sub(
            r"^( *)\{options\}$", lambda place: textwrap.indent("\n".join(lines), place[1]), text, flags=re.MULTILINE
        )
        return function

    return fill


def _help_lines(option: Option, width: int) -> list[str]:
    """Return an option's name and its help beside it, which names keywords in place of flags."""
    text = option.help % {"default": option.default}
    text = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), text)
    lines = help_lines(text, 110 - width)
    return [f"{option.name if index == 0 else '':<{width}}{line}" for index, line in enumerate(lines)]
