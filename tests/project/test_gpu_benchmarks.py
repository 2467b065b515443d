"""The benchmarks of a GPU, on a CPU and a model of toy size; and that they end in time, whatever hangs, with what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.test_benchmarks import positive

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.slow
def test_gpu_on_a_cpu_without_what_such_a_machine_may_lack(run_without: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    code = f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport bench_gpu\nbench_gpu.main(sys.argv[1:])\n"
    argv = ["--device", "cpu", "--tiny", "--threads", "1", "--repeats", "2", "--samples", "8", "--seq-len", "16"]
    argv += ["--text-tokens", "600", "--items", "3", "--batch-tokens", "256,1024", "--output", str(path)]
    told = run_without(("ray", "lm_eval", "optuna", "datasets", "pandas", "pyarrow", "tensorboard"), code, *argv)
    values = json.loads(path.read_text(encoding="utf-8"))
    assert values["complete"] is True
    # What is printed when it is made is what the file has.
    assert [json.loads(line) for line in told.splitlines() if line.startswith("{")] == values["measurements"]
    first, *stages = values["measurements"]
    assert first["machine"]["torch"] and first["params"] == 151_872
    for row in stages:
        assert row["seconds"] > 0 and (row["stage"].startswith("prune") or 0 < row["utilisation"] < 2)
        assert ("planned_bytes" in row) == bool(re.match("gradients|removal|.*: (perplexity|zero-shot)$", row["stage"]))
    zero_shot = values["zero_shot"]
    assert zero_shot["items"] == 21 and zero_shot["largest_difference"] < 1e-4  # shared, plain and HFLM's way agree
    assert zero_shot["tokens"]["shared"] < zero_shot["tokens"]["plain"]


@pytest.mark.parametrize(
    ("hang", "code"),
    [("threading.Event().wait()", 0), ("re.match('(a+)+$', 'a' * 60 + 'b')", 1)],
    ids=["where other threads go on", "where none does"],
)
@pytest.mark.slow
def test_a_slot_ends_in_time_and_keeps_what_was_measured(hang: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    program = f"""
import re, sys, threading
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import gpu_measurements
gpu_measurements.GRACE_S = 0.3
with gpu_measurements.Slot("test", 0.3, Path({str(path)!r}), {{"device": "cpu"}}) as slot:
    if slot.begin("quick"):
        slot.add({{"measured": "quick", "seconds": float("nan")}})
    if slot.begin("slow"):
        {hang}
        slot.add({{"measured": "slow"}})
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == code, run.stderr
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["complete"] is False and kept["device"] == "cpu"
    assert kept["measurements"] == [json.loads(line) for line in run.stdout.splitlines()]
    stopped = [{"stopped in": "slow", "after_s": 0.3}] if code == 0 else []
    assert kept["measurements"] == [{"measured": "quick", "seconds": "nan"}, *stopped]
    assert ("Timeout" in run.stderr) == (code == 1)


@pytest.mark.slow
def test_what_plans_assume_of_a_gpu_on_a_cpu(run_without: Callable[..., str]) -> None:
    code = (
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport bench_gpu_plan\nbench_gpu_plan.main(sys.argv[1:])\n"
    )
    without = ("ray", "lm_eval", "optuna", "datasets", "pandas", "pyarrow", "tensorboard")
    told = [json.loads(line) for line in run_without(without, code, "--device", "cpu", "--tiny").splitlines()]
    assert not any("error" in line for line in told), told
    found = {line.pop("measured"): line for line in told}
    assert "MATH" in found.pop("versions")["masked_attention"]
    assert positive(*(value for line in found.values() for value in line.values()))
    assert {name.partition(" ")[0].rstrip(",") for name in found["ways"]} == {"resident", "by", "streamed"}
