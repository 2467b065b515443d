"""The precision of products, in an environment of peers."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def multiply_in(precision: str) -> None:
    """Set the precision of float32 products, except of rotary angles: transformers 4.46 makes them by a matrix product, and
    positions rounded to bfloat16 are wrong from 256 on (a dense model's perplexity in windows of 2,048 was 66 in place of 16)."""
    torch.set_float32_matmul_precision(precision)
    forward = LlamaRotaryEmbedding.forward

    def exact(*args: Any, **options: Any) -> Any:
        torch.set_float32_matmul_precision("highest")
        try:
            return forward(*args, **options)
        finally:
            torch.set_float32_matmul_precision(precision)

    LlamaRotaryEmbedding.forward = exact  # type: ignore[method-assign]
