"""Upload a pruned model to the Hugging Face hub: `tune-prune upload DIR ORG/NAME`; `prune --upload` does the same at its end."""

from __future__ import annotations

import sys
from pathlib import Path

from tune_prune.commands import flags
from tune_prune.commands.options import CommandLine
from tune_prune.core import terminal
from tune_prune.core.terminal import say


def parser() -> CommandLine:
    return CommandLine("upload")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    return flags.run(lambda: _main(argv))


@terminal.shown()
def _main(argv: list[str]) -> None:
    args = parser().parse_args(argv)
    upload(Path(args.folder).expanduser().absolute(), args.repo, args.public, args.dry_run)


def upload(folder: Path, repo: str, public: bool = False, dry_run: bool = False) -> None:
    """Upload the checkpoint in `folder` as `repo` ("org/name"), saying what goes there first, and where it is then. Raises
    UserError and MachineError as `checkpoint.publish` does."""
    from tune_prune.checkpoint import publish

    planned = publish.plan(folder, repo, public)
    say(str(planned))
    if dry_run:
        say("dry run: nothing was uploaded")
        return
    say(f"uploaded     {publish.upload(planned)}")
