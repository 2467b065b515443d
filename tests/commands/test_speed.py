"""`speed`: a checkpoint and a search's configurations beside their dense model: real models, and a fake clock."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import tune_prune
from tests.search_folders import model_folder
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import find
from tune_prune.checkpoint import generation_speed
from tune_prune.commands import speed
from tune_prune.core.speed_records import SpeedRecord, readable_speeds
from tune_prune.core.store import FolderStore

FINISHED = Path(__file__).parents[1] / "finished"
SHORT = ("--prompt-tokens", "8", "--new-tokens", "2", "--device", "cpu")
# Seconds of each round's turns, the warm-up first: prefill and decode of the dense model, then of the pruned one
ROUNDS = [(9.0, 9.0, 9.0, 9.0), (4.0, 8.0, 2.0, 8.0), (8.0, 8.0, 2.0, 4.0), (6.0, 12.0, 6.0, 10.0)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """ROUNDS again and again, and how often the clock was read."""
    reads = 0

    def ticks() -> Iterator[float]:
        time = 0.0
        while True:
            for prefill_dense, decode_dense, prefill, decode in ROUNDS:
                for seconds in ((0, prefill_dense, decode_dense), (0, prefill, decode)):
                    for step in seconds:
                        time += step
                        yield time

    source = ticks()

    def now(_: torch.device) -> float:
        nonlocal reads
        reads += 1
        return next(source)

    monkeypatch.setattr(generation_speed, "_now", now)
    return lambda: reads


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    name = "tiny-llama-20-smoke-limit5"
    return Path(shutil.copytree(FINISHED / "storage" / name, tmp_path / name))


@pytest.fixture(scope="module")
def pruned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "pruned"
    tune_prune.open("tiny-llama", device="cpu").prune("magnitude").save(folder)
    return folder


@pytest.fixture
def sentence(refused: Callable[..., str]) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which the command refuses."""
    return partial(refused, speed.main)


def records(experiment: Path) -> dict[str, SpeedRecord]:
    found, damaged = readable_speeds(FolderStore(experiment))
    assert not damaged
    return {record.key: record for record in found}


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent.name != "speed"}


def test_what_the_rules_choose_is_measured_once(experiment, printed, clock):
    """Medians of the rounds that count, their ratio, and its lowest and highest; a second run has nothing to do, and what a kill
    has left out is all that it does. No file of a trial changes."""
    argv = ("--config", experiment, *SHORT, "--repeats", "3")
    before = contents(experiment)
    out = printed(speed.main, *argv)
    found = find(read_study([experiment], [])).models["tiny-llama"]
    chosen = {name for names in found.chosen.values() for name in names}
    made = records(experiment)
    names = {Path(row["output_dir"]).name: row["name"] for _, row in found.eligible.iterrows()}
    assert 1 < len(chosen) < len(names) and {names[key] for key in made} == chosen
    assert f"measured     {len(chosen)} of them now; all are kept in {experiment / 'speed'}" in out
    assert clock() == len(chosen) * len(ROUNDS) * 2 * 3
    for record in made.values():
        assert (record.prefill.value, record.prefill.lowest, record.prefill.highest) == (6 / 2, 1.0, 4.0)
        assert (record.decode.value, record.decode.lowest, record.decode.highest) == (8 / 8, 1.0, 2.0)
        assert (record.total.value, record.total.lowest, record.total.highest) == (16 / 10, 1.125, 16 / 6)
        shared = record.conditions
        assert (shared.prompt_tokens, shared.new_tokens, shared.batch_size, shared.repeats) == (8, 2, 1, 3)
        assert shared.dtype == "float32" and shared.device.endswith(" thread") and not record.graph
        assert record.dense_kv_bytes_per_token == 1280 and 0 < record.kv_bytes_per_token < 1280
        line = rf"^  {names[record.key]} +prefill 3\.00x \(1\.00 to 4\.00\)  decode 1\.00x \(1\.00 to 2\.00\)$"
        assert re.search(line, out, re.MULTILINE), out
    best, unclear = found.eligible["name"].iloc[0], "not clearly faster or slower"  # in one round of three
    assert (
        f"\nspeed        {unclear} at prefill (reading the prompt), {unclear} at decode (writing the answer): {best}, the"
        in out
    )
    assert contents(experiment) == before

    assert f"measured     {len(chosen)} of them now; all are kept in {experiment / 'speed'}\n" in out
    again = printed(speed.main, *argv)
    assert "measured     0 of" in again and again.count("(measured before)") == len(chosen)
    lost = sorted((experiment / "speed").iterdir())[0]
    lost.unlink()
    resumed = printed(speed.main, *argv)
    assert "measured     1 of" in resumed and records(experiment).keys() == made.keys()
    assert clock() == (len(chosen) + 1) * len(ROUNDS) * 2 * 3
    assert f"measured     {len(chosen)} of" in printed(speed.main, *argv, "--overwrite")
    assert len(list((experiment / "speed").iterdir())) == len(chosen)


def test_a_checkpoint_beside_its_dense_model(pruned, tmp_path, printed, clock):
    record = tmp_path / "speed.json"
    argv = ("--model", pruned, *SHORT, "--repeats", "3", "--output", record)
    for _ in range(2):  # its own record is replaced
        out = printed(speed.main, *argv)
    assert re.search(r"^original +4 +1\.00x +0\.25 +1\.00x ", out.replace("1.33", "4"), re.MULTILINE), out
    assert re.search(r"^pruned .* 3\.00x  \(1\.00 to 4\.00\) .* 1\.00x  \(1\.00 to 2\.00\) ", out, re.MULTILINE), out
    assert out.startswith("speed        not clearly faster or slower at prefill")  # in one round it was not faster
    assert "prompt of 8 tokens, 2 new tokens, batch size 1, median of 3, float32 on CPU" in out
    assert re.search(r"^pruned +127,\d+ +80\.\d%", out, re.MULTILINE) and "bytes on disk" not in out
    values = json.loads(record.read_text())
    assert list(values["models"]) == ["dense", "pruned"]
    assert values["models"]["pruned"]["prefill_s"] == [2.0, 2.0, 6.0]
    assert values["models"]["dense"]["kv_bytes_per_token"] == 1280
    alone = printed(speed.main, "--model", "tiny-llama", *SHORT, "--repeats", "3")
    assert "tiny-llama" in alone and "pruned" not in alone and "(" not in alone


def test_what_cannot_be_measured_is_one_sentence(experiment, tmp_path, sentence):
    other = model_folder(tmp_path / "other", rms_norm_eps=0.1)
    assert "is an embedded model; leave it out" in sentence("--config", experiment, "--revision", "x")
    told = sentence("--config", experiment, "--base", other)
    assert f"{other} is not the model that was searched" in told and "--base" in told
    only = tmp_path / "only"
    only.mkdir()
    shutil.copy(experiment / "all_methods_results.csv", only)
    assert "does not say which model" in sentence("--config", only)
