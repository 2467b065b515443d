"""Models, tasks and texts that `search` cannot use: a sentence for each names file and way out, before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.search_folders import TINY, TINY_FOLDER, data_folder, model_folder
from tune_prune import embedded
from tune_prune.commands import search
from tune_prune.data.perplexity_text import TEXT_FILE

pytestmark = pytest.mark.usefixtures("nothing_created")


def write_weights(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def keep_index_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def store_in_8_bits(folder: Path) -> None:
    """As checkpoints in FP8 have it, whose scales are tensors beside the weights."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})


# How a copy of tiny-llama is broken (fields of its config, or a function of the folder), and what the sentence must hold.
BROKEN_MODELS: dict[str, tuple[dict[str, Any] | Callable[[Path], object], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "not a valid JSON"]),
    "config a list": (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "no model_type"]),
    "other family": ({"model_type": "gpt2"}, ["'gpt2'", "not supported", "qwen2"]),
    "misspelt family": ({"model_type": "llamaa"}, ["did you mean 'llama'?"]),
    "text for a size": ({"hidden_size": "big"}, ["hidden_size", "'big'"]),
    "no layers": ({"num_hidden_layers": 0}, ["num_hidden_layers 0", "at least 1"]),
    "no KV heads": ({"num_key_value_heads": 0}, ["num_key_value_heads 0"]),
    "heads that do not divide": ({"num_attention_heads": 7, "head_dim": None}, ["number of attention heads (7)"]),
    "unknown activation": ({"hidden_act": "nope"}, ["no model that can be built", "nope"]),
    "left out size": ({"hidden_size": None}, ["do not fit its config.json", "model.embed_tokens.weight"]),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, ["quantised (fp8", "made from"]),
    "weights in 8 bits": (store_in_8_bits, ["quantised (model.layers.0.mlp.down_proj.weight is F8_E4M3)"]),
    "other width": ({"intermediate_size": 72}, ["gate_proj.weight is [", "instead of [72"]),
    "more layers": ({"num_hidden_layers": 99}, ["is missing, and", "more such tensors"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "weights cut off": (
        write_weights((TINY_FOLDER / "model.safetensors").read_bytes()[:-5000]),
        ["damaged or cut off", "bytes", "download the model again"],
    ),
    "weights a Git LFS pointer": (
        write_weights(b"version https://git-lfs.github.com/spec/v1\n"),
        ["model.safetensors is a pointer of Git LFS", "git lfs pull"],
    ),
    "tokenizer a Git LFS pointer": (
        lambda folder: (folder / "tokenizer.json").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0"
        ),
        ["tokenizer.json is a pointer of Git LFS", "git lfs pull"],
    ),
    "an adapter beside": (
        lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        ["has adapter_config.json beside its config.json", "move that file away", "merge the adapter"],
    ),
    "an adapter alone": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        ["is an adapter (adapter_config.json) and no model", "merge the adapter into the model that it names"],
    ),
    "weights elsewhere": (
        {"transformers_weights": "other.safetensors"},
        ["transformers_weights: 'other.safetensors'", "take"],
    ),
    "config elsewhere": (
        {"configuration_files": ["config.4.0.0.json"]},
        ["configuration_files: ['config.4.0.0.json']", "take"],
    ),
    "images, too": (
        {"model_type": "mistral3"},
        ["'mistral3' is not supported", "language model (mistral) as one of its parts"],
    ),
    "images, too, in 8 bits": (
        {
            "model_type": "mistral3",
            "text_config": {"model_type": "ministral3"},
            "quantization_config": {"quant_method": "fp8"},
        },
        ["'mistral3' is not supported", "language model (ministral3) as one of its parts"],
    ),
    "no language model": ({"model_type": "t5"}, ["'t5' is not supported: a model of it is no causal language model"]),
    "weights of a missing part": (keep_index_only, ["lacks 1 of 1 weight files", "model-1.safetensors"]),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("token*")], ["tokenizer", "complete"]),
    "tokenizer no JSON": (lambda folder: (folder / "tokenizer.json").write_text("{"), ["tokenizer"]),
    "tokenizer of another model": ({"vocab_size": 10}, ["gives the token id", "vocab_size", "10"]),
    "short positions": ({"max_position_embeddings": 8}, ["seq_len 32", "8 tokens"]),
}


