"""Shared by the tests of GGUF files: tiny pruned models, what gguf.GGUFReader finds in a file, and llama.cpp's rules for
it, restated in numpy from its graphs, flaws included: `deci` drops what attention adds in a layer without MLP, knows no output bias
of attention that is not there, and llama and deci rotate neighbouring rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.conftest import VARIANTS, build_tiny
from tune_prune.checkpoint.layers import compact
from tune_prune.models.families import FAMILIES, Family
from tune_prune.pruning.groups import PruningPlan

HIDDEN, HEAD_DIM, QUERIES_PER_KV = 32, 6, 2
G, M = (0, 1, 2, 3), tuple(range(40))
# Kept groups and channels, layer by layer.
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]] = {
    "dense": ((G,) * 4, (M,) * 4),
    "uniform": (((0, 2), (1, 3), (0, 1), (2, 3)), tuple(tuple(range(i, i + 20)) for i in range(4))),
    "widths": (((0, 2, 3), (1,), G, (2, 3)), (M, tuple(range(3, 20)), tuple(range(1, 40, 3)), (5,))),
    "no attention": ((G, (), (1, 2), ()), (M, (0, 4, 9), M, tuple(range(11)))),
    "no MLP": (((3,), (1,), (0, 3), G), ((), tuple(range(7)), (), ())),
    "layer dropped": ((G, (), (), (1, 3)), (M, (), (2, 3, 5), ())),
}


def family_of(variant: str) -> Family:
    return FAMILIES[VARIANTS[variant][0]]


def pruned(
    variant: str, shape: str = "widths", dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    plan = PruningPlan(*SHAPES[shape], target_params=0, removed_params=0, total_params=0)
    return compact(build_tiny(variant, dtype, **overrides), family_of(variant), plan)[0]


class File:
    """What gguf.GGUFReader finds: metadata without the architecture's prefix, and tensors as [out, in]."""

    def __init__(self, path: Path, notes: Sequence[str] = ()) -> None:
        reader = gguf.GGUFReader(path)
        self.notes = notes
        contents = {name: field.contents() for name, field in reader.fields.items()}
        self.architecture = contents["general.architecture"]
        self.meta = {name.removeprefix(f"{self.architecture}."): value for name, value in contents.items()}
        self.types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        self.tensors = {}
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
            assert values.shape == tuple(int(size) for size in tensor.shape[::-1])  # GGUF has the columns first
            self.tensors[tensor.name] = values

    def per_layer(self, key: str) -> list[int]:
        value = self.meta[key]
        return value if isinstance(value, list) else [value] * self.meta["block_count"]


def llama_cpp(file: File, ids: Sequence[int]) -> np.ndarray:
    """Logits [time, vocabulary] by llama.cpp's rules for these architectures, from nothing but the file."""
    w = {name: values.astype(np.float64) for name, values in file.tensors.items()}
    d, eps = file.meta["attention.key_length"], file.meta["attention.layer_norm_rms_epsilon"]
    time = np.arange(len(ids))
    factors = w.get("rope_freqs.weight", np.ones(d // 2)) * file.meta.get("rope.scaling.factor", 1.0)
    angles = time[:, None] * file.meta["rope.freq_base"] ** (-2 * np.arange(d // 2) / d) / factors  # [time, d/2]
    pairs = file.architecture in ("llama", "deci")

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x: np.ndarray) -> np.ndarray:  # [time, heads, d]
        first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if pairs else (np.s_[..., : d // 2], np.s_[..., d // 2 :])
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned = np.empty_like(x)
        turned[first] = x[first] * cos - x[second] * sin
        turned[second] = x[first] * sin + x[second] * cos
        return turned

    x = w["token_embd.weight"][list(ids)]
    heads, kv_heads = file.per_layer("attention.head_count"), file.per_layer("attention.head_count_kv")
    for i, (n, k) in enumerate(zip(heads, kv_heads, strict=True)):
        at = f"blk.{i}"
        added: np.ndarray | float = 0.0
        if n:
            h = norm(x, f"{at}.attn_norm")
            if f"{at}.attn_qkv.weight" in w:
                q, key, v = np.split(linear(h, f"{at}.attn_qkv").reshape(len(ids), -1, d), (n, n + k), axis=1)
            else:
                q, key, v = (linear(h, f"{at}.attn_{part}").reshape(len(ids), -1, d) for part in "qkv")
            if f"{at}.attn_q_norm.weight" in w:
                q, key = norm(q, f"{at}.attn_q_norm"), norm(key, f"{at}.attn_k_norm")
            q, key, v = rotate(q), rotate(key).repeat(n // k, axis=1), v.repeat(n // k, axis=1)
            scores = np.einsum("thd,shd->hts", q, key) / np.sqrt(d)
            scores[:, time[:, None] < time] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            added = linear(np.einsum("hts,shd->thd", weights, v).reshape(len(ids), -1), f"{at}.attn_output")
        if not file.per_layer("feed_forward_length")[i]:
            continue
        x = x + added
        h = norm(x, f"{at}.ffn_norm")
        gate = linear(h, f"{at}.ffn_gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.ffn_up"), f"{at}.ffn_down")
    return norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T
