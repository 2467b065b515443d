"""Checkpoints of every family and shape in the real vLLM, on CPUs: `make test-serving`, which makes vLLM's environment.

This process saves pruned random models as `prune` does. Another one, in that environment and without tune_prune, runs them in
vLLM and in transformers, which must choose the same tokens and agree on the prompt's log-probabilities.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.conftest import build_tiny, whole
from tests.pruned_checkpoints import plan_of
from tune_prune.checkpoint import card, manifest
from tune_prune.checkpoint.manifest import Format, Provenance
from tune_prune.checkpoint.save import save_checkpoint
from tune_prune.core.config import PruningConfig
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import load_model
from tune_prune.trial.recipe import Recipe

if "SERVING_BIN" not in os.environ:  # the folder with the programs of the environment
    pytest.skip("vLLM has an environment of its own: make test-serving", allow_module_level=True)

BIN = Path(os.environ["SERVING_BIN"]).absolute()
READER = Path(__file__).with_name("vllm_reader.py")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
ABOUT = Provenance(config=PruningConfig("random", 16, 8, 0.3))
NATS = 1e-4  # the most that log-probabilities in float32 may differ by
PROMPT, NEW = [(7 * place * place + 3) % 64 for place in range(24)], 8  # longer than the windows of 5

# 8 heads of 32, the smallest that vLLM's attention takes on CPUs, in 4 KV groups; 4 layers.
SIZES = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
GROUPS, CHANNELS = 4, 96
# A variant of tests/conftest.py: what of the family is switched on.
VARIANTS = {
    "llama": "llama",
    "mistral-sliding": "mistral with a window",
    "qwen2": "qwen2, biases of q, k and v",
    "qwen3": "qwen3",
    "smollm3": "smollm3, one layer without rotary embedding",
    "granite": "granite with multipliers",
    "llama-biases": "llama, all biases",
    "qwen2-sliding": "qwen2, windows in half of the layers",
    "granite-biases-tied": "granite, all biases, tied",
    "phi3-window-partial": "phi3 with a window, heads rotated in part",
    "glm4": "glm4, biases of q, k and v, heads rotated in part",
}
# Numbers of KV groups and channels, layer by layer.
SHAPES = {
    "free": ((2, 1, 3, 1), (13, 47, 96, 7)),
    "aligned": ((2, 1, 3, 1), (32, 64, 96, 32)),
    "uniform": ((2, 2, 2, 2), (48, 48, 48, 48)),
    "hf-padded": ((2, 1, 3, 1), (13, 47, 96, 7)),
    "whole blocks alone": ((4, 4, 4, 4), (96, 96, 96, 96)),
}
# Layers whose attention goes, and whose MLP.
LAYERS = {"whole": ((), ()), "no attention": ((1,), ()), "no MLP": ((), (2,)), "a dropped layer": ((1,), (1,))}
# What no search makes: these shapes keep both blocks of every layer; and the dense model.
IMPOSSIBLE = {(shape, lost) for shape in ("aligned", "uniform") for lost in LAYERS if lost != "whole"}
IMPOSSIBLE |= {("whole blocks alone", "whole")}
CELLS = [(shape, lost) for shape in SHAPES for lost in LAYERS if (shape, lost) not in IMPOSSIBLE]


def write_model(folder: Path, variant: str) -> None:
    whole(build_tiny(variant, torch.float32, **SIZES)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{place}": place for place in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def write_checkpoint(model: Path, shape: str, lost: str, folder: Path, fmt: Format | None = None) -> Path:
    dense = load_model(resolve(str(model)), torch.float32, "cpu")
    without_attention, without_mlp = LAYERS[lost]
    groups, channels = SHAPES[shape]
    # Not the first ones of a layer: which are kept is seen, too.
    kept_groups = [
        () if at in without_attention else tuple(range(GROUPS - count, GROUPS)) for at, count in enumerate(groups)
    ]
    kept_channels = [
        () if at in without_mlp else tuple(range(CHANNELS - count, CHANNELS)) for at, count in enumerate(channels)
    ]
    plan = plan_of(SimpleNamespace(loaded=dense), kept_groups, kept_channels)
    save_checkpoint(dense, Recipe(plan), ABOUT, folder, fmt or ("hf-padded" if shape == "hf-padded" else "vllm"))
    return folder


def serve_line(folder: Path) -> list[str]:
    """The line with which `prune` says how to serve a checkpoint."""
    about = manifest.read(folder)
    assert about is not None
    return shlex.split(dict(card.uses(folder, about, str(folder)))["serve"])


def environment(modules: Path) -> dict[str, str]:
    """Of a process that does not have this package on its path, with Hugging Face's cache of code in `modules`."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | SETTINGS | {"HF_MODULES_CACHE": str(modules)}