@pytest.mark.parametrize(("change", "words"), BROKEN_MODELS.values(), ids=BROKEN_MODELS)
def test_broken_models_are_refused_before_weights_are_loaded(
    change: dict[str, Any] | Callable[[Path], object], words: list[str], refusal: Callable[..., str], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "broken", **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(folder)
    sentence = refusal("--model", folder, "--search-space", "smoke", "--calibration", "embedded")
    assert [word for word in words if word not in sentence] == [], sentence


def test_a_file_is_no_model(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    assert "model.bin is a file" in refusal("--model", tmp_path / "model.bin")


def test_models_must_be_distinct(refusal: Callable[..., str], plan_text: Callable[..., str], tmp_path: Path) -> None:
    more = ("--search-space", "smoke", "--calibration", "embedded", "--data-dir", data_folder(tmp_path / "data"))
    more += ("--tasks", "piqa", "--limit", "5")
    one, same_name = model_folder(tmp_path / "a" / "m"), model_folder(tmp_path / "b" / "m", rms_norm_eps=1e-5)
    copy = model_folder(tmp_path / "copy")
    assert "'m'" in refusal("--model", one, "--model", same_name, *more)
    assert "same model" in refusal("--model", one, "--model", copy, *more)
    assert "1 trials" not in plan_text("--model", one, "--model", one, *more)  # the same name twice is once
    (copy / "model.safetensors").write_bytes(b"")
    sentence = refusal("--model", one, "--model", copy, *more)
    assert sentence.startswith(f"error: --model {copy}: weight file")  # of several models the broken one is named


# A file of --data-dir, what is written there (None: the file is taken away), and what the sentence must hold.
BROKEN_DATA: dict[str, tuple[str, bytes | None, list[str]]] = {
    "task missing": ("tasks/boolq/test.jsonl", None, ["task files are missing", "boolq/test.jsonl", "--tasks"]),
    "bad line": ("tasks/boolq/test.jsonl", b'{"a": 1}\n{oops\n', ["boolq/test.jsonl, line 2", "not JSON"]),
    "no items": ("tasks/piqa/test.jsonl", b"\n", ["piqa/test.jsonl has no questions"]),
    "items no text": ("tasks/piqa/test.jsonl", b"\xff\xfe", ["piqa/test.jsonl is not UTF-8"]),
    "bad definition": ("tasks/piqa/task.yaml", b"a: [", ["piqa/task.yaml is not valid YAML"]),
    "perplexity text missing": (TEXT_FILE, None, ["perplexity text", "is missing"]),
    "perplexity text empty": (TEXT_FILE, b" \n", ["perplexity text", "is empty"]),
    "perplexity text binary": (TEXT_FILE, b"\xff\xfe", ["perplexity text", "not UTF-8 text (byte 0)"]),
    "a late byte": (
        TEXT_FILE,
        b"\xef\xbb\xbf" + b"a b\n" * 5000 + b"\xe9",
        ["perplexity text", "not UTF-8 text (byte 20,003)"],
    ),
}


@pytest.mark.parametrize(("file", "content", "words"), BROKEN_DATA.values(), ids=BROKEN_DATA)
def test_broken_data_is_refused(
    file: str, content: bytes | None, words: list[str], refusal: Callable[..., str], tmp_path: Path
) -> None:
    path = data_folder(tmp_path / "data") / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    sentence = refusal(*TINY, "--data-dir", tmp_path / "data")
    assert [word for word in words if word not in sentence] == [], sentence


def test_data_without_tasks_and_without_calibration_text(refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty/tasks is not a folder" in refusal(*TINY, "--data-dir", tmp_path / "empty")
    folder, data = model_folder(tmp_path / "m"), data_folder(tmp_path / "data")
    sentence = refusal("--model", folder, "--search-space", "smoke", "--data-dir", data)
    assert "no calibration text" in sentence and "--calibration FILE" in sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [(b" \n", "is empty"), (b"\xff\xfe\x80", "UTF-8"), (b"too short", "enough for 0 samples of 16")],
)
def test_unusable_calibration_texts(content: bytes, words: str, refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    assert words in refusal(*TINY, "--calibration", tmp_path / "text")


def test_calibration_on_the_perplexity_text_is_refused(tmp_path, capsys):
    text = tmp_path / "copy.txt"
    text.write_text(embedded.perplexity_text() + "\n\n")  # layout does not make it another text
    assert search.main([*TINY, "--dry-run", "--calibration", str(text)]) == 2
    assert "is the text that perplexity is reported on" in capsys.readouterr().err


def test_unusable_mixtures(refusal: Callable[..., str], tmp_path: Path) -> None:
    copy, short, report = (tmp_path / f"{name}.txt" for name in ("copy", "short", "report"))
    copy.write_text(embedded.calibration_text() + "\n")
    short.write_text("too short")
    report.write_text(embedded.perplexity_text())
    assert f"{copy} is twice in embedded+{copy}, by two names" in refusal(*TINY, "--calibration", f"embedded+{copy}")
    assert f"{short}, of embedded+{short}: the" in refusal(*TINY, "--calibration", f"embedded+{short}")
    assert "that perplexity is reported on" in refusal(*TINY, "--calibration", f"embedded+{report}")
    assert "a mixture with an empty name" in refusal(*TINY, "--calibration", "embedded+")
