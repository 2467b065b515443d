"""scripts/questions_text.py: the right answers of items that a search does not measure, and of no others."""

from __future__ import annotations

import json
import re

import pytest
from questions_text import main

from tune_prune.commands import search
from tune_prune.embedded import tasks_dir


def test_it_holds_the_right_answers_of_the_items_that_are_not_measured(tmp_path, capsys):
    path = tmp_path / "questions.txt"
    argv = ["--model", "tiny-llama", "--tasks", "piqa,openbookqa", "--after", "4", "--most", "3", "--output", str(path)]
    assert main(argv) == 0
    assert "6 questions of piqa,openbookqa, from item 4 on" in capsys.readouterr().out
    found = path.read_text().strip().split("\n\n")
    lines = (tasks_dir() / "piqa" / "test.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines[4:7]]
    assert len(found) == 6
    for item, text in zip(items, found[::2], strict=True):  # a question of each task in turn, in words of the tokenizer
        right, wrong = (item[name].rstrip(".") for name in ("sol1", "sol2")[:: 1 - 2 * item["label"]])
        assert item["goal"] in text and right in text and wrong not in text


@pytest.mark.slow
def test_a_search_that_measures_what_it_was_calibrated_on_says_so(tmp_path, capsys):
    space, path = tmp_path / "space.yaml", tmp_path / "questions.txt"
    space.write_text("search: grid\nmethod: [taylor, random]\nseq_len: [16]\nnum_samples: [8]\n")
    found = {}
    for after in (0, 4):
        argv = ["--model", "tiny-llama", "--after", str(after), "--most", "8", "--output", str(path)]
        assert main(argv) == 0
        argv = ["--model", "tiny-llama", "--inline", "--limit", "4"]
        argv += ["--search-space", str(space), "--calibration", str(path)]
        capsys.readouterr()
        assert search.main([*argv, "--storage-path", str(tmp_path), "--name", f"after-{after}"]) == 0
        screen = capsys.readouterr()
        for file in (tmp_path / f"after-{after}" / "ledger").glob("*.json"):
            record = json.loads(file.read_text())
            found[after, record["config"]["method"]] = record["metrics"].get("items_in_calibration")
        told = f"calibration text {path} holds 28 of the 28 measured questions" in screen.err + screen.out
        at_the_end = "taylor-s16-n8 holds up to 28 of the tested questions" in re.sub(r"\s+", " ", screen.out)
        assert told == at_the_end == (after == 0)
    assert found == {(0, "taylor"): 28, (0, "random"): None, (4, "taylor"): None, (4, "random"): None}
