"""`speed --engine`: what is made of the output of real benchmarks, recorded in tests/finished/engines, which programs here replay.
tests/serving/test_engines.py runs the real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

import tune_prune
from tests.conftest import build_tiny
from tests.pruned_checkpoints import change_json
from tests.search_folders import TINY_FOLDER
from tune_prune.commands import speed

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "finished" / "engines"
LENGTHS = ("--prompt-tokens", "32", "--new-tokens", "16")
# Keeps its arguments, and does what the real one did with a model of that name.
PROGRAM = """#!{python}
import json, shutil, sys
from pathlib import Path
argv = sys.argv[1:]
with open("{calls}", "a") as calls:
    folder = Path(argv[argv.index("--model") + 1]) if "--model" in argv else None
    files = {{path.name: path.read_text() if path.suffix == ".py" else "" for path in folder.iterdir()}} if folder else {{}}
    auto_map = json.loads((folder / "config.json").read_text()).get("auto_map") if folder else None
    calls.write(json.dumps([*argv, json.dumps({{"files": files, "auto_map": auto_map}})]) + "\\n")
said = lambda flag: argv[argv.index(flag) + 1]
recorded = Path("{recorded}")
if argv[0] == "bench":
    kind = "dense" if "tiny-llama" in said("--model") else "pruned"
    shutil.copy(recorded / f"vllm-{{kind}}-{{said('--output-len')}}.json", said("--output-json"))
    print((recorded / "vllm-log.txt").read_text(), file=sys.stderr)
else:
    kind = "dense" if "original" in said("-m") else "pruned"
    print((recorded / f"llama-bench-{{kind}}-{{'decode' if said('-p') == '0' else 'prefill'}}.json").read_text())
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One pruned model as a folder and as a GGUF file."""
    pruned = tune_prune.open("tiny-llama", device="cpu").prune("magnitude")
    folders = {fmt: tmp_path_factory.mktemp("checkpoint") / fmt for fmt in ("hf", "gguf")}
    pruned.save(folders["hf"])
    pruned.save(folders["gguf"], "gguf")
    return folders


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[str]]]:
    """Programs on PATH that replay what was recorded; a function -> their command lines so far."""
    log, folder = tmp_path / "calls.jsonl", tmp_path / "bin"
    folder.mkdir()
    for name in ("vllm", "llama-bench"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable, calls=log, recorded=RECORDED))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def sentence(refused: Callable[..., str]) -> Callable[..., str]:
    """A function (*argv) -> the one sentence with which the command refuses."""
    return partial(refused, speed.main)


def recorded(name: str) -> dict:
    values = json.loads((RECORDED / name).read_text())
    return values[0] if isinstance(values, list) else values


def test_llama_bench_measures_two_files_in_turns(saved, calls, printed, tmp_path):
    original, record = tmp_path / "original.gguf", tmp_path / "record.json"
    original.write_bytes(b"GGUF")
    argv = ("--model", saved["gguf"], "--engine", "llama.cpp", "--base", original, *LENGTHS, "--repeats", "2")
    out = printed(speed.main, *argv, "--output", record)
    files = [Path(call[call.index("-m") + 1]) for call in calls()]
    assert files == 2 * [original, original, *2 * [next(saved["gguf"].glob("*.gguf"))]]
    tests = [call[call.index("-p") : -1] for call in calls()]
    tail = ["-r", "3", "-o", "json"]
    assert tests == 4 * [["-p", "32", "-n", "0", *tail], ["-p", "0", "-n", "16", "-d", "32", *tail]]
    models = json.loads(record.read_text())["models"]
    for name, values in models.items():
        for part in ("prefill", "decode"):
            test = recorded(f"llama-bench-{name}-{part}.json")
            assert values[f"{part}_s"] == 2 * [statistics.median(test["samples_ns"]) / 1e9]
            tokens = test["n_prompt"] or test["n_gen"]
            assert values[f"{part}_tokens_per_s"] == tokens / values[f"{part}_s"][0]
    test = recorded("llama-bench-dense-decode.json")
    assert test["n_depth"] == 32
    engine = f"llama.cpp b{test['build_number']} ({test['build_commit']})"
    assert json.loads(record.read_text())["engine"] == engine
    assert test["model_type"].endswith(" all F32") and "note" not in out
    assert f"median of 2, F32 on {test['cpu_info']}, {test['n_threads']} threads, {engine}\n" in out
    ratio = models["pruned"]["decode_tokens_per_s"] / models["dense"]["decode_tokens_per_s"]
    assert f"{ratio:.2f}x  ({ratio:.2f} to {ratio:.2f})" in out and "peak memory" not in out
    assert re.search(r"^pruned +127,\d+ +80\.\d%", out, re.MULTILINE)  # sizes, by the manifest


def test_vllms_decoding_is_what_more_tokens_take(saved, calls, printed, tmp_path):
    record = tmp_path / "record.json"
    argv = ("--model", saved["hf"], "--engine", "vllm", *LENGTHS, "--repeats", "2", "--dtype", "float32")
    out = printed(speed.main, *argv, "--output", record)
    asked = calls()
    assert [call[call.index("--output-len") + 1] for call in asked] == 4 * ["1", "17"]
    assert [str(TINY_FOLDER) in call for call in asked] == 2 * [True, True, False, False]
    assert ["--trust-remote-code" in call for call in asked] == 2 * [False, False, True, True]
    models = json.loads(record.read_text())["models"]
    for name, values in models.items():
        first, whole = (statistics.median(recorded(f"vllm-{name}-{n}.json")["latencies"]) for n in (1, 17))
        assert values["prefill_s"] == 2 * [first] and values["decode_s"] == 2 * [whole - first]
        assert values["decode_tokens_per_s"] == 16 / (whole - first)
    assert json.loads(record.read_text())["engine"] == "vllm 0.32.0"
    assert "median of 2, float32 on cpu, vllm 0.32.0\n" in out


def test_code_that_is_not_ours_is_not_run(saved, calls, printed, tmp_path):
    """vLLM is given this package's class files, whatever lies in the folder and whatever its config names."""
    folder = shutil.copytree(saved["hf"], tmp_path / "changed")
    for name in ("modeling_tune_prune.py", "evil.py"):
        (folder / name).write_text("raise SystemExit('run')")
    own = json.loads((folder / "config.json").read_text())["auto_map"]
    change_json(
        folder / "config.json", lambda values: values.update(auto_map={"AutoConfig": "someone/else--evil.Config"})
    )
    printed(speed.main, "--model", folder, "--engine", "vllm", *LENGTHS, "--repeats", "1")
    for call in calls()[2:]:
        seen = json.loads(call[-1])
        assert seen["auto_map"] == own and "model.safetensors" in seen["files"]
        assert {name: text for name, text in seen["files"].items() if name.endswith(".py")} == {
            path.name: path.read_text() for path in (ROOT / "tune_prune/models/pruned").glob("*_tune_prune.py")
        }


