"""How large a model is, read off its modules: dense, pruned, padded or on the meta device.

    params              every distinct parameter once: tied embeddings are one
    weight_bytes        the bytes of those parameters
    kv_bytes_per_token  keys and values that one more token leaves in the cache of all layers: 2·K·d numbers a layer. A layer
                        with a sliding window stops growing when its window is full; up to there it costs the same.
    macs_per_token      multiply-accumulates of all projections and the head for one token, i.e. one per weight. The head
                        counts where it is tied, too; embeddings (a look-up), norms and attention scores (they grow with the
                        context) do not.

A layer without q_proj has no attention and one without gate_proj no MLP (models/pruned); one whose MLP has no channels
left is the same. Check values for Llama-3-8B in bfloat16: 8,030,261,248 parameters, 131,072 KV bytes (32 layers x 8 KV heads x
128 x 2 x 2 bytes), 7,504,658,432 MACs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from tune_prune.models.families import Family, decoder_layers


@dataclass(frozen=True)
class Sizes:
    """What a model takes: see the top of this module."""

    params: int
    weight_bytes: int
    kv_bytes_per_token: int  # of one sequence
    macs_per_token: int


def sizes(model: PreTrainedModel, family: Family, dtype: torch.dtype | None = None) -> Sizes:
    """The sizes of `model`, whose layers may have lost blocks. Its weights and its cache are counted in `dtype`; by default
    weights as they are, the cache in the dtype of the projections that fill it."""
    params = list(model.parameters())  # each once, however many modules share it
    cache_bytes = macs = 0
    for layer in decoder_layers(model, family):
        parts = _projections(layer, family)
        macs += sum(weight.numel() for weight in parts.values())
        for role in ("key", "value"):
            if role in parts:
                cache_bytes += parts[role].shape[0] * (dtype or parts[role].dtype).itemsize
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "every family has a linear head"
    return Sizes(
        params=sum(p.numel() for p in params),
        weight_bytes=sum(p.numel() * (dtype or p.dtype).itemsize for p in params),
        kv_bytes_per_token=cache_bytes,
        macs_per_token=macs + head.weight.numel(),
    )


def _projections(layer: nn.Module, family: Family) -> dict[str, torch.Tensor]:
    """The weights [out, in] of those projections that a layer still has, by role."""
    modules = dict(layer.named_modules())
    found = {role: getattr(modules.get(path), "weight", None) for role, path in family.projections().items()}
    return {role: weight for role, weight in found.items() if weight is not None}


def size_table(rows: Mapping[str, Sizes], disk_bytes: Mapping[str, int]) -> str:
    """The sizes of several models in aligned columns, each number with its share of the first row's (the original).

    `disk_bytes` are the bytes of the weight files, by row; a row that has none there gets a dash,
    and without any there is no such column."""
    names = list(rows)
    columns: list[tuple[str, list[int | None]]] = [
        ("parameters", [rows[name].params for name in names]),
        ("bytes on disk", [disk_bytes.get(name) for name in names]),
        ("cache bytes/token", [rows[name].kv_bytes_per_token for name in names]),
        ("multiply-adds/token", [rows[name].macs_per_token for name in names]),
    ]
    table = [["", *map(row_label, names)]]
    for title, values in columns:
        if not any(values):
            continue
        table.append([title, *("-" if value is None else f"{value:,}" for value in values)])
        table.append(["", *(share(value, values[0]) for value in values)])
    return "\n".join(aligned([list(row) for row in zip(*table, strict=True)]))


def row_label(name: str) -> str:
    """How a person calls a row of `Manifest.sizes`."""
    return {"dense": "original"}.get(name, name)


def share(value: float | None, whole: float | None) -> str:
    """`value` in percent of `whole`: 80.0%; a dash where that is not known."""
    return "-" if value is None or not whole else f"{100 * value / whole:.1f}%"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows in columns: the first `left` flush left, numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
