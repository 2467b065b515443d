"""The digest of a module follows what its code does, as it was loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tune_prune.core.hashing import code_digest

CODE = '''"""Scores by size."""
import numpy as np


class Scores:
    """A class."""

    power = 2.0


def scores(dense, *, empty=None, none=()):
    """By size."""
    # larger is better
    return np.sum(dense.sizes ** Scores.power) - 1
'''
SAME = [
    ("    # larger is better\n", ""),
    ('"""Scores by size."""', '"""Another sentence,\n\nand more."""'),
    ('    """By size."""\n', ""),
    ('    """A class."""\n\n', "    # nothing\n"),
    ("np.sum(dense.sizes ** Scores.power) - 1", "(\n        np.sum( dense.sizes**Scores.power )-1\n    )"),
]
OTHER = [
    (") - 1", ") + 1"),
    (") - 1", ") - 1.0"),
    ("return np.sum", "return -np.sum"),
    ("2.0", "2.5"),
    ("empty=None", "empty"),
    ("none=()", "none=(None,)"),
    ("numpy as np", "math as np"),
    ("power = 2.0", 'power = "2.0"'),
]


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """The digest of a module of that text, loaded anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def digest(text: str) -> str:
        (tmp_path / "made_up_scores.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("made_up_scores", None)
        return code_digest(importlib.import_module("made_up_scores"))

    yield digest
    sys.modules.pop("made_up_scores", None)


def test_comments_docstrings_and_layout_do_not_count(digest_of: Callable[[str], str]) -> None:
    for before, after in SAME:
        assert CODE.count(before) == 1
        assert digest_of(CODE.replace(before, after)) == digest_of(CODE), after


def test_all_that_it_does_counts(digest_of: Callable[[str], str]) -> None:
    changed = [CODE.replace(before, after) for before, after in OTHER]
    assert len({CODE, *changed}) == len({*map(digest_of, (CODE, *changed))}) == 1 + len(OTHER)


def test_what_is_edited_counts_when_it_is_loaded_again(digest_of: Callable[[str], str]) -> None:
    before = digest_of(CODE)
    module = sys.modules["made_up_scores"]
    assert module.__file__ is not None
    Path(module.__file__).write_text(CODE.replace("2.0", "3.0"))
    assert code_digest(module) == before  # it still does what it did
    importlib.reload(module)
    assert module.Scores.power == 3 and code_digest(module) != before
