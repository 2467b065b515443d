"""`search --search optuna --objective`: a real search by another measure than accuracy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tune_prune
from tests.search_folders import TINY
from tune_prune.analysis.statistics.rules import score
from tune_prune.commands import search
from tune_prune.core.ledger import Ledger
from tune_prune.core.measures import measured
from tune_prune.core.store import STATUS, FolderStore


@pytest.mark.slow
def test_a_search_by_kl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "search: optuna\nnum_trials: 3\nmethod: [magnitude, taylor, wanda_sp]\nseq_len: 16\nnum_samples: 8\n"
    )
    argv = [*TINY, "--search-space", str(path), "--storage-path", str(tmp_path), "--name", "by-kl", "--inline"]
    argv += ["--limit", "8", "--tasks", "piqa", "--gpus-per-trial", "0"]
    assert search.main([*argv, "--objective", "kl"]) == 0
    said = capsys.readouterr().out
    assert "optuna tries 3 of 3 ways to prune it by 20%" in said
    assert f"report       tune-prune analysis {tmp_path / 'by-kl'} --rule kl" in said
    (best,) = re.findall(r"^best         tiny-llama: (.+(?:\n {13}.+)*)$", said, re.MULTILINE)
    assert "the lowest KL, the distance from the original's predictions, " in (best := " ".join(best.split()))
    assert "as --objective asks; accuracy " in best and best.endswith("; the table below goes by accuracy")
    folder = tmp_path / "by-kl"
    assert json.loads((folder / "experiment.json").read_text())["settings"]["objective"] == "kl"
    records = Ledger(FolderStore(folder)).records()
    best = min(records, key=lambda record: record.metrics["kl_text"] + record.metrics["kl_tasks"])
    chosen = json.loads((folder / "global_best_config.json").read_text())
    assert chosen["selection_rule"] == "kl" and chosen["models"]["tiny-llama"]["key"] == best.key
    assert tune_prune.load_results(folder).findings.rule == "kl"

    assert search.main(argv) == 2
    assert "was made with other settings (objective was kl, is accuracy)" in capsys.readouterr().err
    status = json.loads((folder / STATUS).read_text())
    assert status["state"] == "ended"
    (folder / STATUS).write_text(
        json.dumps(status | {"state": "running"})
    )  # as of one that was killed after its last trial
    assert search.main([*argv, "--objective", "kl"]) == 0
    assert json.loads((folder / STATUS).read_text())["state"] == "ended"
    assert [record.started_at for record in Ledger(FolderStore(folder)).records()] == [r.started_at for r in records]


@pytest.mark.slow
def test_the_report_of_a_search_is_that_of_its_folder(tmp_path: Path) -> None:
    """How many trials an adaptive search plans, on what they ran, by which versions and at what cost."""
    path = tmp_path / "space.yaml"
    path.write_text("search: optuna\nnum_trials: 2\nmethod: [magnitude, random]\nseq_len: 16\nnum_samples: 8\n")
    found = tune_prune.search("tiny-llama", path, limit=5, storage_path=tmp_path, name="r", tasks="piqa", inline=True)
    folders = []
    for name, results in (("now", found), ("later", tune_prune.load_results(tmp_path / "r"))):
        results.report(tmp_path / name)
        files = [file for file in (tmp_path / name).rglob("*.*") if file.suffix != ".pdf"]
        own = str(tmp_path / name).encode()  # in the commands that keep a model
        folders.append({file.name: file.read_bytes().replace(own, b"results") for file in files})
    assert folders[0] == folders[1]
    text = folders[0]["paragraphs.md"].decode()
    assert "tune_prune" in text and "Ray" not in text


def test_a_trial_without_a_part_of_a_measure_is_compared_with_none_that_has_it() -> None:
    """Optuna and the rule agree: the text's KL alone is another number than the mean of both."""
    whole, half = {"kl_text": 1.0, "kl_tasks": 3.0}, {"kl_text": 1.0}
    assert np.isnan(measured(half, "kl", whole)) and measured(whole, "kl", half) == -2.0
    assert score(pd.DataFrame([whole, half]), "kl").tolist()[0] == -2.0
    assert np.isnan(score(pd.DataFrame([whole, half]), "kl")[1])
    assert score(pd.DataFrame([half, half]), "kl").tolist() == [-1.0, -1.0]
