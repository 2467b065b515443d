"""`make demo`, as docs/recipes.md says: killed in the middle and run again, it ends right."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tune_prune.__main__ import HELP
from tune_prune.core.ledger import Ledger
from tune_prune.core.store import FolderStore

ROOT = Path(__file__).parents[2]
NAME = "tiny-llama-20-paper_grid"
# The same search with fewer trials and items, under the name that the lines behind it read.
SPACE = "search: grid\nmethod: [taylor, layerwise]\nseq_len: 16\nnum_samples: [8, 16]\n"
FEWER = ["--search-space", "fewer.yaml", "--tasks", "boolq,piqa", "--limit", "5", "--name", NAME]


def demo() -> list[list[str]]:
    """The commands of `make demo`, with this Python."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndemo:")[1].split("\n\n")[0]
    lines = re.findall(r"^\t\$\(BIN\)/tune-prune (.+)$", recipe, re.MULTILINE)
    first, _, _ = lines[0].partition(" --output ")
    assert len(lines) == 4 and f"tune-prune {first}\n" in HELP  # the first try that the program's page names
    return [[sys.executable, "-m", "tune_prune", *line.split()] for line in lines]


@pytest.mark.slow
def test_a_demo_that_was_killed_in_the_middle_ends_right_when_it_is_run_again(tmp_path, monkeypatch):
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert (
        "    make demo    # stop it: Ctrl-C, kill -9, a power cut\n    make demo    # goes on where it was" in recipes
    )
    _, search, *others = demo()
    (tmp_path / "fewer.yaml").write_text(SPACE)
    ledger = Ledger(FolderStore(tmp_path / "ray_results" / NAME))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def begin(command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    first = begin([*search, *FEWER, "--inline"])  # tests/tuning/test_tuning.py kills one with its Ray
    until = time.monotonic() + 120
    while not ledger.records() and first.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {record.key: record for record in ledger.records()}
    assert 1 <= len(before) < 4
    for command in ([*search, *FEWER], *others):
        again = begin(command)
        said, _ = again.communicate(timeout=300)
        assert again.returncode == 0, said
    after = {record.key: record for record in ledger.records()}
    assert len(after) == 4 and {record.status for record in after.values()} == {"complete"}
    assert {key: after[key] for key in before} == before
    best = json.loads((tmp_path / "ray_results" / NAME / "global_best_config.json").read_text(encoding="utf-8"))
    assert best["models"]["tiny-llama"]["method"] in ("taylor", "layerwise")
    assert (tmp_path / "results" / "report.html").exists()
    assert (tmp_path / "results" / "tiny-llama-pruned" / "config.json").exists()
