"""`python -m tune_prune.prune`, the same as `tune-prune prune`: see commands/prune.py."""

from __future__ import annotations

import sys

from tune_prune.commands.prune import main

if __name__ == "__main__":
    sys.exit(main())
