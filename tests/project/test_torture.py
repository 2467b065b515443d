"""scripts/torture: a short attack for real, and that it sees what it looks for."""

from __future__ import annotations

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
    """Return what a run of one search for each attack has written, and the words of its table's last lines, one for each."""
    command = [sys.executable, str(SCRIPT), *flags, "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return lines, [line.split() for line in run.stdout.splitlines()[-len(lines) :]]


@pytest.mark.slow
def test_short_searches_that_are_killed_damaged_and_hostile_lose_and_repeat_nothing(tmp_path: Path) -> None:
    short = ("--short", "--only", "workers,damage,hostile", "--searches", "3", "--kills", "1", "--seed", "72")
    (lines, table) = lines_of(tmp_path / "out", *short)
    (workers, damage, hostile) = lines
    assert workers["kills"] == hostile["kills"] == 1
    assert damage["kills"] >= 2  # times that a file was damaged count, too
    assert [line["problems"] for line in lines] == [[]] * 3
    assert table == [[line["attack"], "1", str(line["kills"]), "0"] for line in lines]


@pytest.fixture
def search(tmp_path: Path) -> Attacked:
    """Make a search with two records, one of them complete."""
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
