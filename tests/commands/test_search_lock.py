"""Two searches on one experiment: the second leaves with a sentence before it has written anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tune_prune.commands import search
from tune_prune.core.store import FolderStore

HOLD = """
import sys
from tune_prune.core.store import FolderStore
with FolderStore(sys.argv[1]).lock():
    print(flush=True)
    sys.stdin.read()
"""


def test_a_second_search_leaves_and_a_dry_run_does_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = FolderStore(tmp_path / "busy")
    argv = ["--model", "tiny-llama", "--search-space", "smoke", "--storage-path", str(tmp_path), "--name", "busy"]
    running = [sys.executable, "-c", HOLD, str(store.folder)]
    with subprocess.Popen(running, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"\n"
        contents = {
            "experiment.json": '{"models": {}}',
            "baseline.json": "{}",
            "tensorboard/tiny-llama/taylor/events": "of the first",
        }
        store.put_all(contents)
        before = sorted(store.folder.rglob("*"))
        assert search.main(argv) == 2
        said = capfd.readouterr().err
        assert said.startswith(f"error: another search runs on experiment {store.folder} (process {first.pid} on ")
        assert said.count("\n") == 1 and "--name" in said
        assert sorted(store.folder.rglob("*")) == before
        assert {name: store.path(name).read_text() for name in contents} == contents
        assert search.main([*argv, "--dry-run"]) == 0
        first.kill()
