"""The ledger: what is written is read back whole, with non-finite numbers; what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import math
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest

from tune_prune.core import files
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, trial_key
from tune_prune.core.errors import UserError
from tune_prune.core.files import DamagedFile
from tune_prune.core.hashing import sealed
from tune_prune.core.ledger import Experiment, Ledger, read_passes, stranger, trial_file, write_pass
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import FolderStore, Store

RECORD = TrialRecord(
    key="0f",
    model="tiny-llama",
    config=PruningConfig("taylor", 64, 128),
    status="complete",
    metrics={"ppl": 12.5, "acc_mean": 0.1 + 0.2},
    stages=[StageReport("perplexity", 1.5, tokens=2048)],
    elapsed_time_s=3.25,
    peak_memory_bytes=2**40,
    host="node ä",
    device_name="GPU 1",
    torch_version="2.0",
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
            stages=[StageReport("zero_shot", abs(generator.gauss(0, 1)), tokens=3, way="nan")],
            elapsed_time_s=generator.choice([math.inf, 5e-324, 1.7976931348623157e308]),
        )
        Ledger(FolderStore(tmp_path)).write(record)
        read = Ledger(FolderStore(tmp_path)).read(record.key)
        assert read is not None
        assert same(read, record)


def test_files_are_strict_and_stable_json(tmp_path: Path) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    record = replace(RECORD, metrics={"ppl": math.inf, "acc_mean": math.nan})
    Ledger(FolderStore(tmp_path)).write(record)
    text = (tmp_path / "ledger" / "0f.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=refuse)["metrics"] == {"acc_mean": "nan", "ppl": "inf"}
    assert text.endswith("}\n")
    Ledger(FolderStore(tmp_path)).write(replace(record, metrics=dict(reversed(record.metrics.items()))))
    assert (tmp_path / "ledger" / "0f.json").read_text(encoding="utf-8") == text


def test_unknown_key_and_missing_folder(tmp_path: Path) -> None:
    empty = Ledger(FolderStore(tmp_path / "not" / "yet"))
    assert empty.read("0f") is None
    assert empty.records() == []
    empty.write(RECORD)
    assert empty.records() == [RECORD]


def test_records_come_by_key_and_only_failed_ones_are_replaced(tmp_path: Path) -> None:
    trials = Ledger(FolderStore(tmp_path))
    for key in ("b", "a", "c"):
        trials.write(replace(RECORD, key=key))
    failed = replace(RECORD, key="d", status="failed", reason="first")
    assert trials.write(failed) == failed
    for status in ("failed", "stopped_early", "complete", "failed"):
        trials.write(replace(RECORD, key="d", status=status, reason=f"{status} later"))
    late = replace(RECORD, key="b", status="failed", reason="its worker was thought dead")
    assert trials.write(late) == replace(RECORD, key="b")
    reasons = [(record.key, record.reason) for record in trials.records()]
    assert reasons == [("a", ""), ("b", ""), ("c", ""), ("d", "stopped_early later")]


@pytest.mark.parametrize("earlier", ["failed", "none"])
def test_a_record_that_is_finished_while_a_failure_is_written_stays(tmp_path: Path, earlier: str) -> None:
    """Whichever request of the one process the other's record comes before."""
    finished, failed = replace(RECORD, reason="finished"), replace(RECORD, status="failed", reason="lost worker")

    def write(place: Store, other_at: int) -> int:
        """The requests that it has taken."""
        requests = 0

        class Interrupted(type(place)):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> object:
                nonlocal requests
                if name in ("get", "put", "put_new", "remove", "has", "names"):
                    requests += 1
                    if requests == other_at:
                        assert Ledger(place).write(finished) == finished
                return super().__getattribute__(name)

        if earlier == "failed":
            Ledger(place).write(replace(failed, reason="before"))
        Ledger(Interrupted(place.folder)).write(failed)
        return requests

    for number in range(1, 20):
        place = FolderStore(tmp_path / f"{number}")
        requests, records = write(place, number), Ledger(place).records()
        assert records == [finished] if requests >= number else [failed], (place, number, requests)
        assert Ledger(place).read("0f") == records[0]
    assert requests < number  # so it has come before each of them


