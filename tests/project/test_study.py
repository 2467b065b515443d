"""scripts/study_smollm2.py: every command that it runs is one that tune_prune takes, and what it decides follows its results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import study_smollm2
import yaml

from tune_prune.analysis.command import parser as analysis_parser
from tune_prune.cli import search_flags
from tune_prune.planning import search_space

BEST = {"method": "layerwise", "seq_len": 32, "num_samples": 8, "pruning_ratio": 0.2, "acc_mean": 0.43, "seed": 2}


def found(folder: Path) -> SimpleNamespace:
    """Results as `load_results` gives them."""
    assert folder.name == "study-smollm2-grid"
    return SimpleNamespace(best=pd.DataFrame([BEST], index=["smollm2"]))


def test_the_commands_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(study_smollm2, "command", lambda *words: commands.append(words))
    monkeypatch.setattr(study_smollm2, "load_results", found)
    monkeypatch.setattr(study_smollm2.shutil, "copyfile", lambda *paths: None)
    flags = [
        "--data-dir",
        "DATA",
        "--limit",
        "100",
        "--perplexity-tokens",
        "16384",
        "--storage-path",
        str(tmp_path),
        "--inline",
    ]
    study_smollm2.Study(*study_smollm2.parser().parse_known_args(flags)).run()
    *searches, analysis = commands
    asked = [search_flags.parser().parse_args(words[1:]) for words in searches]
    assert [args.name.removeprefix("study-smollm2-") for args in asked] == ["grid", "control", "ratios"]
    for args in asked:
        assert (args.limit, args.perplexity_tokens, args.inline, args.data_dir) == (100, 16384, True, "DATA")
    spaces: list[dict[str, Any]] = [search_space.load(args.search_space).values for args in asked]
    assert len(spaces[0]["method"]) * len(spaces[0]["seq_len"]) * len(spaces[0]["num_samples"]) == 45
    assert spaces[1]["method"] == ("random",) and spaces[1]["seed"] == (0, 1, 2)
    assert asked[0].draws == 3 and asked[1].draws is asked[2].draws is None
    assert (spaces[2]["method"], spaces[2]["seq_len"], spaces[2]["num_samples"]) == (("layerwise",), (32,), (8,))
    assert spaces[2]["pruning_ratio"] == (0.1, 0.2, 0.3)
    assert all(space["seed"] == (0, 1, 2) for space in spaces[1:])
    assert yaml.safe_load((tmp_path / "study-smollm2-ratios.yaml").read_text())["seq_len"] == [32]
    folders = analysis_parser().parse_args(analysis[1:]).folders
    assert [Path(folder).name for folder in folders] == [f"study-smollm2-{step}" for step in study_smollm2.STEPS]


def test_a_dry_run_is_of_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(study_smollm2, "command", lambda *words: commands.append(words))
    study_smollm2.Study(*study_smollm2.parser().parse_known_args(["--storage-path", str(tmp_path), "--dry-run"])).run()
    assert len(commands) == 1 and commands[0][-1] == "study-smollm2-grid"
    assert not list(tmp_path.iterdir())


def test_flags_of_the_searches_are_not_taken_for_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args, more = study_smollm2.parser().parse_known_args(["--search", "optuna"])
    assert (args.search_space, more) == ("paper_grid", ["--search", "optuna"])
    with pytest.raises(SystemExit) as ended:
        study_smollm2.parser().parse_known_args(["--storage-path", "s3://bucket/results"])
    assert ended.value.code == 2
    assert "argument --storage-path: s3://bucket/results is no folder" in capsys.readouterr().err
