"""The header of a GGUF file: sizes, tensors, tokenizer; and a sentence for a file whose model would not be the one that it holds.

A setting or a tensor that is not read would silently give another model, so everything that changes its output is known here or
refused. Source: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from tune_prune.core.errors import UserError
from tune_prune.models.families import FAMILIES
from tune_prune.models.weight_files import check_pointers

# Architecture -> whether rows of q and k that turn together are neighbours (transformers has them half a head apart).
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False, "gemma3": False}
MODEL_TYPES = {"gemma3": "gemma3_text"}  # transformers' name of an architecture, where it is another

# Settings of an architecture that transformers makes a config of, or that change nothing, and others that are looked at here.
_WHOLE = (
    "context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size", "rope.dimension_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
)  # fmt: skip
_READ: dict[str, type] = {
    **dict.fromkeys(_WHOLE, int),
    "rope.freq_base": float, "attention.layer_norm_rms_epsilon": float, "attention.causal": bool, "tensor_data_layout": str,
}  # fmt: skip
_SLIDE = {"gemma3"}  # architectures of which a window (attention.sliding_window) is read, too
_GEMMA_HEAD = 256  # of every Gemma 3 but the one of 27B, whose attention has a scale that no file states
_OTHERS: dict[str, type] = {
    "split.count": int, "tokenizer.ggml.model": str, "tokenizer.ggml.pre": str, "tokenizer.ggml.add_space_prefix": bool,
}  # fmt: skip
_KINDS = {int: "whole number", float: "floating-point number", bool: "switch", str: "text"}
_NEUTRAL: tuple[Any, ...] = (0, 1, "none", [])  # values of other settings with which they do nothing; of switches False
# tokenizer.ggml.pre of byte-level tokenizers of which transformers splits texts rightly, by architecture.
_QWEN = {"qwen2", "deepseek-r1-qwen"}
_LLAMA = {"gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "smaug-bpe", "tekken"}
_BEGINS = {"llama3", "llama-v3", "llama-bpe", "tekken"}  # with which llama.cpp adds BOS unless a file says otherwise
_BIASED = {"qwen2": ("attn_q", "attn_k", "attn_v")}  # what has a bias in the model that transformers makes of a file
_SPLITS = {"llama": _LLAMA, "qwen2": _QWEN, "qwen3": _QWEN}


@dataclass(frozen=True)
class Header:
    """A GGUF file's description of its model."""

    architecture: str  # one of ARCHITECTURES
    quantization: str  # e.g. Q4_1
    tensors: dict[str, gguf.ReaderTensor]  # by name; their data stay in the file until they are looked at
    head_dim: int | None  # where the file states it
    license: dict[str, str]  # as in a model card's metadata; empty where the file states none


def read(path: Path) -> Header:
    """Return the header of the file. Raises UserError for what is no GGUF file, is damaged or cut off, or cannot be read as a dense
    model of one of ARCHITECTURES."""
    header, values = contents(path)
    if what := _unreadable(header, values):
        raise UserError(
            f"GGUF file {path} cannot be read: {what}; give the model in Hugging Face format: a hub id, or a folder with "
            "config.json and safetensors"
        )
    return header


def contents(path: Path) -> tuple[Header, dict[str, Any]]:
    """Return the header of a file of any architecture, and its settings. Raises UserError for what is no whole GGUF file."""
    check_pointers([path])
    try:
        reader = gguf.GGUFReader(path)
        if reader.byte_order == "S":
            raise ValueError("it is of the other byte order (big-endian), which is not read")
        # Of arrays the first ones.
        values = {name: field.contents(slice(1024)) for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, OSError) as error:  # whatever it trips over
        cause = " ".join(str(error).split())[:160]
        raise UserError(
            f"model file {path} is no whole GGUF file of a version that is known ({type(error).__name__}: {cause}); download "
            "it again"
        ) from error
    header = Header(
        str(values.get("general.architecture")),
        _quantization(values, reader.tensors),
        {tensor.name: tensor for tensor in reader.tensors},
        values.get(f"{values.get('general.architecture')}.attention.key_length"),
        {key: text for key in _LICENSE if isinstance(text := values.get(f"general.{key.replace('_', '.')}"), str)},
    )
    return header, values


def is_read(path: Path) -> bool:
    """Return whether `read` takes the file."""
    try:
        read(path)
    except UserError:
        return False
    return True


_LICENSE = ("license", "license_name", "license_link")


def _quantization(values: dict[str, Any], tensors: list[gguf.ReaderTensor]) -> str:
    """Return the quantization as the file calls it, else the type of most tensors."""
    try:
        return gguf.LlamaFileType(values["general.file_type"]).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (KeyError, ValueError):
        return Counter(tensor.tensor_type.name for tensor in tensors).most_common(1)[0][0] if tensors else "none"


