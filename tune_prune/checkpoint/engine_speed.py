"""Speed of models in the engines that serve them, by each engine's own benchmark: `vllm bench latency` and `llama-bench`.

The benchmarks are programs on PATH, so an engine may live in an environment of its own. As in generation_speed models take turns:
every round starts the program anew for each of them, a result is the median over the rounds, and what is compared is the ratio
of medians. A program warms up by itself, so every round counts. The prompt is of random tokens, and batches are of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tune_prune.checkpoint.card import saved_config, vllm_options
from tune_prune.checkpoint.generation_speed import GenerationSpeed
from tune_prune.core import terminal
from tune_prune.core.errors import UserError, cause_in
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import PRUNED_PREFIX
from tune_prune.models.pruned import modeling_tune_prune
from tune_prune.models.pruned.configuration_tune_prune import CONFIGS
from tune_prune.models.registration import auto_map

# What a user calls the engine -> the program of its benchmark, and how it is had
PROGRAMS = {
    "vllm": ("vllm", "install vLLM (pip install vllm, in an environment of its own if you like)"),
    "llama.cpp": ("llama-bench", "install llama.cpp (https://github.com/ggml-org/llama.cpp, docs/install.md)"),
}


@dataclass(frozen=True)
class _Turn:
    prefill_s: float
    decode_s: float  # of all new tokens
    dtype: str  # as the engine calls it, e.g. "bfloat16" or "Q4_K - Medium"
    device: str
    engine: str  # with its version, e.g. "vllm 0.32.0"


def program(engine: str) -> str:
    """Return the path of the program that measures in that engine. Raises UserError where there is none."""
    name, install = PROGRAMS[engine]
    path = shutil.which(name)
    if path is None:
        raise UserError(f"--engine {engine} needs the program {name}, which is not on PATH; {install} and put it there")
    return path


def measure(
    engine: str,
    models: Mapping[str, ModelSource],
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    folder: Path,
    dtype: str = "",
    shape: str = "free",
) -> tuple[dict[str, GenerationSpeed], str]:
    """Return the speed of each of `models` in that engine, by name, and the engine with its version, e.g. "vllm 0.32.0".

    models    by name: folders and hub models for vllm, GGUF files for llama.cpp
    folder    for temporary files; the programs' environment names it, so that tuning.orphans ends them
    dtype     in which vllm computes; llama.cpp computes in what a file holds
    shape     in which a model was pruned: vllm splits all of them as that one is made for

    Raises UserError where the program is not on PATH or fails.
    """
    path = program(engine)
    turns: dict[str, list[_Turn]] = {name: [] for name in models}
    with terminal.step("speed", lambda: repeats * len(models), "turns") as advance:
        for _ in range(repeats):
            for name, model in models.items():
                if engine == "vllm":
                    turn = _vllm_turn(path, model, prompt_tokens, new_tokens, folder, dtype, shape)
                else:
                    turn = _llama_turn(path, model, prompt_tokens, new_tokens, folder)
                turns[name].append(turn)
                advance(1)
    speeds = {
        name: GenerationSpeed(
            prefill_tokens_per_s=prompt_tokens / statistics.median(turn.prefill_s for turn in rounds),
            decode_tokens_per_s=new_tokens / statistics.median(turn.decode_s for turn in rounds),
            peak_memory_bytes=None,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            batch_size=1,
            repeats=repeats,
            dtype=rounds[0].dtype,
            device=rounds[0].device,
            prefill_s=tuple(turn.prefill_s for turn in rounds),
            decode_s=tuple(turn.decode_s for turn in rounds),
        )
        for name, rounds in turns.items()
    }
    return speeds, next(iter(turns.values()))[0].engine


def _run(command: list[str], folder: Path) -> tuple[str, str]:
    """Run a program to its end, with `folder` in its environment; return what it printed. Raises UserError with its own error where
    it fails."""
    done = subprocess.run(
        command,
        # The first is where transformers keeps class files, too. The second leaves it to be read when vLLM's processes give
        # themselves other names.
        env=os.environ | {"HF_MODULES_CACHE": str(folder), "SPT_NOENV": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        cause = cause_in(done.stdout, done.stderr)
        raise UserError(
            f"{' '.join(command)} ended with exit code {done.returncode} ({cause}); run it by hand to see why"
        )
    return done.stdout, done.stderr


@contextlib.contextmanager
def _understood(program: str) -> Iterator[None]:
    """Turn what is raised by results of another form than this version reads into a UserError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the results of {program} have another form than tune_prune reads ({type(error).__name__}: {error}); run it by hand, "
            "or install another version of it"
        ) from error


