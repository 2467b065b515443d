"""A model folder as `save_pretrained` leaves it, and copies to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


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
