"""FLAP at 3bb57db (An et al. 2023, arXiv:2312.11983): WIFV with AL-AM and the bias that makes up for what is removed.

Its own model has 128-wide heads without shared keys, so what knows that is mended here; everything else is its lib/prune.py.
"""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from arena_peers.make import parameters


def prune(model: Any, windows: Tensor, ratio: float) -> Any:
    """Remove `ratio` of all parameters; the biases that it adds come on top."""
    layers, config = model.model.layers, model.config
    attention = layers[0].self_attn
    width = attention.head_dim * config.num_attention_heads // config.num_key_value_heads
    flap = _library(width, (2 * width + 2 * attention.head_dim) / 3)
    plain = flap.compress

    def compress(
        layer: Any, heads: Tensor | None, mlp: Tensor | None, mean: Tensor, *rest: Any, **options: Any
    ) -> None:
        """Cut KV groups with all of their queries (Mend: its own cuts heads that share nothing); MLPs are left to it."""
        if heads is None:
            return plain(layer, heads, mlp, mean, *rest, **options)
        own = layer.self_attn
        queries, keys = heads.repeat_interleave(width), heads.repeat_interleave(own.head_dim)
        for linear, rows in ((own.q_proj, queries), (own.k_proj, keys), (own.v_proj, keys)):
            linear.weight.data = linear.weight.data[rows]
            if linear.bias is not None:  # Mend: its own model has none
                linear.bias.data = linear.bias.data[rows]
        weight = own.o_proj.weight.data
        own.o_proj.bias.data = (mean * ~queries) @ weight.T
        own.o_proj.weight.data = weight[:, queries]
        own.num_key_value_heads = int(heads.sum())
        own.num_heads = own.num_key_value_heads * own.num_key_value_groups
        if not own.num_heads:
            layer.self_attn = Nothing(own.o_proj.bias)  # transformers cannot run attention without a head

    flap.compress = compress
    flap.get_loaders = lambda *_, **__: (
        [(window[None],) for window in windows],
        None,
    )  # Mend: in place of its own text
    for layer in layers:  # as its main.py does, for 32 layers
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    model.seqlen = windows.shape[1]
    prunable = sum(linear.weight.numel() for layer in layers for linear in layer.modules() if type(linear) is nn.Linear)
    args = SimpleNamespace(
        nsamples=len(windows),
        seed=0,
        metrics="WIFV",
        structure="AL-AM",
        unstr=False,
        pruning_ratio=ratio * (parameters(model) - 2 * len(layers) * config.hidden_size) / prunable,
    )
    with torch.no_grad():
        flap.prune_flap(args, model, None, torch.device("cpu"))
    return model


class Nothing(nn.Module):
    """Attention of which the bias is left."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias.data)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None, None]:
        return self.bias.expand_as(hidden_states), None, None


def _library(width: int, cost: float) -> Any:
    """Return its lib/prune.py for KV groups whose queries are `width` wide together, each as large as `cost` channels."""
    spec = find_spec("lib.prune")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    text = text.replace("reshape(len(layers), -1, 128)", f"reshape(len(layers), -1, {width})")  # Mend: 128-wide heads
    text = text.replace("512.0 / 3", str(cost))
    text = text.replace(".type(torch.half)", ".float()")  # Mend: no CPU multiplies half and float32
    module = module_from_spec(spec)
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module
