"""`tune-prune COMMAND ...` or `python -m tune_prune COMMAND ...`: the same command lines under one name."""

from __future__ import annotations

import importlib
import sys

from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.process.ending import exit_code
from tune_prune.core.terminal.escapes import say
from tune_prune.core.terminal.parser import versions

COMMANDS = {  # module, what it does
    "search": ("tune_prune.search", "prune a model by every configuration of a search space, and measure each"),
    "analysis": ("tune_prune.analysis.command", "turn the trials of a search into a decision with its evidence"),
    "prune": ("tune_prune.prune", "save a pruned model as a checkpoint that loads elsewhere"),
    "evaluate": ("tune_prune.evaluate", "measure a model: perplexity and zero-shot accuracy"),
    "speed": ("tune_prune.speed", "measure how fast pruned models are beside their dense model"),
}
HELP = "\n".join(
    [
        "usage: tune-prune COMMAND ... (or python -m tune_prune COMMAND ..., python -m tune_prune.COMMAND ...)",
        "\nMake a language model smaller with as little harm as possible.\n",
        *(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()),
        "\nEach has --help; --version prints versions. A first try: tune-prune search --model tiny-llama --search-space smoke",
    ]
)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:])
    return exit_code(lambda: _without_command(argv))


def _without_command(argv: list[str]) -> None:
    if not argv:
        raise UserError(f"no command was given; known: {', '.join(COMMANDS)} (each with --help)")
    if argv[0] not in ("-h", "--help", "--version"):
        raise UserError(f"unknown command {argv[0]!r}; {did_you_mean(argv[0], COMMANDS)}")
    say(versions() if argv[0] == "--version" else HELP)


if __name__ == "__main__":
    sys.exit(main())
