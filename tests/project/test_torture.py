"""scripts/torture: a short attack for real, and that it sees what it looks for."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torture import attacked
from torture.attacked import MARK, Attacked
from torture.attacks import wrong_end

SCRIPT = Path(__file__).parents[2] / "scripts" / "torture"


def lines_of(output: Path, *flags: str) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """What a run of one search for each attack has written, and the words of its table's last lines, one for each."""
    command = [sys.executable, str(SCRIPT), *flags, "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return lines, [line.split() for line in run.stdout.splitlines()[-len(lines) :]]


@pytest.mark.slow
def test_a_hostile_search_that_is_killed_loses_and_repeats_nothing(tmp_path: Path) -> None:
    ((line,), table) = lines_of(tmp_path / "out", "--only", "hostile", "--searches", "1", "--kills", "3", "--seed", "2")
    assert 1 <= line["kills"] <= 3 and line["problems"] == []
    assert table == [["hostile", "1", str(line["kills"]), "0"]]


@pytest.mark.slow
def test_a_short_search_that_is_killed_and_damaged_loses_and_repeats_nothing(tmp_path: Path) -> None:
    short = ("--short", "--only", "workers,damage", "--searches", "2", "--kills", "1", "--seed", "72")
    (lines, table) = lines_of(tmp_path / "out", *short)
    (workers, damage) = lines
    assert workers["kills"] == 1 and damage["kills"] >= 2  # times that a file was damaged count, too
    assert workers["problems"] == damage["problems"] == []
    assert table == [[line["attack"], "1", str(line["kills"]), "0"] for line in lines]


def test_an_attack_without_a_short_form_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert importlib.import_module("torture.__main__").main(["--short", "--only", "workers,s3"]) == 2
    assert capsys.readouterr().err == "error: s3 has no --short form; leave it out, or name another attack\n"


@pytest.mark.slow
def test_an_unknown_attack_is_a_sentence() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", "disks"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert (
        "unknown attack 'disks'; known: workers, recipes, searches, cluster, hostile, damage, drivers, disk, s3"
        in run.stderr
    )


def test_no_attack_that_can_be_made_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torture_main = importlib.import_module("torture.__main__")
    monkeypatch.setattr(torture_main.os, "getuid", lambda: 1000)
    monkeypatch.setattr(torture_main, "undisturbed", lambda *given: pytest.fail("a search was made"))
    assert torture_main.main(["--only", "disk"]) == 2
    assert capsys.readouterr().err.startswith("error: no attack is left to make; name another one with --only")


@pytest.fixture
def search(tmp_path: Path) -> Attacked:
    """One with two records, one of them complete."""
    search = Attacked(tmp_path / "attacked", ("--model", "tiny-llama"))
    folder = search.experiment / "ledger"
    folder.mkdir(parents=True)
    for name, status in (("a", "complete"), ("b", "failed")):
        record = {"key": name, "status": status, "config": {"method": name}, "reason": "", "metrics": {"ppl": 2.5}}
        (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    search.look()
    return search


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.unlink(), "a.json is lost"),
        (lambda file: file.write_text(file.read_text().replace("2.5", "2.6")), "a.json is written again"),
        (lambda file: file.write_text("{"), "a.json is not valid"),
    ],
)
def test_records_that_are_lost_or_changed_are_seen(search: Attacked, change, problem: str) -> None:
    search.look()
    assert search.problems == []
    change(search.experiment / "ledger" / "a.json")
    search.look()
    assert search.problems[0].startswith(problem)


def test_what_outlives_a_search_is_seen(search: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacked, "LEFT_S", 0.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=search.variables())
    try:
        assert attacked.wait_until(lambda: [one.pid for one in search.processes()] == [child.pid], 10)
        search.gone()
    finally:
        child.kill()
        child.wait()
    assert search.problems.pop().startswith(f"process {child.pid} is left")
    (search.temporary / "tune_prune_x").mkdir()
    search.no_files_left()
    assert search.problems.pop() == "temporary files are left: tune_prune_x"
    assert os.environ.get(MARK) is None


@pytest.mark.parametrize("removed", [True, False])
def test_partial_files_that_no_start_removes_are_seen(search: Attacked, removed: bool) -> None:
    partial = search.experiment / "ledger" / f".a.json.{'0' * 32}.tmp"
    partial.write_text("{")
    for name in (".lock", ".lock.json"):
        (search.experiment / name).touch()
    ages = "all(p.stat().st_mtime == 0 for p in found)"
    code = f"import pathlib, sys; found = list(pathlib.Path(sys.argv[-1]).rglob('*.tmp')); assert {ages}\n"
    search.program = ("-c", code + "for p in found: p.unlink()" * removed)
    search.no_partial_files()
    assert search.problems == ([] if removed else [f"partial files are left: {partial.name}"])


def test_how_a_search_ends_when_its_head_has_died() -> None:
    sentence = "error: Ray has ended: its head at 127.0.0.1:6379 died (load 1 of 2 CPUs)\n"
    advice = "finished trials are kept; to go on, run the same command again:\n  tune-prune search --address a:1\n"
    assert wrong_end(1, sentence + advice) == ""
    assert wrong_end(0, sentence + advice) == "exit code 0 and not 1"
    assert wrong_end(1, sentence) == "no line that resumes it"
    assert (
        wrong_end(1, advice)
        == "no sentence, or a traceback"
        == wrong_end(1, "Traceback (most recent call last)\n" + sentence)
    )


def test_other_numbers_than_those_of_an_undisturbed_search_are_seen(search: Attacked, tmp_path: Path) -> None:
    reference = Attacked(tmp_path / "reference", search.flags).experiment / "ledger"
    reference.mkdir(parents=True)
    record = json.loads((search.experiment / "ledger" / "a.json").read_text(encoding="utf-8"))
    (reference / "a.json").write_text(json.dumps(record | {"metrics": {"ppl": 2.6}}), encoding="utf-8")
    search.finished(reference.parent, same=False)
    failed, differs = search.problems
    assert failed.startswith("{'method': 'b'} failed")
    assert differs.endswith("ppl is 2.6 before and 2.5 after")
