"""A model folder as `save_pretrained` leaves it, and copies to damage; a GGUF file, and the cache of what is read of such files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.conftest import build_tiny
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.surgery import Sketch

SIZES = {"vocab_size": 272, "head_dim": 4, "max_position_embeddings": 128}  # heads fill the hidden size of 32


@pytest.fixture(scope="module")
def complete(tiny, tmp_path_factory) -> Path:
    """A folder as `save_pretrained` leaves it."""
    folder = tmp_path_factory.mktemp("models") / "my-model"
    tiny("qwen2", torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(complete, tmp_path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(complete, tmp_path / "my-model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tune_prune" / "models"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer."""
    return tokenizer(tmp_path_factory.mktemp("words"), pre_tokenizers.ByteLevel(add_prefix_space=False))


def tokenizer(folder: Path, pre: pre_tokenizers.PreTokenizer) -> Path:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "h"), ("2", "0")]
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges), "<|endoftext|>"]
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def saved(model: PreTrainedModel, words: Path, file: Path) -> Path:
    write_gguf(Sketch.of(model), FAMILIES[model.config.model_type], words, file, torch.float32, file.stem)
    return file


@pytest.fixture
def tiny_file(words: Path, cache: Path, tmp_path: Path) -> Path:
    return saved(build_tiny("llama-tied", torch.float32, **SIZES), words, tmp_path / "tiny.F32.gguf")
