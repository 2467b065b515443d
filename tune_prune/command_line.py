"""What every command line shares: one-sentence usage errors and the meaning of exit codes.

0 done; 2 the user must change something (one sentence on stderr, no traceback); 1 anything else; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from tune_prune.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that bad flags end like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def run(main: Callable[[], None]) -> int:
    """Call `main` and return the exit code."""
    # Set before transformers or datasets are imported: their progress bars and warnings would cut through our lines.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted{': ' + str(interrupt) if str(interrupt) else ''}", file=sys.stderr)
        return 130
    return 0
