from __future__ import annotations

import pytest
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tune_prune.models import catalog, loading


@pytest.fixture(scope="module")
def tiny_llama() -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """The config and the tokenizer of that embedded model."""
    source = catalog.resolve("tiny-llama")
    return loading.load_config(source), loading.load_tokenizer(source)