def _unreadable(header: Header, values: dict[str, Any]) -> str:
    """Return why a file is not read, in a clause; empty where it is."""
    arch, known = header.architecture, ", ".join(ARCHITECTURES)
    if values.get("general.type", "model") != "model":
        return f"it holds no model but a part of one (general.type {values['general.type']!r:.60})"
    family = FAMILIES.get(MODEL_TYPES.get(arch, arch))
    if arch not in ARCHITECTURES or family is None:
        return f"its architecture {arch!r:.60} is none of those that are read ({known})"
    read = _READ | ({"attention.sliding_window": int} if arch in _SLIDE else {})
    for name, expected in {**{f"{arch}.{setting}": of for setting, of in read.items()}, **_OTHERS}.items():
        if name in values and type(values[name]) is not expected:
            return f"it sets {name} to {values[name]!r:.60}, which is no {_KINDS[expected]}"
    if values.get("split.count", 0) > 1:
        return f"it is one of {values['split.count']} files of a model (join them with llama-gguf-split --merge)"
    if "rope_freqs.weight" in header.tensors:
        return (
            "its rotary frequencies are scaled (rope_freqs.weight), which transformers does not read from such a file"
        )
    biased = [name.split(".") for name in header.tensors if name.endswith(".bias")]
    if extra := [name for name in biased if name[-2] not in _BIASED.get(arch, ())]:
        return f"it has biases that transformers' {arch} models do not have ({'.'.join(extra[0])})"
    if values.get(f"{arch}.attention.causal", True) is not True:
        return f"its tokens see those behind them ({arch}.attention.causal), and transformers' do not"
    for name, value in values.items():
        prefix, _, setting = name.partition(".")
        neutral = value in _NEUTRAL and value is not True  # which is equal to 1
        if prefix == arch and setting not in read and not neutral:
            return f"it sets {name} to {value!r:.60}, which transformers does not read from such a file"
    heads, hidden = values.get(f"{arch}.attention.head_count"), values.get(f"{arch}.embedding_length")
    if heads is None or hidden is None or heads < 1:
        return f"it does not say the sizes of its layers ({arch}.attention.head_count is {heads!r})"
    if family.heads_divide_hidden and hidden % heads:
        return f"its {heads} heads do not divide the hidden size of {hidden}, as transformers' {arch} models want it"
    usual = {"rope.dimension_count": hidden // heads} if arch == "llama" else {}
    of_heads = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    sizes = {f"{arch}.{n}": values.get(f"{arch}.{n}", usual.get(n)) for n in of_heads}
    if len({size for size in sizes.values() if size is not None}) > 1:
        return f"its heads are of several sizes ({', '.join(f'{n} {s}' for n, s in sizes.items() if s is not None)})"
    tokenizer, split = values.get("tokenizer.ggml.model", "none"), values.get("tokenizer.ggml.pre", "not stated")
    if tokenizer not in ("gpt2", "llama"):
        return f"it has no tokenizer that transformers reads (tokenizer.ggml.model {tokenizer!r})"
    if arch == "gemma3" and header.head_dim != _GEMMA_HEAD:
        return f"its heads are of {header.head_dim}, not {_GEMMA_HEAD}, and it does not say the scale of its attention"
    if tokenizer == "gpt2" and split not in _SPLITS.get(arch, ()):
        return f"its tokenizer splits texts in a way that is not known here (tokenizer.ggml.pre {split!r})"
    if tokenizer == "gpt2" and split in _BEGINS and "tokenizer.ggml.add_bos_token" not in values:
        return (
            f"it does not say whether a text begins with a BOS token (tokenizer.ggml.add_bos_token): with its tokenizer, "
            f"{split!r}, it does in llama.cpp, and not in transformers"
        )
    spaced = arch != "gemma3"
    if tokenizer == "llama" and values.get("tokenizer.ggml.add_space_prefix", True) is not spaced:
        puts, does = ("no", "always") if spaced else ("a", "never")
        return f"its tokenizer puts {puts} space before a text (tokenizer.ggml.add_space_prefix), and transformers' {does} does"
    for kind, tensor in {tensor.tensor_type: tensor for tensor in header.tensors.values()}.items():
        try:
            gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except (NotImplementedError, ValueError):
            return (
                f"its tensor {tensor.name} is of type {kind.name}, which cannot be turned into floating-point numbers"
            )
    return cut_off(header)


def cut_off(header: Header) -> str:
    """Return in a clause which tensor lies beyond the end of the file, which the reader clips; "" where none does."""
    for tensor in header.tensors.values():
        if tensor.data.nbytes != tensor.n_bytes or math.prod(tensor.shape.tolist()) != tensor.n_elements:
            return f"its tensor {tensor.name} is cut off"
    return ""
