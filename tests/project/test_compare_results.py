"""scripts/compare_results.py: equal folders are equal, and every kind of difference is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.conftest import SCRIPTS

RECORD = {"status": "complete", "metrics": {"acc_mean": 0.5, "ppl": 7.25}, "elapsed_time_s": 1.0, "stages": [1]}


@pytest.fixture
def compare(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import compare_results

    def run(before: Path, after: Path) -> tuple[int, str]:
        code = compare_results.main([str(before), str(after)])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def before(tmp_path: Path) -> Path:
    folder = tmp_path / "before" / "mine"
    for name in ("ledger", "trials/k", "passes"):
        (folder / name).mkdir(parents=True)
    (folder / "ledger" / "k.json").write_text(json.dumps(RECORD))
    (folder / "passes" / "p.json").write_text("{}")
    (folder / "trials/k/pruning_plan.json").write_text(json.dumps({"taylor_seq_len": 1, "layers": [[1, 0], [1, 1]]}))
    pyarrow.parquet.write_table(pyarrow.table({"acc": [1.0, 0.0]}), folder / "trials/k/items.parquet")
    (folder / "all_methods_results.csv").write_text("model,acc_mean,elapsed_time\nm,0.5,1\n")
    return tmp_path / "before"


def _record(folder: Path, **changes: object) -> None:
    (folder / "ledger" / "k.json").write_text(json.dumps(RECORD | changes))


CHANGES = {
    "another time": (lambda folder: _record(folder, elapsed_time_s=2.0, stages=[]), None),
    "the last bit of a metric": (
        lambda folder: _record(folder, metrics={"acc_mean": 0.5, "ppl": 7.250000000000001}),
        "metrics.ppl is 7.25 before and 7.250000000000001 after",
    ),
    "older names": (
        lambda folder: (folder / "trials/k/pruning_plan.json").write_text(json.dumps({"seq_len": 1, "layers": [[1, 0], [1, 1]]})),
        None,
    ),
    "a lost metric": (lambda folder: _record(folder, metrics={"acc_mean": 0.5}), "metrics.ppl is 7.25 before and missing"),
    "a group": (
        lambda folder: (folder / "trials/k/pruning_plan.json").write_text(json.dumps({"seq_len": 1, "layers": [[1, 0], [0, 1]]})),
        "layers[1][0] is 1 before and 0 after",
    ),
    "an item": (
        lambda folder: pyarrow.parquet.write_table(pyarrow.table({"acc": [1.0, 1.0]}), folder / "trials/k/items.parquet"),
        "the items differ",
    ),
    "a cell": (
        lambda folder: (folder / "all_methods_results.csv").write_text("model,acc_mean,elapsed_time\nm,0.50,2\n"),
        "row 1, acc_mean: '0.5' before and '0.50' after",
    ),
    "a column": (
        lambda folder: (folder / "all_methods_results.csv").write_text("model\nm\n"), "column acc_mean is only before",
    ),
    "a lost trial": (lambda folder: (folder / "ledger" / "k.json").unlink(), "mine/ledger/k.json is only before"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_is_seen(name, before, compare):
    change, sentence = CHANGES[name]
    after = before.with_name("after")
    shutil.copytree(before, after)
    change(after / "mine")
    code, printed = compare(before, after)
    assert code == (0 if sentence is None else 1)
    assert (sentence or "records") in printed


def test_folders_without_results_are_refused(tmp_path, compare):
    for before in (tmp_path, tmp_path / "no"):
        with pytest.raises(SystemExit) as ended:
            compare(before, tmp_path)
        assert ended.value.code == 2
