"""Upload a pruned model to the Hugging Face hub: `tune-prune upload DIR ORG/NAME`; `prune --upload` does the same at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

from tune_prune.commands import flags
from tune_prune.core import terminal
from tune_prune.core.terminal import say


def main(argv: list[str] | None = None) -> int:
    return flags.run("upload", argv, _main)


@terminal.shown()
def _main(args: argparse.Namespace) -> None:
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
