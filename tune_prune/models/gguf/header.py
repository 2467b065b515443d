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

# Architecture -> whether rows of q and k that turn together are neighbours (transformers has them half a head apart).
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}

# Settings of an architecture that transformers makes a config of, or that change nothing.
_READ = {
    "context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size", "rope.dimension_count",
    "rope.freq_base", "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "tensor_data_layout",
}  # fmt: skip
_NEUTRAL: tuple[Any, ...] = (0, 1, "none", [])  # values of other settings with which they do nothing
# tokenizer.ggml.pre of byte-level tokenizers of which transformers splits texts rightly, by architecture.
_QWEN = {"qwen2", "deepseek-r1-qwen"}
_LLAMA = {"default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "smaug-bpe", "tekken"}
_SPLITS = {"llama": _LLAMA, "qwen2": _QWEN, "qwen3": _QWEN}


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of its model."""

    architecture: str  # one of ARCHITECTURES
    quantization: str  # e.g. Q4_1
    tensors: dict[str, gguf.ReaderTensor]  # by name; their data stay in the file until they are looked at
    head_dim: int | None  # where the file states it
    license: dict[str, str]  # as in a model card's metadata; empty where the file states none


def read(path: Path) -> Header:
    """The header of the file. Raises UserError for what is no GGUF file, is damaged or cut off, or cannot be read as a dense model
    of one of ARCHITECTURES."""
    try:
        reader = gguf.GGUFReader(path)
        values = {name: _value(field) for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError, OSError) as error:  # whatever it trips over
        cause = " ".join(str(error).split())[:160]
        raise UserError(
            f"model file {path} is no whole GGUF file of a version that is known ({type(error).__name__}: {cause}); download "
            "it again"
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    header = Header(
        str(values.get("general.architecture")),
        _quantization(values, reader.tensors),
        tensors,
        values.get(f"{values.get('general.architecture')}.attention.key_length"),
        {
            key: values[f"general.{key.replace('_', '.')}"]
            for key in _LICENSE
            if f"general.{key.replace('_', '.')}" in values
        },
    )
    if what := _unreadable(header, values):
        raise UserError(
            f"GGUF file {path} cannot be pruned: {what}; give the model in Hugging Face format: a hub id, or a folder with "
            "config.json and safetensors"
        )
    return header


_LICENSE = ("license", "license_name", "license_link")


def _value(field: gguf.ReaderField) -> Any:
    """Of a setting: a number, a text, or an array of numbers; of an array of texts its length."""
    if field.types[:1] == [gguf.GGUFValueType.ARRAY] and len(field.data) > 1024:
        return len(field.data)
    return field.contents()


def _quantization(values: dict[str, Any], tensors: list[gguf.ReaderTensor]) -> str:
    """As the file calls it, else the type of most tensors."""
    try:
        return gguf.LlamaFileType(values["general.file_type"]).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except (KeyError, ValueError):
        return Counter(tensor.tensor_type.name for tensor in tensors).most_common(1)[0][0] if tensors else "none"


def _unreadable(header: Header, values: dict[str, Any]) -> str:
    """Why a file is not read, in a clause; empty where it is."""
    arch, known = header.architecture, ", ".join(ARCHITECTURES)
    if values.get("general.type", "model") != "model":
        return f"it holds no model but a part of one (general.type {values['general.type']!r})"
    if arch not in ARCHITECTURES or arch not in FAMILIES:
        return f"its architecture {arch!r} is none of those that are read ({known})"
    if values.get("split.count", 0) > 1:
        return f"it is one of {values['split.count']} files of a model (join them with llama-gguf-split --merge)"
    if "rope_freqs.weight" in header.tensors:
        return (
            "its rotary frequencies are scaled (rope_freqs.weight), which transformers does not read from such a file"
        )
    for name, value in values.items():
        prefix, _, setting = name.partition(".")
        if prefix == arch and setting not in _READ and value not in _NEUTRAL:
            return f"it sets {name} to {value!r}, which transformers does not read from such a file"
    heads, hidden = values.get(f"{arch}.attention.head_count"), values.get(f"{arch}.embedding_length")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return f"its layers differ, or it does not say their sizes ({arch}.attention.head_count is {heads!r})"
    usual = {"rope.dimension_count": hidden // heads} if arch == "llama" else {}
    sizes = {f"{arch}.{n}": values.get(f"{arch}.{n}", usual.get(n)) for n in ("rope.dimension_count", *_HEAD_SIZES)}
    if len({size for size in sizes.values() if size is not None}) > 1:
        return f"its heads are of several sizes ({', '.join(f'{n} {s}' for n, s in sizes.items() if s is not None)})"
    tokenizer, split = values.get("tokenizer.ggml.model", "none"), values.get("tokenizer.ggml.pre", "default")
    if tokenizer not in ("gpt2", "llama"):
        return f"it has no tokenizer that transformers reads (tokenizer.ggml.model {tokenizer!r})"
    if tokenizer == "gpt2" and split not in _SPLITS[arch]:
        return f"its tokenizer splits texts in a way that is not known here (tokenizer.ggml.pre {split!r})"
    for kind, tensor in {tensor.tensor_type: tensor for tensor in header.tensors.values()}.items():
        try:
            gguf.dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind)
        except (NotImplementedError, ValueError):
            return (
                f"its tensor {tensor.name} is of type {kind.name}, which cannot be turned into floating-point numbers"
            )
    return _cut_off(header)


_HEAD_SIZES = ("attention.key_length", "attention.value_length")


def _cut_off(header: Header) -> str:
    """The reader clips what lies beyond the end of the file."""
    for tensor in header.tensors.values():
        if tensor.data.nbytes != tensor.n_bytes or math.prod(tensor.shape.tolist()) != tensor.n_elements:
            return f"its tensor {tensor.name} is cut off"
    return ""
