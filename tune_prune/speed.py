"""`python -m tune_prune.speed`, the same as `tune-prune speed`: see commands/speed.py."""

from __future__ import annotations

import sys

from tune_prune.commands.speed import main

if __name__ == "__main__":
    sys.exit(main())
