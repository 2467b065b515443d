"""`tune_prune.evaluate`: its numbers are lm-eval's and a search's baseline, its refusals one sentence with exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tune_prune.__main__
from tests.search_folders import data_folder, model_folder
from tune_prune import evaluate
from tune_prune.config import EvaluationProtocol, ModelRun
from tune_prune.context import TrialContext
from tune_prune.ledger import parse_record
from tune_prune.records import TrialRecord
from tune_prune.trial import run_trial

TINY = ("--model", "tiny-llama")
STAGES = ("perplexity", "zero_shot")


@pytest.fixture
def sentence(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which the command refuses."""

    def run(*argv: str | Path) -> str:
        code = evaluate.main([*map(str, argv)])
        out, err = capfd.readouterr()
        assert (code, out) == (2, ""), out
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err

    return run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What the command prints for tiny-llama on 20 items of two tasks, the record that it writes, and where."""
    path = tmp_path_factory.mktemp("evaluate") / "record.json"
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: told.append(" ".join(map(str, args))))
        argv = [*TINY, "--tasks", "boolq,piqa", "--limit", "20", "--device", "cpu", "--output", str(path)]
        assert evaluate.main(argv) == 0
    return "\n".join(told), json.loads(path.read_text(encoding="utf-8")), path


def test_the_record_is_that_of_a_dense_trial(measured: tuple[str, dict[str, Any], Path], tmp_path: Path) -> None:
    _, values, path = measured
    protocol = EvaluationProtocol(("boolq", "piqa"), limit=20)
    run = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, protocol, 0, "float32")
    expected = run_trial(None, TrialContext.open(run, tmp_path, "cpu"))
    record = parse_record(values, path)
    assert isinstance(record, TrialRecord) and record.status == "complete"
    assert record.key == expected.key and record.metrics == expected.metrics
    assert values["run"] == json.loads(json.dumps(run.to_dict()))


def test_the_tables_say_what_the_record_holds(measured: tuple[str, dict[str, Any], Path]) -> None:
    text, values, _ = measured
    metrics = values["metrics"]
    for task, metric in (("boolq", "acc"), ("piqa", "acc_norm")):
        cells = re.search(rf"^{task} +(.*)$", text, re.MULTILINE)
        assert cells, text
        accuracy, stderr = (f"{metrics[f'acc_{task}{end}']:.4f}" for end in ("", "_stderr"))
        assert cells.group(1).split() == [metric, accuracy, stderr, "0.5000", "20"]
    mean = re.search(r"^mean +(.*)$", text, re.MULTILINE)
    assert mean and mean.group(1).split()[0] == f"{metrics['acc_mean']:.4f}"
    assert f"perplexity {metrics['ppl']:.2f} on the embedded text" in text
    assert f"{int(metrics['params_count']):,} parameters" in text and "float32 on cpu" in text
    tokens = {name: sum(stage["tokens"] for stage in values["stages"] if stage["stage"] == name) for name in STAGES}
    assert min(tokens.values()) > 0  # really measured: nothing came from a cache
    for name, count in tokens.items():
        assert re.search(rf"^{name.replace('_', '-')} +{count:,} +[\d.]+$", text, re.MULTILINE), text
    assert len(re.findall(r"^zero-shot .* of 40 items", text, re.MULTILINE)) == len(EvaluationProtocol().slices)


def test_a_local_folder_with_local_data_and_a_note(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = model_folder(tmp_path / "mine"), data_folder(tmp_path / "data")
    monkeypatch.setattr(TrialContext, "notes", ["scored one by one: it is Tuesday"])
    argv = ["--model", str(model), "--data-dir", str(data), "--tasks", "piqa", "--limit", "1", "--dtype", "bfloat16"]
    assert tune_prune.__main__.main(["evaluate", *argv, "--device", "cpu"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert out.startswith("mine: ") and "bfloat16 on cpu" in out and "on WikiText-2 test" in out
    assert re.search(r"^piqa +acc_norm +[\d.]+ +- +0.5000 +1$", out, re.MULTILINE)  # one item has no standard error
    assert "note: scored one by one: it is Tuesday\n" in out


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no model": ([], ["--model"]),
    "unknown flag": ([*TINY, "--modle", "x"], ["--modle", "--help"]),
    "unknown alias": (["--model", "mistrall"], ["'mistrall'", "did you mean 'mistral'?", "hub id"]),
    "missing folder": (["--model", "./nope"], ["./nope does not exist"]),
    "revision of no hub model": ([*TINY, "--revision", "main"], ["--revision main", "leave it out"]),
    "no task": ([*TINY, "--tasks", ","], ["--tasks", "at least one"]),
    "unknown task": ([*TINY, "--tasks", "piqa,bolq"], ["'bolq'", "did you mean 'boolq'?"]),
    "limit 0": ([*TINY, "--limit", "0"], ["--limit", "'0'", "from 1"]),
    "unknown dtype": ([*TINY, "--dtype", "float16"], ["--dtype", "'float16'", "bfloat16"]),
    "unknown device": ([*TINY, "--device", "tpu"], ["--device", "'tpu'", "cuda"]),
    "negative seed": ([*TINY, "--seed", "-1"], ["--seed", "'-1'"]),
    "missing data": ([*TINY, "--data-dir", "nope"], ["--data-dir nope", "tasks/"]),
    "output in no folder": ([*TINY, "--output", "no/such/folder/x.json"], ["--output no/such", "existing folder"]),
    "output a folder": ([*TINY, "--output", "/tmp"], ["--output /tmp is a folder"]),
}


@pytest.mark.parametrize(("argv", "words"), WRONG.values(), ids=WRONG)
def test_wrong_flags_are_refused(argv: list[str], words: list[str], sentence: Callable[..., str]) -> None:
    told = sentence(*argv)
    assert [word for word in words if word not in told] == [], told


def test_no_gpu(sentence: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device is cuda, but torch finds no GPU" in sentence(*TINY, "--device", "cuda")


def test_broken_models_and_data(sentence: Callable[..., str], tmp_path: Path) -> None:
    model, data = model_folder(tmp_path / "m"), data_folder(tmp_path / "data")
    (model / "model.safetensors").unlink()
    assert "no weights" in sentence("--model", model, "--data-dir", data)
    (data / "tasks" / "piqa" / "test.jsonl").unlink()
    assert "task files are missing" in sentence(*TINY, "--data-dir", data)
    small = model_folder(tmp_path / "small", vocab_size=10)
    assert "do not fit its config.json" in sentence("--model", small, "--data-dir", data, "--tasks", "boolq")

    strange = model_folder(tmp_path / "strange")
    text = (strange / "tokenizer.json").read_text(encoding="utf-8")
    (strange / "tokenizer.json").write_text(text.replace('".": 5', '".": 5000'), encoding="utf-8")
    told = sentence("--model", strange, "--data-dir", data_folder(tmp_path / "more"))
    assert "makes token 5000" in told and "vocab_size" in told


def test_interrupted(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialContext, "open", interrupted)
    assert evaluate.main([*TINY, "--limit", "1"]) == 130
    assert "interrupted" in capfd.readouterr().err


def test_help_and_bad_flags_need_nothing_heavy(run_without: Callable[..., str]) -> None:
    code = """
import tune_prune.evaluate
for arguments in (["--help"], ["--no-such-flag"], ["--model", "tiny-llama", "--limit", "0"]):
    try:
        print("exit", tune_prune.evaluate.main(arguments))
    except SystemExit as stop:
        print("exit", stop.code)
"""
    told = run_without(("torch", "transformers", "ray", "lm_eval", "optuna", "datasets", "numpy"), code)
    assert "--data-dir" in told
    assert re.findall("^exit (.*)$", told, flags=re.MULTILINE) == ["0", "2", "2"]


def test_it_runs_without_ray(run_without: Callable[..., str]) -> None:
    code = """
import tune_prune.evaluate
argv = ["--model", "tiny-llama", "--tasks", "boolq", "--limit", "2", "--device", "cpu"]
print("exit", tune_prune.evaluate.main(argv))
"""
    assert run_without(("ray", "optuna", "tensorboard"), code).endswith("exit 0\n")