def test_a_failure_has_a_file_of_its_own_until_the_trial_is_finished(tmp_path: Path) -> None:
    trials, failed = Ledger(FolderStore(tmp_path)), replace(RECORD, status="failed")
    trials.write(failed)
    assert trials.path("0f") == tmp_path / "ledger" / "0f.failed.json" and trials.path("0f").is_file()
    text = trials.path("0f").read_text()
    trials.write(RECORD)
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["0f.json"] == [trials.path("0f").name]
    (tmp_path / "ledger" / "0f.failed.json").write_text(text)  # of one who comes late
    assert trials.records() == [RECORD] == [trials.read("0f")]


def with_field(name: str, value: object) -> dict[str, Any]:
    return RECORD.to_dict() | {name: value}


# What is sealed in the file, and what the sentence must hold: the field, its value and what it must be.
DAMAGED = {
    "no_config": ({"key": "0f", "model": "m", "config": "taylor"}, "not a trial record (config."),
    "bad_status": (with_field("status", "done"), "(status is 'done'; it must be 'running', 'complete', 'failed' or"),
    "bad_metric": (with_field("metrics", {"ppl": "12.5 or so"}), "(metrics.ppl is '12.5 or so'; it must be a number)"),
    "negative_time": (with_field("elapsed_time_s", -1.0), "it must be greater than or equal to 0)"),
    "stage_without": (with_field("stages", [{"stage": "perplexity"}]), "(stages[0].duration_s is missing)"),
    "no_method": (with_field("config", {"seq_len": 64}), "not a trial record (config."),
    "ratio": (
        with_field("config", PruningConfig("taylor", 64, 128).to_dict() | {"pruning_ratio": 7}),
        "not a trial record (config.pruning_ratio is 7; it must be a number above 0 and below 1",
    ),
}
# What stands in the file without a seal that holds.
UNSEALED = {
    "torn": (sealed("ledger/0f.json", RECORD.to_dict())[:-30], "its checksum does not match"),
    "empty": ("", "without a checksum"),
    "unsealed": (files.to_json(RECORD.to_dict()), "without a checksum"),
    "of another": (sealed("ledger/0e.json", RECORD.to_dict()), "its checksum does not match"),
}


@pytest.mark.parametrize(("content", "expected"), (DAMAGED | UNSEALED).values(), ids=DAMAGED | UNSEALED)
def test_damaged_file_is_named(tmp_path: Path, content: Any, expected: str) -> None:
    store = FolderStore(tmp_path)
    store.put("ledger/0f.json", content if isinstance(content, str) else sealed("ledger/0f.json", content))
    Ledger(store).write(replace(RECORD, key="10"))
    path = Ledger(store).path("0f")
    for read in (Ledger(store).records, lambda: Ledger(store).read("0f")):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(f"{path} is ") and expected in str(caught.value)
    records, damaged = Ledger(store).readable()
    assert [record.key for record in records] == ["10"]
    assert [error.path for error in damaged] == [path] and expected in damaged[0].what


def test_the_ledger_is_read_with_a_request_a_record(tmp_path: Path) -> None:
    """Many threads read where the store is far away."""
    asked: list[str] = []
    threads = set()

    class Counted(FolderStore):
        readers = 4

        def get(self, name: str) -> bytes | None:
            asked.append(name)
            threads.add(threading.get_ident())
            time.sleep(0.01)
            return super().get(name)

    keys = [f"{number:04x}" for number in range(30)]
    for key in keys:
        Ledger(FolderStore(tmp_path)).write(replace(RECORD, key=key))
    assert [record.key for record in Ledger(Counted(tmp_path)).records()] == keys
    assert sorted(asked) == [f"ledger/{key}.json" for key in keys] and len(threads) > 1
    asked.clear()
    assert len(Experiment.read(Counted(tmp_path)).records) == 30
    assert sorted(asked) == sorted(["baseline.json", "experiment.json", *(f"ledger/{key}.json" for key in keys)])


