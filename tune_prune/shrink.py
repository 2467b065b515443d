"""`python -m tune_prune.shrink`, the same as `tune-prune shrink`: see commands/shrink.py."""

from __future__ import annotations

import sys

from tune_prune.commands.shrink import main

if __name__ == "__main__":
    sys.exit(main())
