"""`tune-prune COMMAND ...` or `python -m tune_prune COMMAND ...`: every command line under one name, and their page."""

from __future__ import annotations

import importlib
import sys

from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.parser import versions
from tune_prune.core.terminal import say

COMMANDS = {  # module, what it does
    "shrink": ("tune_prune.commands.shrink", "make a smaller model, from start to end"),
    "search": ("tune_prune.commands.search", "try many ways to prune a model, and test each"),
    "analysis": ("tune_prune.commands.analysis", "report on a search: which way is best, and how sure that is"),
    "prune": ("tune_prune.commands.prune", "save the best pruned model"),
    "evaluate": ("tune_prune.commands.evaluate", "test any model: perplexity and accuracy on benchmarks"),
    "speed": ("tune_prune.commands.speed", "measure how fast a pruned model is beside the original"),
    "upload": ("tune_prune.commands.upload", "put a pruned model on the Hugging Face hub"),
    "reproduce": ("tune_prune.commands.reproduce", "make a published model again, and compare"),
}
HELP = "\n".join(
    [
        "usage: tune-prune COMMAND [options]",
        "\nMake a language model smaller, and see what it costs you.\n",
        *(f"  {name:<11}{what}" for name, (_, what) in COMMANDS.items()),
        "\na first try, in a minute on a CPU:",
        "  tune-prune shrink tiny-llama",
        "\nEach command has --help. tune-prune --version prints versions.",
    ]
)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    return exit_code(lambda: _without_command(argv))


def _without_command(argv: list[str]) -> None:
    name = argv[0] if argv else "--help"
    if name not in ("-h", "--help", "--help-all", "--version"):
        raise UserError(f"unknown command {name!r}; {did_you_mean(name, COMMANDS)}")
    say(versions() if name == "--version" else HELP)


if __name__ == "__main__":
    sys.exit(main())
