"""The way in which a search holds its models: chosen by what is free or by --memory, said by a dry run, and of no effect on
any number."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import tune_prune
from tune_prune.commands import prune
from tune_prune.core import machine
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger, read_passes
from tune_prune.core.machine import Memory, parse_size
from tune_prune.core.store import FolderStore
from tune_prune.models.runner.residency import WAYS
from tune_prune.tuning import memory_bounds
from tune_prune.tuning.memory import INLINE_BYTES
from tune_prune.tuning.plan import Plan, SearchSettings
from tune_prune.tuning.preflight import make_plan

pytestmark = pytest.mark.usefixtures("tensors_alone")
SPACE = "search: grid\nmethod: [taylor, layerwise]\nseq_len: 256\nnum_samples: [5, 32]\n"


def planned(**settings: object) -> Plan:
    return make_plan(SearchSettings(("tiny-llama",), "space.yaml", tasks=("boolq",), limit=4, inline=True, **settings))


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that a trial of the space takes layer by layer: less than with the gradients of the whole model."""
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)
    whole, by_layer, *_ = planned().models[0].ways
    assert by_layer.total < whole.total
    return by_layer.total


def mebibytes(amount: int) -> str:
    return f"{-(-amount // 2**20)}MiB"


def test_amounts_of_memory() -> None:
    amounts = {"20GiB": 20 * 2**30, "24 GB": 24 * 10**9, "900mib": 900 * 2**20, "1.5TiB": 1536 * 2**30}
    assert {text: parse_size(text) for text in amounts} == amounts
    for text in ("1MB", "-3GiB", "20G", "9999TiB"):
        with pytest.raises(ValueError, match="is not an amount of memory of 1 MiB or more, such as 20GiB, 24GB or"):
            parse_size(text)


def test_the_whole_model_at_once_where_that_fits(bound: int) -> None:
    assert str(planned().memory.way) == "resident"
    assert str(planned(memory=bound).memory.way) == "by layer"
    resident = planned().memory.total
    assert [str(planned(memory=resident - less).memory.way) for less in (0, 1)] == ["resident", "by layer"]


def test_memory_that_is_free_decides_where_none_is_named(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of the trials that run at once."""
    worker = bound - INLINE_BYTES["cpu"]
    for free, slots, way in ((worker, 1, "by layer"), (4 * worker, 4, "by layer"), (8 * worker, 4, "resident")):
        monkeypatch.setattr(machine, "memory", lambda free=free: Memory(2**40, free))
        monkeypatch.setattr(memory_bounds, "trial_slots", lambda *_, slots=slots: slots)
        plan = make_plan(SearchSettings(("tiny-llama",), "space.yaml", tasks=("boolq",), limit=4))
        assert str(plan.memory.way) == way
    monkeypatch.setattr(machine, "memory", lambda: Memory(2**40, bound // 2))
    with pytest.raises(UserError, match=r"a trial needs about .* are free; end other programs"):
        planned()


def test_a_file_is_for_hidden_states_that_fit_on_its_disk(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_file = next(plan for plan in planned().models[0].ways if str(plan.way) == "by layer, states in a file")
    room = {"free": in_file.away}
    monkeypatch.setattr(machine, "in_memory", lambda _: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(**room))
    assert str(planned(memory=in_file.total).memory.way) == "by layer, states in a file"
    for free, in_memory in ((in_file.away - 1, False), (in_file.away, True)):
        room["free"] = free
        monkeypatch.setattr(machine, "in_memory", lambda _, found=in_memory: found)
        with pytest.raises(UserError, match=r"with a file of .* in .*, where .* are free: set TMPDIR to"):
            planned(memory=in_file.total)


@pytest.mark.slow
def test_no_number_knows_the_way(bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole records of a search, and its identity; what the passes were is noted."""
    least, found = min(plan.total for plan in planned().models[0].ways), {}
    streamed = tuple(way for way in WAYS if way.from_files and way.states == "file")
    for name, memory, ways in (
        ("whole", None, WAYS),
        ("lean", mebibytes(bound), WAYS),
        ("copies read", None, streamed[:1]),
        ("streamed", mebibytes(least), WAYS),  # as on a GPU that is too small for any other way
    ):
        monkeypatch.setattr("tune_prune.tuning.memory.WAYS", ways)
        folder = tmp_path / name
        tune_prune.search(
            "tiny-llama", "space.yaml", tasks=["boolq"], limit=4, inline=True, gpus_per_trial=0, storage_path=folder,
            name="one", memory=memory,
        )  # fmt: skip
        store = FolderStore(folder / "one")
        records = [
            replace(record, search_id="", started_at="", elapsed_time_s=0, peak_memory_bytes=0, stages=[])
            for record in Ledger(store).records()
        ]
        identity = json.loads((folder / "one" / "experiment.json").read_text())["models"]
        trial_files = sorted(
            (path.relative_to(folder), path.read_bytes()) for path in (folder / "one" / "trials").rglob("*.json")
        )
        passes = {one["stage"]: one["way"] for one in read_passes(store)}
        stages = [stage for one in Ledger(store).records() for stage in one.stages if stage.tokens]
        (measured,) = {stage.way for stage in stages if stage.stage == "zero_shot"}
        found[name] = [records, identity, trial_files], passes | {"zero_shot": measured}
    whole, ways = found["whole"]
    assert len(whole[0]) == 4 and all(record.status == "complete" for record in whole[0])
    assert all(other == whole for other, _ in found.values())
    in_file = "streamed, states in a file"
    assert [ways for _, ways in found.values()] == [
        {"importance": "", "removal": "", "zero_shot": ""},
        {"importance": "by layer", "removal": "", "zero_shot": ""},
        {"importance": in_file, "removal": in_file, "zero_shot": ""},
        {"importance": in_file, "removal": in_file, "zero_shot": in_file},
    ]


def test_too_little_memory_is_a_sentence_with_what_would_fit(refusal: Callable[..., str], bound: int) -> None:
    argv = ("--model", "tiny-llama", "--search-space", "space.yaml", "--gpus-per-trial", "0", "--inline")
    sentence = refusal(*argv, "--memory", "100MiB")
    found = re.search(
        r"--memory is 100 MiB, but a trial of tiny-llama needs \S+ [MG]iB in its leanest way \(by layer.*; the most in its stage "
        r"\w+\); use --memory (\S+) or more",
        sentence,
    )
    assert found, sentence
    enough = parse_size(found[1])
    assert make_plan(SearchSettings(("tiny-llama",), "space.yaml", memory=enough, inline=True)).memory.total <= enough


def test_a_model_is_pruned_within_what_it_may_take(refused: Callable[..., str], tmp_path: Path) -> None:
    """A leaner way finds the same plan, and the command line's sentence says what would fit."""
    taylor = {"seq_len": 256, "num_samples": 16}
    argv = ("--model", "tiny-llama", "--method", "taylor", "--seq-len", "256", "--num-samples", "16", "--device", "cpu")
    sentence = refused(prune.main, *argv, "--output", tmp_path / "out", "--memory", "100MiB", begun=True)
    found = re.search(
        "100 MiB, but to prune tiny-llama by taylor-s256-n16 needs .*; use --memory (\\S+) or more", sentence
    )
    assert found, sentence
    whole = tune_prune.open("tiny-llama", device="cpu").prune("taylor", **taylor)
    lean = tune_prune.open("tiny-llama", device="cpu", memory=found[1])
    assert str(lean._way(whole.config, None)) == "streamed, states in a file"
    assert lean.prune("taylor", **taylor).plan == whole.plan
