"""Scripts check what they are given before they work: one sentence and exit code 2, not a traceback, and no hours lost."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import train_embedded_models
from transformers import AutoTokenizer

from tune_prune import embedded

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Their --output is a folder, which they make.
INTO_A_FOLDER = ("arena", "front_chart", "make_random_model", "quality_study", "study")


def writers() -> list[str]:
    """Return the scripts with --output FILE, by their own flag or by that of a parser that they share."""
    own = re.compile(r'add_argument\(\s*"--output"|_parser\(__doc__, |gpu_parser\(')
    paths = [path for path in sorted(SCRIPTS.rglob("*.py")) if path.stem not in INTO_A_FOLDER]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return [
        str(path.relative_to(SCRIPTS)) for path, text in texts.items() if own.search(text) and '== "__main__"' in text
    ]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function (script, *argv) -> the last line of standard error of that script, which must end with code 2."""

    def run(script: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *argv])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        printed = capsys.readouterr()
        assert ended.value.code == 2 and not printed.out, printed
        return printed.err.splitlines()[-1]

    return run


@pytest.mark.parametrize("script", writers())
def test_an_output_in_no_folder_is_refused_before_any_work(script, refusal, tmp_path):
    sentence = refusal(script, "--output", str(tmp_path / "none" / "out.json"))
    assert "argument --output: " in sentence
    assert sentence.endswith("stands in no folder; name a file in an existing folder")


def test_the_folder_of_the_embedded_models_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    monkeypatch.setattr(train_embedded_models, "build_tokenizer", lambda: tokenizer)  # which takes ten seconds
    train_embedded_models.main(["--out", str(tmp_path / "new" / "package"), "--data-only"])
    for name in ("calibration.txt", "perplexity.txt", "tasks/piqa/test.jsonl"):
        assert (tmp_path / "new" / "package" / name).read_bytes() == (embedded.tasks_dir().parent / name).read_bytes()
