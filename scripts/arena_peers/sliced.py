"""SliceGPT (TransformerCompression) at 6b12cde (Ashkboos et al. 2024, arXiv:2401.15024): PCA rotates, and the hidden size is cut.

Embeddings are cut, too. Tied ones are first untied, as rotation makes two matrices of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arena_peers.make import BATCH, parameters


def prune(model: Any, windows: Tensor, ratio: float) -> Any:
    """Cut the hidden size to where 1 - `ratio` of the parameters that the model had before are left, the shortcuts' included."""
    from slicegpt import layernorm_fusion, rotate
    from slicegpt.adapters.llama_adapter import LlamaModelAdapter
    from slicegpt.slicing_scheduler import ConstSlicingScheduler

    config, layers, kept = model.config, model.model.layers, (1 - ratio) * parameters(model)
    per_dimension = sum(p.numel() for p in layers.parameters() if p.dim() == 2) // config.hidden_size
    per_dimension += 2 * config.vocab_size  # embeddings and head
    # d: the largest with per_dimension d + 2 layers d^2 (two shortcuts of each layer) <= kept
    size = int(((per_dimension**2 + 8 * len(layers) * kept) ** 0.5 - per_dimension) / (4 * len(layers)))
    config.tie_word_embeddings = False  # Mend: its code unties the head and leaves the config
    config.torch_dtype = torch.float32  # Mend: float16 by default
    config.use_cache = False  # Mend: it runs each layer twice, and the cache would see twice as many tokens
    adapter = LlamaModelAdapter(model)
    layernorm_fusion.replace_layers(adapter)
    layernorm_fusion.fuse_modules(adapter)
    batches = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in windows.split(BATCH)]
    # Its run_slicegpt.py leaves the head whole: of a small model a fifth of all parameters
    rotate.rotate_and_slice(adapter, batches, ConstSlicingScheduler(size, do_slice_head=True))
    return model
