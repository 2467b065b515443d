"""scripts/quality_study.py: its searches make the rows of the records in docs/studies, and it says how near to them it came."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quality_study

from tune_prune.commands import search
from tune_prune.tuning import space as search_space

LIMIT = ["--limit", "100", "--perplexity-tokens", "16384"]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What a study runs, which finds nothing; its data folder is `tmp_path`."""
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
def test_the_searches_make_every_row_of_every_record(
    name: str, tmp_path: Path, commands: list[tuple[str, ...]]
) -> None:
    mine = study(tmp_path, name, "--inline")
    mine.run()
    shapes: dict[str, Any] = {}
    made: dict[str, Counter[tuple[str, str]]] = {}  # experiment -> (model, configuration) -> draws
    for words in commands:
        args = search.parser().parse_args(words[1:])
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


def row(name: str, **values: Any) -> dict[str, Any]:
    return {"model": "m", "configuration": name, "draws": 1, **dict.fromkeys(quality_study.COMPARED, 2.0), **values}


def test_how_near_a_table_is_to_its_record() -> None:
    record = [row("equal"), row("near"), row("far"), row("three draws", draws=3), row("not made")]
    mine = [
        row("more"),
        row("far", ppl=2.5, kl_text=1.9),
        row("near", kl_tasks=2.001),
        row("equal"),
        row("three draws"),
    ]
    assert list(quality_study.against(mine, record, Path("record.json"))) == [
        "record.json: 3 of its 5 rows; 1 equal in every number, 1 more within 0.1%",
        "  m far: ppl off by 25.0%, 2.5 and not 2",
    ]


def test_tables_that_a_study_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["embedded", "--storage-path", str(tmp_path / "results"), "--tables", "quality_step"]
    assert quality_study.main(argv) == 2
    said = "error: 'quality_step' is no table of embedded; did you mean 'quality_steps'? known: quality, "
    assert capsys.readouterr().err.startswith(said)
    assert quality_study.main([*argv[:3], "--limit=300"]) == 2
    assert "--limit is a setting of the study" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