def run_both(lines: dict[str, list[str]], answer: Path, dtype: str = "float32") -> dict[str, Any]:
    """What the reader says of the checkpoints of these lines."""
    request = {"lines": lines, "dtype": dtype, "prompt": PROMPT, "new": NEW}
    done = subprocess.run(
        [BIN / "python", "-P", READER, answer],
        input=json.dumps(request),
        env=environment(answer.with_suffix(".modules")) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(answer.read_text("utf-8"))


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest of the differences of two engines' log-probabilities, in nats."""
    return max(abs(a - b) for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True))


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """The picture of a card takes most of the time of a save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "picture", lambda *_: b"")
        yield


@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_gives_the_numbers_of_transformers(variant: str, tmp_path: Path, results: dict[str, Any]) -> None:
    write_model(tmp_path / "model", variant)
    lines = {}
    for shape, lost in CELLS:
        folder = tmp_path / f"{shape}-{lost}".replace(" ", "_")
        lines[f"{shape}/{lost}"] = serve_line(write_checkpoint(tmp_path / "model", shape, lost, folder))
    answer = run_both(lines, tmp_path / "answer.json")
    results["packages"] = answer["packages"]
    results["impossible"] = [f"{shape}, {lost}" for shape, lost in sorted(IMPOSSIBLE)]
    wrong = []
    for name, found in answer["checkpoints"].items():
        shape, lost = name.split("/")
        row = {"family": VARIANTS[variant], "shape": shape, "layers": lost, "dtype": "float32"}
        ours, truth = found["vllm"], found["transformers"]
        if "error" in ours:
            row |= {"error": ours["error"]}
        else:
            row |= {"greedy_equal": ours["tokens"] == truth["tokens"], "difference": difference(ours, truth)}
            row |= {"seconds": round(ours["seconds"], 1)}
        results["rows"].append(row)
        if "error" in row or not row["greedy_equal"] or not row["difference"] <= NATS:
            wrong.append(row)
    assert not wrong
    assert len(answer["checkpoints"]) == len(CELLS)


def test_a_layer_without_attention_is_refused_unless_it_is_saved_for_vllm(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama")
    folder = write_checkpoint(tmp_path / "model", "free", "no attention", tmp_path / "bare", "hf")
    line = ["vllm", "serve", str(folder), "--trust-remote-code"]
    (found,) = run_both({"bare": line}, tmp_path / "answer.json")["checkpoints"].values()
    assert "Layer 1 does not dispatch through the Transformers attention interface" in found["vllm"]["error"]


@pytest.mark.parametrize("variant", ["llama", "granite"])
def test_in_bfloat16_it_is_as_far_from_float32_as_transformers_is(
    variant: str, tmp_path: Path, results: dict[str, Any]
) -> None:
    write_model(tmp_path / "model", variant)
    lines = {"free": serve_line(write_checkpoint(tmp_path / "model", "free", "no attention", tmp_path / "free"))}
    (truth,) = run_both(lines, tmp_path / "float32.json")["checkpoints"].values()
    (found,) = run_both(lines, tmp_path / "bfloat16.json", "bfloat16")["checkpoints"].values()
    rounding = difference(found["transformers"], truth["transformers"])
    off = difference(found["vllm"], truth["transformers"])
    results["rows"].append(
        {
            "family": VARIANTS[variant],
            "shape": "free",
            "layers": "no attention",
            "dtype": "bfloat16",
            "greedy_equal": found["vllm"]["tokens"] == found["transformers"]["tokens"],
            "difference": difference(found["vllm"], found["transformers"]),
            "from_float32": off,
            "transformers_from_float32": rounding,
            "seconds": round(found["vllm"]["seconds"], 1),
        }
    )
    assert 0 < off <= 2 * rounding


def test_the_server_answers_a_request(tmp_path: Path) -> None:
    """With the options of the line that `prune` prints, to which the test adds what a small machine wants."""
    write_model(tmp_path / "model", "llama")
    folder = write_checkpoint(tmp_path / "model", "free", "no attention", tmp_path / "free")
    model, prompt = load_model(resolve(str(folder)), torch.float32, "cpu").model, torch.tensor([PROMPT])
    end = {"eos_token_id": model.config.vocab_size, "pad_token_id": 0}  # no token ends the text
    expected = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **end)[0, len(PROMPT) :].tolist()
    _, _, *arguments = serve_line(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "64"]
    arguments += ["--kv-cache-memory-bytes", str(2**26), "--enforce-eager"]
    server = subprocess.Popen(
        # `vllm serve` itself asks for metadata of a package "vllm", which the wheel for CPUs does not have under that name.
        [BIN / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments],
        env=environment(tmp_path / "modules"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watch = threading.Timer(280, os.killpg, (server.pid, signal.SIGKILL))
    watch.start()
    try:
        said = []
        assert server.stdout is not None
        for line in server.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("".join(said))
        while server.poll() is None:  # it listens a moment after it has said so
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        threading.Thread(target=server.stdout.read, daemon=True).start()  # so that it never waits for a reader
        body = {
            "model": str(folder),
            "prompt": PROMPT,
            "max_tokens": NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            (choice,) = json.load(response)["choices"]
    finally:
        watch.cancel()
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    assert choice["token_ids"] == expected
    assert choice["text"].split() == [f"w{token}" for token in expected]
