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

from tune_prune.commands.options import CommandLine

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
        flags = CommandLine(name).parse_args(arguments)
        seen.append(name)
        if name == "search":
            assert flags.inline and flags.dtype == "bfloat16"
    assert seen[0] == "make" and len(seen) > 1
    (config,) = made
    assert make_random_model.total_bytes(config) // 2_000_000_000 == STEPS[step]


@pytest.mark.slow
def test_all_commands_on_a_small_model(tmp_path: Path) -> None:
    done = run("--work", tmp_path, "smollm2", "--layers", 2, "--vocab", 600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "real_size.json").read_text(encoding="utf-8"))["rows"]
    what = ["make the model", "search", "prune --config", "generate a token", "prune --method taylor", "evaluate"]
    assert [row["what"] for row in rows] == what
    by_name = {row["what"]: row for row in rows}
    assert 0.1 < by_name["search"]["peak_gib"] < 1.25 * by_name["search"]["planned_gib"]
