"""Help pages, versions and examples of every command; the commands that others print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import tune_prune.__main__
from tests.search_folders import TINY
from tune_prune.commands import prune, search
from tune_prune.commands.options import COMMANDS, CommandLine
from tune_prune.commands.prune_request import PruneRequest
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError

pytestmark = pytest.mark.usefixtures("nothing_created")


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
        ("--tensor-parallel 1", None),
        ("--method taylor", "--method is taylor, but FILE says blockwise"),
        ("--align 32", "--shape is aligned-32, but FILE says aligned-16"),
        ("--shape aligned-16 --tensor-parallel 2", "--shape is aligned-16-tp2, but FILE says aligned-16"),
        ("--seed 1", "--seed is 1, but FILE says 0"),
        ("--calibration c4", "--calibration is c4, but FILE says embedded"),
    ],
)
def test_a_flag_may_repeat_what_the_configuration_says(flags: str, sentence: str | None) -> None:
    args = CommandLine("prune").parse_args(["--config", "FILE", "--output", "x", *flags.split()])
    if sentence is None:
        prune.check_agreement(args, REQUEST)
    else:
        with pytest.raises(UserError, match=f"^{re.escape(sentence)}; leave the flag out"):
            prune.check_agreement(args, REQUEST)


def test_the_next_commands_of_a_search_are_command_lines() -> None:
    parsers = {"prune": CommandLine("prune"), "analysis": CommandLine("analysis")}
    two = {"tiny-llama@0.1": "tiny-llama@0.1+lora", "a b": "a b"}
    for winners, outputs in (({}, []), ({"m": "m+lora"}, ["m-pruned"]), (two, ["tiny-llama-0.1-pruned", "a-b-pruned"])):
        lines = [(name, shlex.split(shlex.join(argv))) for name, argv in search.next_commands("my results/x", winners)]
        assert [name for name, _ in lines] == [*["keep"] * len(winners), "report", "curves"]
        parsed = [parsers[argv[1]].parse_args(argv[2:]) for _, argv in lines[:-1]]
        assert parsed[-1].folders == (Path("my results/x"),)
        kept = [(args.config, args.model, args.output) for args in parsed[:-1]]
        labels = winners.values() if len(winners) > 1 else [None] * len(winners)
        assert kept == [("my results/x", label, output) for label, output in zip(labels, outputs, strict=True)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_examples_that_are_command_lines(name: str) -> None:
    parser = CommandLine(name)
    text = parser.format_help_all()
    for example in parser.examples:
        parser.parse_args(shlex.split(example))
        assert f"  {parser.prog} {example}\n" in text
    assert len(parser.examples) > 1 and "exit codes:\n  0    done" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_and_help_all_has_every_flag(name, capsys, monkeypatch):
    """With all that is said of a flag; --help has the first paragraph of it, and names --help-all in its last line."""
    monkeypatch.setenv("COLUMNS", "100")
    p = CommandLine(name)
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


def test_commands_under_one_name(printed: Callable[..., str]) -> None:
    main = tune_prune.__main__.main
    assert printed(main, "search", *TINY, "--dry-run").endswith("dry run: nothing was started\n")
    assert printed(main) == printed(main, "--help") and "\n  search     try " in printed(main)