def test_every_flipped_character_of_a_sealed_record_is_seen(tmp_path: Path) -> None:
    """Whatever is changed in the text, the record is refused, or says the same."""
    store, record = FolderStore(tmp_path), replace(RECORD, metrics={"acc_mean": 0.25})  # of no superfluous digit
    Ledger(store).write(record)
    path = store.path("ledger/0f.json")
    text, accepted, named = path.read_text(encoding="utf-8"), [], set()
    for place, old in enumerate(text):
        new = str((int(old) + 1) % 10) if old.isdigit() else "#" if old.isspace() else chr(ord(old) ^ 1)
        path.write_text(text[:place] + new + text[place + 1 :], encoding="utf-8")
        try:
            assert Ledger(store).read("0f") == record, text[place - 20 : place + 1]
            accepted.append(place)
        except DamagedFile as error:
            named.add(error.path)
    assert accepted == [] and named == {path}
    path.write_text(text, encoding="utf-8")
    assert Ledger(store).read("0f") == record


def test_a_trials_files_are_those_that_it_wrote(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("trials/0f/items.parquet", b"items")
    store.put("trials/0f/other", b"anything")
    folder = store.path("trials/0f")
    store.put("elsewhere/items.parquet", b"moved")
    assert trial_file(store.path("elsewhere"), "items.parquet") == b"moved"
    assert trial_file(folder, "items.parquet") == b"items"  # without a record
    Ledger(store).write(replace(RECORD, files={"items.parquet": hashlib.sha256(b"items").hexdigest()}))
    assert trial_file(folder, "items.parquet") == b"items" and trial_file(folder, "other") == b"anything"
    store.put("trials/0f/items.parquet", b"itens")
    with pytest.raises(DamagedFile) as caught:
        trial_file(folder, "items.parquet")
    assert caught.value.path == folder / "items.parquet"
    assert f"; delete {store.path('ledger/0f.json')} to have that trial run again" in str(caught.value)
    store.path("trials/0f/items.parquet").unlink()
    assert trial_file(folder, "items.parquet") is None


def test_a_pass_is_not_another_one(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for seconds in (1.0, 2.0):
        write_pass(store, {"model": "tiny", "seq_len": 16}, StageReport("importance", seconds, tokens=8))
    first, second = store.names("passes")
    assert sorted(values["duration_s"] for values in read_passes(store)) == [1.0, 2.0]
    store.put(first, store.get(second) or b"")
    with pytest.raises(DamagedFile) as caught:
        read_passes(store)
    assert caught.value.path == store.path(first) and "its checksum does not match" in caught.value.what


RUN = ModelRun("tiny", "tiny", None, "embedded", None, EvaluationProtocol(tasks=("boolq",)), 0, "float32")
CONFIG = PruningConfig("taylor", 64, 128, 0.2)
ABOUT = {
    "models": {
        "tiny": {
            "run": json.loads(files.to_json(RUN.to_dict())),
            "meaning": {"model": "m", "data": "d", "pruning_ratio": 0.2, "shape": ["free", "uniform"]},
        }
    }
}


def of_trial(config: PruningConfig | None = CONFIG, run: ModelRun = RUN, data: str = "d") -> TrialRecord:
    return TrialRecord(trial_key(config, "m", data, run), run.label, config, "complete")


def test_a_key_shows_whether_a_record_is_of_the_experiment() -> None:
    own = [of_trial(), of_trial(replace(CONFIG, shape="uniform")), of_trial(None)]
    assert [stranger(record, ABOUT) for record in own] == ["", "", ""]
    limit = replace(RUN, protocol=replace(RUN.protocol, limit=5))
    others = [
        of_trial(run=replace(RUN, seed=1)),
        of_trial(run=limit),
        of_trial(None, run=limit),
        of_trial(data="x"),
        replace(of_trial(), config=replace(CONFIG, seq_len=32)),
    ]
    for record in others:
        assert stranger(record, ABOUT).startswith("of another search: its key would be "), record
    assert "its pruning_ratio is 0.3, in experiment.json 0.2" in stranger(
        of_trial(replace(CONFIG, pruning_ratio=0.3)), ABOUT
    )
    assert "its shape is aligned-8" in stranger(of_trial(replace(CONFIG, shape="aligned-8")), ABOUT)
    assert "of a model, huge, that" in stranger(replace(of_trial(), model="huge"), ABOUT)
    assert stranger(others[0], {}) == ""  # nothing is known
