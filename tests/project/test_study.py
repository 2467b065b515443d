"""scripts/study_smollm2.py: every command that it runs is one that tune_prune takes, and what it decides follows its results."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import study_smollm2

from tune_prune.analysis.input.items import GOLD
from tune_prune.commands import search
from tune_prune.commands.analysis import parser as analysis_parser
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import RESULTS
from tune_prune.tuning import space as search_space

GRID = [  # name, accuracy, log-probability of right choices
    ("taylor-s256-n128", 0.46, -39.6),
    ("taylor-s256-n512", 0.45, -39.2),
    ("layerwise-s32-n256", 0.43, -37.3),
    ("blockwise-s16-n128", 0.44, -45.0),
]
DRAWN = [("taylor-s256-n512", 0.45, -37.0), ("layerwise-s32-n256", 0.43, -37.5)]  # the draws turn them round


def rows(configurations: list[tuple[str, float, float]]) -> pd.DataFrame:
    """Make rows as the findings of a search have them."""
    found = []
    for name, accuracy, gold in configurations:
        method, seq_len, num_samples = name.split("-")
        levels = {"method": method, "seq_len": int(seq_len[1:]), "num_samples": int(num_samples[1:])}
        values = {name: row.default for name, row in HYPERPARAMETERS.items() if not row.required} | {"calibration": ""}
        values |= levels
        found.append(values | {"name": name, "acc_mean": accuracy, GOLD: gold})
    return pd.DataFrame(found).astype({"seed": "Int64"})


def commands_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str) -> list[tuple[str, ...]]:
    """Return the commands of a study whose searches find GRID and DRAWN."""
    commands: list[tuple[str, ...]] = []

    def load_results(folder: Path) -> SimpleNamespace:
        eligible = rows(GRID if folder.name == "study-smollm2-grid" else DRAWN)
        model = SimpleNamespace(eligible=eligible, baseline={"acc_mean": 0.42})
        findings = SimpleNamespace(models={"smollm2": model}, study=SimpleNamespace(models={"smollm2": model}))
        return SimpleNamespace(findings=findings)

    def command(*words: str) -> None:
        commands.append(words)
        if words[0] == "analysis":
            (tmp_path / "output").mkdir()
        elif "--dry-run" not in words:
            folder = tmp_path / words[-1]
            folder.mkdir(exist_ok=True)
            (folder / RESULTS).write_text(
                "method,output_dir,host,acc_mean\ntaylor,/home/me/trials,box,0.46000000000000002\n"
            )

    monkeypatch.setattr(study_smollm2, "command", command)
    monkeypatch.setattr(study_smollm2, "load_results", load_results)
    argv = ["--storage-path", str(tmp_path), "--output", str(tmp_path / "output"), *flags]
    study_smollm2.Study(*study_smollm2.parser().parse_known_args(argv)).run()
    return commands


def test_the_commands_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--data-dir", "DATA", "--limit", "100", "--perplexity-tokens", "16384", "--inline"]
    *searches, analysis = commands_of(monkeypatch, tmp_path, *flags)
    asked = [search.parser().parse_args(words[1:]) for words in searches]
    steps = ["grid", "contenders", "contenders", "contenders", "control", "ratios"]
    assert [args.name.removeprefix("study-smollm2-") for args in asked] == steps
    for args in asked:
        assert (args.limit, args.perplexity_tokens, args.inline, args.data_dir) == (100, 16384, True, "DATA")
        assert args.draws is None and args.seeds is None
    spaces: list[dict[str, Any]] = [search_space.load(args.search_space).values for args in asked]
    assert len(spaces[0]["method"]) * len(spaces[0]["seq_len"]) * len(spaces[0]["num_samples"]) == 45
    best = {"blockwise": (16, 128), "layerwise": (32, 256), "taylor": (256, 512)}  # of each method by log-probability
    for space, (method, levels) in zip(spaces[1:4], best.items(), strict=True):
        assert (space["method"], space["seq_len"] + space["num_samples"]) == ((method,), levels)
    assert spaces[4]["method"] == ("random",)
    assert all(space["seed"] == (0, 1, 2) for space in spaces[1:])
    assert all(space["pruning_ratio"] == (0.2,) for space in spaces[:5])
    assert (spaces[5]["method"], spaces[5]["seq_len"], spaces[5]["num_samples"]) == (("taylor",), (256,), (512,))
    assert spaces[5]["pruning_ratio"] == (0.1, 0.2, 0.3)
    args = analysis_parser().parse_args(analysis[1:])
    assert [Path(folder).name for folder in args.folders] == [f"study-smollm2-{step}" for step in study_smollm2.STEPS]
    assert args.rule == "gold_logprob"
    for step in study_smollm2.STEPS:  # as the search has written it, but for where it ran
        text = (tmp_path / "output" / f"{step}.csv").read_text()
        assert text == "method,output_dir,host,acc_mean\ntaylor,,,0.46000000000000002\n"
    assert json.loads((tmp_path / "output" / "dense.json").read_text()) == {"acc_mean": 0.42}
