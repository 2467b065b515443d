"""scripts/study_smollm2.py: every command that it runs is one that tune_prune takes, and what it decides follows its results."""

from __future__ import annotations

import json
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


ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "smollm2-135m"
ABLE = ("piqa", "hellaswag", "arc_easy")  # tasks on which the dense model tells right from wrong


def shown(row: dict[str, Any]) -> list[str]:
    """A configuration's numbers as tables of the study print them; `row` of grid.csv, or metrics of the dense model."""

    def fraction(value: float) -> str:
        return f"{value:.4f}".removeprefix("0")

    kl = [f"{row[name]:.3f} ± {row[f'{name}_stderr']:.3f}" if name in row else "0" for name in ("kl_text", "kl_tasks")]
    able = sum(row[f"acc_{task}"] for task in ABLE) / len(ABLE)
    accuracy = f"{fraction(row['acc_mean'])} ± {fraction(row['acc_mean_stderr'])}"
    return [f"{row['gold_logprob_mean']:.2f}", *kl, fraction(able), accuracy, f"{row['ppl']:.2f}"]


@pytest.mark.parametrize("document", [ROOT / "README.md", STUDY / "README.md"], ids=["README", "study"])
def test_tables_of_the_study_are_its_committed_numbers(document: Path) -> None:
    rows = pd.read_csv(STUDY / "grid.csv").to_dict("records")
    measured = {f"`{row['method']}-s{row['seq_len']}-n{row['num_samples']}`": row for row in rows}
    measured["dense"] = json.loads((STUDY / "dense.json").read_text())
    lines = document.read_text(encoding="utf-8").splitlines()
    tables = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    (header,) = (cells for cells in tables if "right answer, nats" in cells and "perplexity" in cells)
    skipped = [number for number, cell in enumerate(header) if cell == "behind the first"]
    found = {cells[0]: cells for cells in tables if cells[0] in measured and len(cells) == len(header)}
    assert len(found) >= 4 and "dense" in found
    for name, cells in found.items():
        kept = [cell for number, cell in enumerate(cells) if number not in (0, *skipped)]
        assert kept == shown(measured[name]), name
