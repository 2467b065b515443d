"""Torch-Pruning 1.6.1 (Fang et al. 2023, arXiv:2301.12900): its GroupTaylorImportance on the channels of all MLPs, ranked globally.

Its own examples/LLMs/prune_llm.py prunes hidden size and heads by magnitude; this is the library's first-order score, of which
the calibration windows can be a part.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from arena_peers.make import accumulate_gradients, parameters


def prune(model: PreTrainedModel, windows: Tensor, ratio: float, normalizer: str | None) -> Any:
    """Remove `ratio` of all parameters. `normalizer`: of the scores of a layer; the library's default is "mean"."""
    import torch_pruning as tp

    accumulate_gradients(model, windows)
    layers = model.model.layers
    channels = sum(layer.mlp.gate_proj.out_features for layer in layers)
    cost = 3 * model.config.hidden_size  # parameters of a channel: a row of gate and of up, a column of down
    pruner = tp.pruner.BasePruner(
        model,
        windows[:1, :8],
        importance=tp.importance.GroupTaylorImportance(normalizer=normalizer),
        global_pruning=True,
        pruning_ratio=ratio * parameters(model) / cost / channels,
        # Mend: else channels of the hidden size and of heads are ranked beside those of MLPs, and it stays undivided by none
        ignored_layers=[
            model.lm_head,
            model.model.embed_tokens,
            *(layer.self_attn for layer in layers),
            *(layer.mlp.down_proj for layer in layers),
        ],
        forward_fn=lambda model, tokens: model(input_ids=tokens, use_cache=False).logits,  # Mend: no cache in the graph
    )
    pruner.step()
    return model
