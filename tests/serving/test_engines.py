"""`speed --engine` with the real programs, each where it is on PATH."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tune_prune
from tests.search_folders import TINY_FOLDER
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.commands import speed
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.surgery import Sketch

ARGUMENTS = ("--prompt-tokens", "32", "--new-tokens", "16", "--repeats", "1")
# vllm bench takes prompts of ids up to 9,999, and vLLM's attention on CPUs heads of 32 and more.
SIZES = {"vocab_size": 10_000, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "head_dim": 32}


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not on PATH")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the tokenizer of tiny-llama."""
    folder = tmp_path_factory.mktemp("models") / "original"
    config = AutoConfig.for_model("llama", num_hidden_layers=4, num_key_value_heads=4, **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for path in TINY_FOLDER.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def measured(printed, tmp_path: Path, *argv: object) -> str:
    """Run the command; return the engine that it names. Its table and record have both models."""
    record = tmp_path / "record.json"
    out = printed(speed.main, *argv, *ARGUMENTS, "--output", record)
    values = json.loads(record.read_text())
    assert re.search(r"^pruned .* \(\d+\.\d\d to \d+\.\d\d\)", out, re.MULTILINE) and values["engine"] in out
    for one in values["models"].values():
        assert min(one["prefill_s"] + one["decode_s"]) > 0 and len(one["decode_s"]) == 1
    return values["engine"]


@needs("vllm")
def test_vllm(original, printed, tmp_path):
    tune_prune.open(original, device="cpu").prune("magnitude").save(tmp_path / "pruned")
    engine = measured(printed, tmp_path, "--model", tmp_path / "pruned", "--engine", "vllm", "--dtype", "float32")
    assert re.fullmatch(r"vllm \d+\.\d+\.\S+", engine)


@needs("llama-bench")
def test_llama_bench(original, printed, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(original)
    write_gguf(Sketch.of(model), FAMILIES["llama"], original, tmp_path / "original.gguf", torch.float32, "original")
    tune_prune.open(original, device="cpu").prune("magnitude").save(tmp_path / "pruned", "gguf")
    argv = ("--model", tmp_path / "pruned", "--engine", "llama.cpp", "--base", tmp_path / "original.gguf")
    assert re.fullmatch(r"llama\.cpp b\d+ \(\w+\)", measured(printed, tmp_path, *argv))