@contextlib.contextmanager
def _without_foreign_code(model: ModelSource, folder: Path) -> Iterator[list[str]]:
    """Give the arguments by which vLLM loads a model. Of a pruned checkpoint whose layers differ, a new folder in `folder`, of
    links, that has this package's class files in place of those that lie beside the weights: code of others is never run."""
    place = Path(model.location)
    values = saved_config(place)
    family = str(values.get("model_type", "")).removeprefix(PRUNED_PREFIX)
    if family not in CONFIGS or family == values["model_type"]:
        yield ["--model", model.location, *([] if model.revision is None else ["--revision", model.revision])]
        return
    with tempfile.TemporaryDirectory(dir=folder) as links:
        for path in place.iterdir():
            if path.name != "config.json" and path.suffix != ".py":
                (Path(links) / path.name).symlink_to(path)
        for path in Path(modeling_tune_prune.__file__).parent.glob("*_tune_prune.py"):
            shutil.copy(path, links)
        (Path(links) / "config.json").write_text(json.dumps(values | {"auto_map": auto_map(family)}), "utf-8")
        yield ["--model", links, "--trust-remote-code"]


def _vllm_turn(
    program: str, model: ModelSource, prompt_tokens: int, new_tokens: int, folder: Path, dtype: str, shape: str
) -> _Turn:
    """Time the first token of an answer, and all tokens: the benchmark gives the seconds of whole requests, and what the further
    tokens take on top is the decoding."""
    seconds, printed = [], ""
    options = vllm_options(saved_config(Path(model.location)), shape)
    with _without_foreign_code(model, folder) as which, tempfile.TemporaryDirectory(dir=folder) as own:
        file = Path(own) / "latency.json"
        for tokens in (1, 1 + new_tokens):
            command = [
                program, "bench", "latency", *which, *options, "--dtype", dtype, "--batch-size", "1",
                "--input-len", str(prompt_tokens), "--output-len", str(tokens),
                "--max-model-len", str(prompt_tokens + 1 + new_tokens), "--skip-tokenizer-init", "--disable-detokenize",
                "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", str(file),
            ]  # fmt: skip
            printed = "".join(_run(command, folder))
            with _understood(program):
                seconds.append(statistics.median(json.loads(file.read_text(encoding="utf-8"))["latencies"]))
    # The results do not say it, but the log of a start.
    version = re.search(r"LLM engine \(v([^)]+)\)", printed)
    device = re.search(r"\bdevice_config=(\w+)", printed)
    first, whole = seconds
    if whole <= first:
        raise UserError(
            f"{model.label} took {whole:.3g} s in vllm for {1 + new_tokens} tokens and {first:.3g} s for one, as the machine was "
            "busy; measure again, with more --new-tokens"
        )
    return _Turn(
        first, whole - first, dtype, device[1] if device else "its device", f"vllm {version[1]}" if version else "vllm"
    )


def _llama_turn(program: str, model: ModelSource, prompt_tokens: int, new_tokens: int, folder: Path) -> _Turn:
    """Time the prompt, and new tokens behind such a prompt."""
    tests = []
    for test in (
        ["-p", str(prompt_tokens), "-n", "0"],
        ["-p", "0", "-n", str(new_tokens), "-d", str(prompt_tokens)],
    ):
        printed, _ = _run([program, "-m", str(model.file), *test, "-r", "3", "-o", "json"], folder)
        with _understood(program):
            tests += json.loads(printed)
    with _understood(program):
        prefill, decode = tests
        seconds = [statistics.median(test["samples_ns"]) / 1e9 for test in tests]
        device = prefill["gpu_info"] or f"{prefill['cpu_info']}, {prefill['n_threads']} threads"
        engine = f"llama.cpp b{prefill['build_number']} ({prefill['build_commit']})"
        # Of "llama 1B all F32" the end: a pruned model may have another architecture.
        kind = re.sub(r"^\S+ \S+ (all |mostly )?", "", decode["model_type"])
        return _Turn(seconds[0], seconds[1], kind, device, engine)
