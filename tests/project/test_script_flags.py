"""What the scripts are given is checked before they work: one sentence and exit code 2, not a traceback, and no hours lost."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import train_embedded_models
from transformers import AutoTokenizer

from tune_prune import embedded
from tune_prune.commands.flags import output_file

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Their --output is a folder, which they make.
INTO_A_FOLDER = ("make_random_model", "quality_study", "study_smollm2")


def writers() -> list[str]:
    """The scripts with --output FILE, by their own flag or by that of `benchmark_parser` or `gpu_parser`."""
    found = []
    for path in sorted(SCRIPTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        own = re.search(r'add_argument\(\s*"--output"|_parser\(__doc__', text) and '== "__main__"' in text
        found += [str(path.relative_to(SCRIPTS))] if own and path.stem not in INTO_A_FOLDER else []
    return found


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function (script, *argv) -> the last line of standard error of that script, which must end with code 2 and nothing else
    said."""

    def run(script: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *argv])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        said = capsys.readouterr()
        assert ended.value.code == 2 and not said.out, said
        return said.err.splitlines()[-1]

    return run


@pytest.mark.parametrize("script", writers())
def test_an_output_in_no_folder_is_refused_before_any_work(
    script: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    assert "argument --output: " in (said := refusal(script, "--output", str(tmp_path / "none" / "out.json")))
    assert said.endswith("stands in no folder; name a file in an existing folder")


def test_an_output_is_a_file_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").touch()
    assert [output_file(name) for name in ("new.json", "old.json")] == [Path("new.json"), Path("old.json")]
    os.mkfifo("pipe")
    for name, hindrance in ((str(tmp_path), "is a folder"), ("pipe", "is no file"), ("old.json/out", "in no folder")):
        with pytest.raises(argparse.ArgumentTypeError, match=hindrance):
            output_file(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "pipe"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("winners_by_draw.py /", "is not an experiment"),
        ("replay_kl_filter.py /", "is not an experiment"),
        ("replay_kl_filter.py x.csv --orders 0", "argument --orders: '0' is not a whole number from 1"),
        ("bench_engine.py --model tiny-llama --limit 1 --tasks nope", "error: task 'nope' is not in"),
        ("bench_flops.py --model nope", "error: --model 'nope' is no model of the benchmarks"),
        ("bench_grid.py --search-space nope", "error: search space 'nope' is unknown"),
        ("bench_overhead.py --model nope --search-space nope", "error: search space 'nope' is unknown"),
        ("bench_racing.py --grid none.csv", "error: none.csv cannot be read"),
        ("bench_racing.py --grids 0", "argument --grids: '0' is not a whole number from 1"),
        ("bench_passes.py --seq-len 8,x", "argument --seq-len: 'x' is not a whole number from 1"),
        ("bench_scale.py --trials 0", "argument --trials: '0' is not a whole number from 1"),
        ("bench_scale.py --parts start,nope", "error: --parts names nope; there are start"),
        ("simulate_cluster.py --nodes 1,0", "argument --nodes: '0' is not a whole number from 1"),
        ("simulate_cluster.py --jitter -1", "error: --jitter is -1 and --controller-ms 10; they must be from 0 to 10"),
        ("simulate_cluster.py --controller-ms nan", "error: --jitter is 0.1 and --controller-ms nan; they must be"),
        ("simulate_draws.py --repeats 0", "argument --repeats: '0' is not a whole number from 1"),
        ("questions_text.py --after -1", "argument --after: '-1' is not a whole number from 0"),
        ("questions_text.py --most 0", "argument --most: '0' is not a whole number from 1"),
        # not after an evaluation of the dense model, which would find no such task
        ("mask_baselines.py --model tiny-llama --tasks nope --ratio 0.99", "error: --ratio 0.99 is 1"),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(line: str, sentence: str, refusal: Callable[..., str]) -> None:
    assert sentence in refusal(*line.split())


def test_help_of_the_oldest_requirements(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["oldest_requirements.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPTS / "oldest_requirements.py"), run_name="__main__")
    assert "usage: oldest_requirements.py" in (said := capsys.readouterr().out) and "transformers==" in said
    assert "pydantic==" not in said


def test_the_folder_of_the_embedded_models_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    monkeypatch.setattr(train_embedded_models, "build_tokenizer", lambda: tokenizer)  # which takes ten seconds
    train_embedded_models.main(["--out", str(tmp_path / "new" / "package"), "--data-only"])
    for name in ("calibration.txt", "perplexity.txt", "tasks/piqa/test.jsonl"):
        assert (tmp_path / "new" / "package" / name).read_bytes() == (embedded.tasks_dir().parent / name).read_bytes()
