"""The tokenizer of a checkpoint is the base model's own file, not what transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from tests.checkpoint.test_gguf_vocab import byte_level
from tests.checkpoint.test_streamed_save import PLANS, written
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import load_model, original_tokenizer

TEXT = "the\n\n12345  <tool> the"
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.fixture
def base(tiny: Callable, tmp_path: Path) -> Path:
    """A model as SmolLM2 is, whose tokenizer class transformers 5 rebuilds without the split of digits."""
    folder = tmp_path / "base"
    tiny("llama", torch.float32, vocab_size=300).save_pretrained(folder)
    byte_level(DIGITS).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return folder


@pytest.mark.parametrize("plan", ["alike", "different in every layer"])
def test_it_is_the_file_of_the_base_and_gives_its_tokens(base: Path, tmp_path: Path, plan: str) -> None:
    assert "Digits" not in original_tokenizer(resolve(str(base))).backend_tokenizer.to_str()  # else this tests nothing
    found = written(load_model(resolve(str(base)), torch.float32, "cpu"), PLANS[plan], tmp_path / "out", "hf", 10**9)
    assert found["tokenizer.json"] == (base / "tokenizer.json").read_bytes()
    mine, its = (AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] for folder in (tmp_path / "out", base))
    assert mine == its


def test_a_gguf_file_names_the_split_of_that_file(base: Path, tmp_path: Path) -> None:
    dense = load_model(resolve(str(base)), torch.float32, "cpu")
    (file,) = [n for n in written(dense, PLANS["alike"], tmp_path / "out", "gguf", 10**9) if n.endswith(".gguf")]
    assert gguf.GGUFReader(tmp_path / "out" / file).fields["tokenizer.ggml.pre"].contents() == "smollm"


def test_tokens_that_stand_elsewhere_are_not_lost(base: Path, tmp_path: Path) -> None:
    """Tokens of tokenizer_config.json, which transformers 5 writes into tokenizer.json only, are kept."""
    more = {"299": {"content": "<more>", "special": True, "normalized": False}}
    config = {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": more}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    dense = load_model(resolve(str(base)), torch.float32, "cpu")
    number = dense.tokenizer.convert_tokens_to_ids("<more>")
    assert number is not None and dense.tokenizer("<more>")["input_ids"] == [number]
    written(dense, PLANS["alike"], tmp_path / "out", "hf", 10**9)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("<more>")["input_ids"] == [number]
