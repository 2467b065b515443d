"""`python -m tune_prune.search`, the same as `tune-prune search`: see commands/search.py."""

from __future__ import annotations

from tune_prune.commands.search import main
from tune_prune.core import ending

if __name__ == "__main__":
    ending.leave(main)
