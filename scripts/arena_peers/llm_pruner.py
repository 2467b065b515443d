"""LLM-Pruner at 128a07d (Ma et al. 2023, arXiv:2305.11627): its param_first Taylor score, block-wise, as its llama3.py does.

`recipe` is "global" (one ranking of the heads and channels of all layers) or "local" (its published recipe: the same share of every
layer but the first four and the last two).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from arena_peers.make import accumulate_gradients, parameters

STEPS = 12  # of the bisection


def prune(model: PreTrainedModel, windows: Tensor, ratio: float, recipe: str) -> Any:
    """Remove `ratio` of all parameters, as near as its own ratio, of heads and channels, comes to it."""
    import LLMPruner.torch_pruning as tp
    from LLMPruner.pruner import hf_llama_pruner

    model.config.use_cache = False  # Mend: its graph cannot follow a cache
    accumulate_gradients(model, windows)
    layers, config = model.model.layers, model.config
    chosen = layers if recipe == "global" else layers[4:-2]
    head_dim, shared = layers[0].self_attn.head_dim, config.num_attention_heads // config.num_key_value_heads
    pruner = tp.pruner.MetaPruner(
        model,
        windows[:2, :8],
        importance=_remembered(hf_llama_pruner.TaylorImportance(group_reduction="sum", taylor="param_first")),
        global_pruning=recipe == "global",
        ignored_layers=[],
        consecutive_groups={layer.self_attn.k_proj: head_dim for layer in layers},
        customized_pruners={LlamaRMSNorm: hf_llama_pruner.hf_rmsnorm_pruner},
        root_module_types=None,
        root_instances=[layer.self_attn.k_proj for layer in chosen] + [layer.mlp.gate_proj for layer in chosen],
    )
    # Parameters that go with an output of the root of a group: rows of k and v, and of q and o as many as share them; a channel
    cost = {layer.self_attn.k_proj: 2 * config.hidden_size * (1 + shared) for layer in layers}
    cost |= {layer.mlp.gate_proj: 3 * config.hidden_size for layer in layers}

    def begin(sparsity: float) -> Any:
        pruner.reset()
        pruner.per_step_ch_sparsity = [0, sparsity]
        return pruner.step(interactive=True)

    # Mend: its ratio is one of heads and channels, so that of all parameters is found by bisection; its local recipe fails where
    # that takes less than one KV group of a layer (it rounds the rows that go up)
    least = 0.0 if recipe == "global" else (head_dim - 1) / (head_dim * config.num_key_value_heads)
    target, low, high, found = ratio * parameters(model), least, 1.0, (float("inf"), 0.0)
    for _ in range(STEPS):
        middle = (low + high) / 2
        removed = sum(len(group[0][1]) * cost[group[0][0].target.module] for group in begin(middle))
        found = min(found, (abs(removed - target), middle))
        low, high = (middle, high) if removed < target else (low, middle)
    for group in list(begin(found[1])):
        group.prune()
    for layer in layers:  # as its llama3.py does
        attention = layer.self_attn
        attention.num_heads = attention.q_proj.weight.shape[0] // head_dim
        attention.num_key_value_heads = attention.k_proj.weight.shape[0] // head_dim
    return model


def _remembered(importance: Any) -> Any:
    """Return `importance` that looks at each group once: bisection asks for the same again."""
    known: dict[Any, Any] = {}

    def of(group: Any, **options: Any) -> Any:
        root = group[0][0].target.module
        if root not in known:
            known[root] = importance(group, **options)
        return known[root]

    return of
