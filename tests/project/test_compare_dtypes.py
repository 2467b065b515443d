"""scripts/compare_dtypes.py, on two searches of one configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import compare_dtypes
import pytest

from tests.search_folders import TINY
from tune_prune.commands import search
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore

SPACE = "search: grid\nmethod: [taylor, layerwise]\nseq_len: 16\nnum_samples: 16\n"


@pytest.mark.slow
def test_two_data_types_stand_beside_each_other(tmp_path: Path, printed: Callable[..., str]) -> None:
    (tmp_path / "space.yaml").write_text(SPACE)
    short = ("--limit", "8", "--tasks", "piqa,boolq", "--perplexity-tokens", "500", "--storage-path", tmp_path)
    for name in ("float32", "bfloat16"):
        more = ("--inline", "--dtype", name, "--name", name, "--search-space", tmp_path / "space.yaml")
        printed(search.main, *TINY[:2], *short, *more)
    folders = [str(tmp_path / name) for name in ("float32", "bfloat16")]
    values = compare_dtypes.main([*folders, "--output", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == values["rows"]
    _, *trials = values["rows"]
    assert {row["configuration"] for row in trials} == {"taylor-s16-n16", "layerwise-s16-n16"}
    for place, folder in enumerate(folders):
        ledger = Ledger(FolderStore(Path(folder)))
        for record in ledger.records():
            (row,) = (row for row in trials if row["configuration"].startswith(record.config["method"]))
            assert row["ppl"][place] == record.metrics["ppl"] and row["items"] == 16
    assert all(0 < abs(row["ppl"][0] / row["ppl"][1] - 1) < 0.2 for row in values["rows"])
    assert all(0.5 < row["removed by both"] <= 1 for row in trials)
    same = compare_dtypes.main([folders[0], folders[0]])["rows"]
    assert [(row["removed by both"], row["judged otherwise"]) for row in same[1:]] == [(1.0, 0)] * 2


def test_a_folder_without_trials_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 0 complete trials of 0 models"):
        compare_dtypes.Experiment(str(tmp_path))
