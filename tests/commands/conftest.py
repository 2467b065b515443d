"""What the tests of `prune` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tune_prune.commands import prune


@pytest.fixture
def sentence(refused: Callable[..., str], tmp_path: Path) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which that command ends, after which nothing has been written."""

    def run(*argv: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        told = refused(prune.main, *argv, begun=True)
        assert sorted(tmp_path.rglob("*")) == before
        return told

    return run
