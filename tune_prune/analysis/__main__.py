"""`python -m tune_prune.analysis`: see command.py."""

from __future__ import annotations

import sys

from tune_prune.commands.analysis import main

if __name__ == "__main__":
    sys.exit(main())
