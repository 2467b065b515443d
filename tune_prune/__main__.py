"""`tune-prune COMMAND ...` or `python -m tune_prune COMMAND ...`: the same command lines under one name."""

from __future__ import annotations

import importlib
import sys

from tune_prune.core.errors import did_you_mean
from tune_prune.core.terminal.parser import versions

COMMANDS = {
    "search": "tune_prune.search",
    "analysis": "tune_prune.analysis.command",
    "prune": "tune_prune.prune",
    "evaluate": "tune_prune.evaluate",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(f"error: no command was given; known: {', '.join(COMMANDS)} (each with --help)", file=sys.stderr)
        return 2
    if argv[0] in ("-h", "--help"):
        print(f"usage: tune-prune COMMAND ...\n\ncommands: {', '.join(COMMANDS)} (each with --help)")
        return 0
    if argv[0] == "--version":
        print(versions())
        return 0
    if argv[0] not in COMMANDS:
        print(f"error: unknown command {argv[0]!r}; {did_you_mean(argv[0], COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
