"""scripts/real_size.sh: its commands are what the parsers take, and its table says what they were; once for real, on a small
model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import make_random_model
import pytest
from transformers import PretrainedConfig

from tune_prune import embedded
from tune_prune.commands import evaluate, prune, search

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "real_size.sh"
STEPS = {
    "mistral": 7,
    "llama": 8,
    "qwen": 7,
    "1b": 1,
    "70b": 3,
    "recipe": 2,
    "smollm2": 0,
}  # whole billions of parameters


def run(*argv: object, **env: object) -> subprocess.CompletedProcess[str]:
    own = {"PYTHON": sys.executable} | {name: str(value) for name, value in env.items()}
    return subprocess.run(
        [SCRIPT, *map(str, argv)], env=os.environ | own, capture_output=True, text=True, timeout=500, check=False
    )


def test_the_script_is_clean() -> None:
    done = subprocess.run([Path(sys.executable).parent / "shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("step", STEPS)
def test_the_commands_are_what_the_parsers_take(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PretrainedConfig] = []
    monkeypatch.setattr(make_random_model, "write_model", lambda config, folder, seed: made.append(config))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**50}))
    done = run("--work", tmp_path / "work", "--print", step)
    assert done.returncode == 0 and not (tmp_path / "work").exists(), done.stderr
    commands = [line for line in done.stdout.splitlines() if " -c " not in line]  # the last one loads and generates
    seen = []
    for line in commands:
        _, *words = shlex.split(line)
        if words[0] != "-m":
            assert words.pop(0) == "scripts/make_random_model.py"
            make_random_model.main(words)
            seen.append("make")
            continue
        name, arguments = words[1].removeprefix("tune_prune."), words[2:]
        parser = {"search": search.parser, "prune": prune.parser, "evaluate": evaluate.parser}[name]()
        flags = parser.parse_args(arguments)
        seen.append(name)
        if name == "search":
            assert flags.inline and flags.dtype == "bfloat16"
            last = seen.count("search") == 8  # of the step `recipe`, with a refit
            assert flags.memory == {"1b": 3, "70b": 17, "recipe": 7 if last else 5}.get(step, 8) * 2**30
        elif name == "evaluate" or flags.method:
            assert flags.memory == 8 * 2**30
    whole, taylor = ["search", "prune"], ["prune", "evaluate"]
    assert seen == [
        "make",
        *{"mistral": whole, "smollm2": whole + taylor, "1b": whole[:1], "70b": whole[:1], "recipe": ["search"] * 8}.get(
            step, taylor
        ),
    ]
    (config,) = made
    assert make_random_model.total_bytes(config) // 2_000_000_000 == STEPS[step]
    assert {"70b": 2, "recipe": 8}.get(step, config.num_hidden_layers) == config.num_hidden_layers


# In the place of Python: what the commands say, and of whom it is asked; everything else is Python's.
STAND_IN = """#!/usr/bin/env bash
case "$2$1" in
    tune_prune.search-m) echo "memory       2.5 GiB a trial: fits (18.7 GiB are free)" ;;
    tune_prune.prune-m) echo "error: no such thing" && exit 3 ;;
    *scripts/make_random_model.py) echo written ;;
    *) exec "$REAL" "$@" ;;
esac
"""


def test_what_fails_is_said_and_the_rest_is_measured(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN, encoding="utf-8")
    python.chmod(0o755)
    done = run("--work", tmp_path / "work", "mistral", "1b", PYTHON=python, REAL=sys.executable)
    assert done.returncode == 1 and "prune --config ended with code 3" in done.stderr and "no such thing" in done.stderr
    values = json.loads((tmp_path / "work" / "real_size.json").read_text(encoding="utf-8"))
    rows = [(row["step"], row["what"], row["exit_code"], row["planned_gib"]) for row in values["rows"]]
    assert rows == [
        ("mistral", "make the model", 0, None), ("mistral", "search", 0, 2.5), ("mistral", "prune --config", 3, None),
        ("1b", "make the model", 0, None), ("1b", "search", 0, 2.5),
    ]  # fmt: skip
    assert all(0 < row["peak_gib"] < 1 and 0 <= row["minutes"] < 2 for row in values["rows"])
    assert "failed (3)" in done.stdout
    data = tmp_path / "work" / "data"
    assert len((data / "text" / "wikitext2-raw.test.txt").read_text(encoding="utf-8")) > 1400
    for task in ("boolq", "piqa"):
        lines = (data / "tasks" / task / "test.jsonl").read_text(encoding="utf-8").splitlines()
        assert lines == (embedded.tasks_dir() / task / "test.jsonl").read_text(encoding="utf-8").splitlines()[:4]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--work", "DIR"), "no step is named"),
        (("mistral",), "--work is missing"),
        (("--work", "DIR", "mixtral"), "'mixtral' is no step"),
        (("mistral", "--work"), "--work needs a value"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(argv: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = run(*(str(tmp_path) if word == "DIR" else word for word in argv))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_all_commands_on_a_small_model(tmp_path: Path) -> None:
    done = run("--work", tmp_path, "smollm2", "--layers", 2, "--vocab", 600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "real_size.json").read_text(encoding="utf-8"))["rows"]
    what = ["make the model", "search", "prune --config", "generate a token", "prune --method taylor", "evaluate"]
    assert [row["what"] for row in rows] == what
    by_name = {row["what"]: row for row in rows}
    assert 0.1 < by_name["search"]["peak_gib"] < 1.25 * by_name["search"]["planned_gib"]
