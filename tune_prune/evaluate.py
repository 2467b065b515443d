"""`python -m tune_prune.evaluate`, the same as `tune-prune evaluate`: see commands/evaluate.py."""

from __future__ import annotations

import sys

from tune_prune.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
