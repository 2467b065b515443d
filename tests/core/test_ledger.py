"""The ledger: what is written is read back whole, with concurrent writers, after a kill, with non-finite numbers."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pprint import pformat

import numpy as np
import pytest

from tune_prune.core import ledger
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import TrialRecord

RECORD = TrialRecord(
    key="0f",
    model="tiny-llama",
    config={"method": "taylor", "taylor_seq_len": 64, "taylor_num_samples": 128},
    status="complete",
    metrics={"ppl": 12.5, "acc_mean": 0.1 + 0.2},
    stages=[{"stage": "perplexity", "duration_s": 1.5, "tokens": 2048}],
    elapsed_time_s=3.25,
    peak_memory_bytes=2**40,
    host="node ä",
    resources={"CPU": 1.0},
)


def same(first: TrialRecord, second: TrialRecord) -> bool:
    """Equal, NaN being equal to NaN and -0.0 different from 0.0."""
    return pformat(first.to_dict()) == pformat(second.to_dict())


def test_random_records_survive_bit_by_bit(tmp_path: Path) -> None:
    generator = random.Random(0)
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, 5e-324, 1.7976931348623157e308]
    for index in range(50):
        numbers = [
            generator.choice([*special, generator.gauss(0, 10.0 ** generator.randint(-12, 12))]) for _ in range(6)
        ]
        record = replace(
            RECORD,
            key=f"{index:04x}",
            status=generator.choice(["complete", "failed", "stopped_early"]),
            reason=generator.choice(["", "inf", 'line\nline "quoted" \u2028', "nan"]),
            metrics={f"metric_{i}": number for i, number in enumerate(numbers)},
            stages=[{"stage": "zero_shot", "duration_s": numbers[0], "tokens": 3}],
            elapsed_time_s=numbers[1],
        )
        Ledger(tmp_path).write(record)
        read = Ledger(tmp_path).read(record.key)
        assert read is not None
        assert same(read, record)


def test_files_are_strict_and_stable_json(tmp_path: Path) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    record = replace(RECORD, metrics={"ppl": math.inf, "acc_mean": math.nan})
    Ledger(tmp_path).write(record)
    text = (tmp_path / "0f.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse)["metrics"] == {"acc_mean": "nan", "ppl": "inf"}
    assert text.endswith("}\n")
    Ledger(tmp_path).write(replace(record, metrics=dict(reversed(record.metrics.items()))))
    assert (tmp_path / "0f.json").read_text(encoding="utf-8") == text


def test_numpy_numbers_are_written_as_plain_ones() -> None:
    value = {"a": np.float32(0.5), "b": np.int64(3), "c": [np.float64("inf")], "d": np.bool_(True), "e": (1, None)}
    assert json.loads(ledger.to_json(value)) == {"a": 0.5, "b": 3, "c": ["inf"], "d": True, "e": [1, None]}


def test_unknown_key_and_missing_folder(tmp_path: Path) -> None:
    empty = Ledger(tmp_path / "not" / "yet")
    assert empty.read("0f") is None
    assert empty.records() == []
    empty.write(RECORD)
    assert empty.records() == [RECORD]


def test_records_come_by_key_and_are_replaced(tmp_path: Path) -> None:
    trials = Ledger(tmp_path)
    for key in ("b", "a", "c"):
        trials.write(replace(RECORD, key=key))
    trials.write(replace(RECORD, key="b", status="failed", reason="again"))
    assert [(record.key, record.reason) for record in trials.records()] == [("a", ""), ("b", "again"), ("c", "")]


def test_a_killed_writer_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Ledger(tmp_path)
    trials.write(RECORD)

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            trials.write(replace(RECORD, status="failed"))
    assert trials.records() == [RECORD]
    assert [path.name for path in tmp_path.iterdir()] == ["0f.json"]


def test_stray_files_are_ignored(tmp_path: Path) -> None:
    trials = Ledger(tmp_path)
    trials.write(RECORD)
    for name in (".0f.json.abc.tmp", "._0f.json", "notes.txt"):
        (tmp_path / name).write_text("{", encoding="utf-8")
    assert trials.records() == [RECORD]


def test_concurrent_writers_and_readers(tmp_path: Path) -> None:
    """Writers of the same keys race; a reader in between sees whole records only."""
    trials = Ledger(tmp_path)

    def write(number: int) -> int:
        trials.write(replace(RECORD, key=f"{number % 4:02x}", reason="x" * number * 50))
        return len(trials.records())

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(write, range(80)))
    assert max(counts) == 4
    assert [record.key for record in trials.records()] == ["00", "01", "02", "03"]
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())


DAMAGED = {
    "torn": ledger.to_json(RECORD.to_dict())[:-30],
    "empty": "",
    "list": "[]",
    "no_status": json.dumps({"key": "0f", "model": "m", "config": {}}),
    "bad_status": json.dumps(RECORD.to_dict() | {"status": "done"}),
    "bad_metric": json.dumps(RECORD.to_dict() | {"metrics": {"ppl": "12.5 or so"}}),
    "bad_metrics": json.dumps(RECORD.to_dict() | {"metrics": [1]}),
    "bad_stages": json.dumps(RECORD.to_dict() | {"stages": ["perplexity"]}),
    "bad_config": json.dumps(RECORD.to_dict() | {"config": None}),
    "other_key": json.dumps(RECORD.to_dict() | {"key": "10"}),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "0f.json"
    path.write_text(text, encoding="utf-8")
    for read in (Ledger(tmp_path).records, lambda: Ledger(tmp_path).read("0f")):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(f"{path} is ")


def test_a_newer_version_with_more_fields_is_read(tmp_path: Path) -> None:
    (tmp_path / "0f.json").write_text(ledger.to_json(RECORD.to_dict() | {"colour": "blue"}), encoding="utf-8")
    assert Ledger(tmp_path).read("0f") == RECORD


@pytest.mark.parametrize("value", ["1.5", True, None, "Infinity", []])
def test_number_takes_numbers_only(value: object) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        ledger.number(value)
