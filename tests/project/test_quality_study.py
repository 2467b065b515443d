"""scripts/quality_study.py: its searches make the rows of the records in docs/studies, and it says how near to them it came."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quality_study

from tune_prune.commands.options import CommandLine
from tune_prune.tuning import space as search_space

LIMIT = ["--limit", "100", "--perplexity-tokens", "16384"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Collect the commands of a study, which finds nothing; its data folder is `tmp_path`."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "wikitext2-tokenised.valid.txt").write_text("a text\n")
    found: list[tuple[str, ...]] = []

    def questions(argv: list[str]) -> int:
        Path(argv[argv.index("--output") + 1]).write_text("\n\n".join(f"question {n}" for n in range(6)) + "\n")
        assert argv[argv.index("--after") + 1] == "100"
        return 0

    monkeypatch.setattr(quality_study, "command", lambda *words: found.append(words))
    monkeypatch.setattr(quality_study.questions_text, "main", questions)
    monkeypatch.setattr(quality_study.Study, "show", lambda *_: None)
    return found


def study(tmp_path: Path, *flags: str) -> quality_study.Study:
    argv = [
        "--data-dir",
        str(tmp_path),
        "--storage-path",
        str(tmp_path / "results"),
        "--output",
        str(tmp_path / "tables"),
    ]
    return quality_study.Study(*quality_study.parser().parse_known_args([*flags, *argv]))


@pytest.mark.parametrize("name", quality_study.STUDIES)
def test_the_searches_make_every_row_of_every_record(name, tmp_path, commands):
    mine = study(tmp_path, name, "--inline")
    mine.run()
    shapes: dict[str, Any] = {}
    made: dict[str, Counter[tuple[str, str]]] = {}  # experiment -> (model, configuration) -> draws
    for words in commands:
        args = CommandLine("search").parse_args(words[1:])
        assert args.inline and args.data_dir == str(tmp_path)
        assert name == "embedded" or words[words.index("--limit") :][:4] == tuple(LIMIT)
        space = search_space.load(args.search_space)
        text = space.values["calibration"][0]
        points = made.setdefault(args.name, Counter())
        for config in space.configs():
            short = replace(
                config, calibration=None if config.calibration == text else config.calibration, seed=None
            ).name
            ratio = "" if len(space.values["pruning_ratio"]) == 1 else f"@{config.pruning_ratio:g}"
            points[args.model[0] + ratio, short] += 1
        settings = shapes.setdefault(args.name, (space.values["shape"], set(space.values["calibration"])))
        assert settings == (space.values["shape"], set(space.values["calibration"]))  # else a search refuses to go on
    records = {path.stem for path in (quality_study.RECORDS / name).glob("quality*.json")} - {"quality_recovery"}
    assert records <= set(mine.study["tables"])
    for record in records:
        table = mine.study["tables"][record]
        there = sum((made[mine.experiment(of, m).name] for of in table["of"] for m in mine.study["models"]), Counter())
        rows = json.loads((quality_study.RECORDS / name / f"{record}.json").read_text())
        assert rows
        for row in rows:
            assert there[row["model"], row["configuration"]] >= row["draws"], (record, row["configuration"])
            if row["configuration"] == table["reference"]:
                assert row["kl_text_regained"] == row["kl_text_stderr"] == 0