def test_vllm_measures_as_it_serves_and_numbers_of_other_kinds_are_named(calls, printed, tmp_path):
    """A Qwen2 of one width whose heads no longer fill the hidden size, for two GPUs, in 8 bits."""
    original, folder, record = tmp_path / "tiny-llama", tmp_path / "saved", tmp_path / "record.json"
    build_tiny("qwen2", torch.float32, vocab_size=512, head_dim=4).save_pretrained(original)
    for path in TINY_FOLDER.glob("tokenizer*"):
        shutil.copy(path, original)
    pruned = tune_prune.open(original, device="cpu").prune("magnitude", ratio=0.3, shape="uniform", tensor_parallel=2)
    pruned.save(folder, quantize="int8")
    out = printed(speed.main, "--model", folder, "--engine", "vllm", *LENGTHS, "--repeats", "1", "--output", record)
    for call in calls():
        assert ("--model-impl" in call) == (str(folder) in call)
        assert call[call.index("--tensor-parallel-size") + 1] == "2"
        assert str(original) in call or call[call.index("--model-impl") + 1] == "transformers"
    models = json.loads(record.read_text())["models"]
    assert [values["dtype"] for values in models.values()] == ["float32", "int8"]
    assert "original float32, pruned int8: not the pruning alone makes the difference" in " ".join(out.split())
    short = ("--prompt-tokens", "4", "--new-tokens", "1", "--repeats", "1", "--device", "cpu")
    out = printed(speed.main, "--model", folder, *short)
    assert "weights dequantised from int8" in " ".join(out.split()) and "the pruning alone" not in out


@pytest.mark.slow
def test_a_benchmark_ends_with_the_command_that_was_killed(saved, calls, tmp_path):
    started = tmp_path / "started"
    # In a session of its own, as an engine's processes may be.
    (tmp_path / "bin" / "vllm").write_text(f"#!/bin/sh\n/usr/bin/setsid /bin/sleep 300 &\necho $! > {started}\nwait\n")
    line = [sys.executable, "-m", "tune_prune.speed", "--model", saved["hf"], "--engine", "vllm"]
    command = subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    assert becomes_true(lambda: started.exists() and started.read_text().endswith("\n"), 100)
    process = psutil.Process(int(started.read_text()))
    command.kill()
    command.wait()
    assert becomes_true(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 15)
    assert becomes_true(lambda: not list(tmp_path.glob("tmp*")), 15)


def becomes_true(happened: Callable[[], bool], seconds: float) -> bool:
    """Say whether it does within so many seconds."""
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.1)
    return happened()


def test_what_an_engine_cannot_measure_is_one_sentence(saved, calls, sentence, monkeypatch, tmp_path):
    assert "--config names a search" in sentence("--config", "x", "--engine", "vllm")
    assert "--device is for transformers" in sentence("--model", "x", "--engine", "vllm", "--device", "cpu")
    assert "--dtype is not for llama.cpp" in sentence("--model", "x", "--engine", "llama.cpp", "--dtype", "float32")
    assert "convert_hf_to_gguf.py" in sentence("--model", saved["gguf"], "--engine", "llama.cpp")
    assert "save one with tune-prune prune --format gguf" in sentence("--model", saved["hf"], "--engine", "llama.cpp")
    for name in ("vllm", "llama-bench"):
        (tmp_path / "bin" / name).write_text(
            "#!/bin/sh\necho loading; echo 'ValueError: no room' >&2; echo bye >&2; exit 3\n"
        )
    said = sentence("--model", saved["hf"], "--engine", "vllm")
    assert "ended with exit code 3 (ValueError: no room)" in said
    monkeypatch.setenv("PATH", "")
    for engine, program in (("vllm", "vllm"), ("llama.cpp", "llama-bench")):
        said = sentence("--model", "tiny-llama", "--engine", engine)
        assert f"needs the program {program}, which is not on PATH; install" in said
