"""scripts/compare_results.py: equal folders are equal, and every kind of difference is seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare_results
import pyarrow
import pyarrow.parquet
import pytest

PLAN, TABLE, ITEMS = "trials/k/pruning_plan.json", "all_methods_results.csv", "trials/k/items.parquet"
RECORD = {"status": "complete", "metrics": {"acc_mean": 0.5, "ppl": 7.25}, "elapsed_time_s": 1.0, "stages": [1]}


def put(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == ITEMS:
        pyarrow.parquet.write_table(pyarrow.table(content), path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def before(tmp_path: Path) -> Path:
    folder = tmp_path / "before" / "mine"
    put(folder, "ledger/k.json", RECORD)
    put(folder, "passes/p.json", {})
    put(folder, PLAN, {"taylor_seq_len": 1, "layers": [[1, 0], [1, 1]]})
    put(folder, ITEMS, {"acc": [1.0, 0.0]})
    put(folder, TABLE, "model,acc_mean,elapsed_time\nm,0.5,1\n")
    return tmp_path / "before"


def metrics(**values: float) -> Callable[[Path], None]:
    return lambda folder: put(folder, "ledger/k.json", RECORD | {"metrics": values})


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another time": (lambda folder: put(folder, "ledger/k.json", RECORD | {"elapsed_time_s": 2.0}), ""),
    "older names": (lambda folder: put(folder, PLAN, {"seq_len": 1, "layers": [[1, 0], [1, 1]]}), ""),
    "the last bit": (metrics(acc_mean=0.5, ppl=7.250000000000001), "metrics.ppl is 7.25 before and 7.250000000000001"),
    "a lost metric": (metrics(acc_mean=0.5), "metrics.ppl is 7.25 before and missing"),
    "a group": (
        lambda folder: put(folder, PLAN, {"seq_len": 1, "layers": [[1, 0], [0, 1]]}),
        "layers[1][0] is 1 before",
    ),
    "an item": (lambda folder: put(folder, ITEMS, {"acc": [1.0, 1.0]}), "the items differ"),
    "a cell": (lambda folder: put(folder, TABLE, "model,acc_mean,elapsed_time\nm,0.50,2\n"), "row 1, acc_mean: '0.5'"),
    "a column": (lambda folder: put(folder, TABLE, "model\nm\n"), "column acc_mean is only before"),
    "a lost trial": (lambda folder: (folder / "ledger" / "k.json").unlink(), "mine/ledger/k.json is only before"),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_every_difference_is_seen(change, sentence, before, capsys):
    after = Path(shutil.copytree(before, before.with_name("after")))
    change(after / "mine")
    assert compare_results.main([str(before), str(after)]) == bool(sentence)
    assert (sentence or "records") in capsys.readouterr().out


def test_folders_without_results_are_refused(tmp_path):
    with pytest.raises(SystemExit) as ended:
        compare_results.main([str(tmp_path), str(tmp_path)])
    assert ended.value.code == 2
