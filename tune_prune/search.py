"""`python -m tune_prune.search`, the same as `tune-prune search`: see commands/search.py."""

from __future__ import annotations

import sys

from tune_prune.commands.search import main

if __name__ == "__main__":
    sys.exit(main())
