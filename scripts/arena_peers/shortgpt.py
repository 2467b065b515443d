"""ShortGPT (Men et al. 2024, arXiv:2403.03853), which published no code: whole layers go, by their Block Influence.

Block Influence of a layer: 1 - E[cosine of what goes in and what comes out], over all calibration tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from arena_peers.make import BATCH, parameters

PLAIN = True  # a model of fewer layers, which transformers knows


@torch.no_grad()
def prune(model: PreTrainedModel, windows: Tensor, ratio: float, more: bool) -> Any:
    """Remove the most layers that are no more than `ratio` of all parameters; with `more`, one more."""
    layers = model.model.layers
    alike = torch.zeros(len(layers))

    def look(index: int) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...], returned: Any) -> None:
            out = returned[0] if isinstance(returned, tuple) else returned
            alike[index] += cosine_similarity(given[0], out, dim=-1).sum()

        return hook

    handles = [layer.register_forward_hook(look(index)) for index, layer in enumerate(layers)]
    for batch in windows.split(BATCH):
        model.model(input_ids=batch, use_cache=False)
    for handle in handles:
        handle.remove()
    count = int(ratio * parameters(model) / parameters(layers[0])) + more
    gone = set(alike.topk(count).indices.tolist())
    model.model.layers = nn.ModuleList(layer for index, layer in enumerate(layers) if index not in gone)
    model.config.num_hidden_layers = len(model.model.layers)
    return model
