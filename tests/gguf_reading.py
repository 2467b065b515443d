"""Shared by the tests of GGUF files: tiny pruned models, what gguf.GGUFReader finds in a file, and what llama.cpp makes of it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xllamacpp
from transformers import PreTrainedModel

from tests.conftest import VARIANTS, build_tiny
from tune_prune.checkpoint.layers import compact
from tune_prune.models.families import FAMILIES, Family
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import cut

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

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def family_of(variant: str) -> Family:
    return FAMILIES[VARIANTS[variant][0]]


def pruned(
    variant: str, shape: str = "widths", dtype: torch.dtype = torch.float64, **overrides: Any
) -> PreTrainedModel:
    kept = ((part * 2)[: overrides.get("num_hidden_layers", 4)] for part in SHAPES[shape])
    plan = PruningPlan(*kept, target_params=0, removed_params=0, total_params=0)
    sketch = cut(build_tiny(variant, dtype, **overrides), family_of(variant), plan)
    return compact(sketch, family_of(variant))[0].in_memory()


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


class LlamaCpp:
    """llama.cpp itself on a file: its server in this process, on one thread, with a cache in float32. Ask it for something: a
    server that is dropped before it has answered anything may never end."""

    def __init__(self, path: Path) -> None:
        about = xllamacpp.CommonParams()
        about.model.path = str(path)
        about.n_ctx, about.n_parallel, about.verbosity = 128, 1, -1
        about.warmup = about.fit_params = False
        about.cpuparams.n_threads = about.cpuparams_batch.n_threads = about.n_threads_http = 1
        about.cache_type_k = about.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        about.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(about)

    def tokens(self, text: str) -> list[int]:
        """Of a text, with those that it adds."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": False}).encode()
        request = urllib.request.Request(f"{self._server.listening_address}/tokenize", body)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)["tokens"]

    def log_probabilities(self, ids: Sequence[int], then: int, times: int, vocabulary: int) -> np.ndarray:
        """[times + 1, vocabulary] of what follows `ids`, read at once, and after each of so many tokens `then`, one by one."""
        forced = {"logit_bias": [[then, 1e4]], "temperature": 0.0}  # of the choice; what is told is without it
        asked = {"prompt": list(ids), "n_predict": times + 1, "n_probs": vocabulary, **forced}
        (choice,) = self._server.handle_completions(asked)["choices"]
        found = np.full((times + 1, vocabulary), np.nan)
        for row, token in zip(found, choice["logprobs"]["content"], strict=True):
            assert token["id"] == then
            for one in token["top_logprobs"]:
                row[one["id"]] = one["logprob"]
        return found
