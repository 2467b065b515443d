"""A GGUF file as a model folder in the cache: config, tokenizer, and every tensor in float32 as safetensors. From then on it is a
folder like any other.

Config and tokenizer are those that transformers reads; tensors are made floating-point by the gguf package, as there, and put in
transformers' order, one at a time: it takes the memory of the largest one (in float32) and 4 bytes of disk for a parameter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tune_prune.core import temporary
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.models import weight_files
from tune_prune.models.geometry import check_sizes
from tune_prune.models.gguf import files, header
from tune_prune.models.runner.layer_weights import LazyWeights

SHARD_BYTES = 5 * 10**9
_ROWS = 4096  # made floating-point at once
_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"


def ensure(file: Path, folder: Path, fill: Callable[[Path, Path], dict[str, str]] | None = None) -> None:
    """Have `folder` (files.folder_of) hold the model of the GGUF file: whole or not at all, by one process while others that want
    it wait. `fill(file, folder)` writes it and returns the content of files.RECORD; None: by the file alone. Raises UserError for a
    file that cannot be read as a model, and where the cache cannot hold it."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: the rename decides whose is kept
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            try:
                _convert(file, folder, fill or _write)
            except OSError as error:
                raise UserError(
                    f"the weights of {file} cannot be kept in {folder.parent} ({error.strerror}); make room there, or set "
                    "XDG_CACHE_HOME to a folder with room for four bytes a parameter"
                ) from error


def _write(file: Path, folder: Path) -> dict[str, str]:
    about = header.read(file)
    again = _head_again(about)
    model = _meta_model(file, about, tied=again is not None)
    tensors = _by_parameter(file, again or about, model)
    model.config.save_pretrained(folder)
    _transformers(AutoTokenizer, file).save_pretrained(folder)
    weight_files.write_weights(folder, model, LazyWeights(tensors, lambda name: tensors[name]()), SHARD_BYTES)
    if about.license:
        text = yaml.safe_dump(about.license, sort_keys=False)
        atomic_write_text(folder / "README.md", f"---\n{text}---\n")  # where a model folder states it
    return {"file": file.name, "quantization": about.quantization, "head": _said_of_head(about) if again else ""}


def _convert(file: Path, folder: Path, fill: Callable[[Path, Path], dict[str, str]]) -> None:
    temporary.sweep(str(folder.parent))
    made = temporary.make(str(folder.parent))
    try:
        atomic_write_text(made / files.RECORD, to_json(fill(file, made)))
        for path in made.iterdir():
            with path.open("rb") as written:
                os.fsync(written.fileno())
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # without locks another process may have been first
                raise
    finally:
        temporary.remove(made)


def _head_again(about: header.Header) -> header.Header | None:
    """Return the header without a head of its own, where that is the embeddings again, rounded otherwise: so some files store a
    model whose embeddings are tied. Its one matrix is then the one of more bits. None where there is no head or one of its own.

    Rounding changes rows of normal numbers by 1.5 to 2.7 / 2**bits of their norm (the most of 256 rows, from Q4_0 to Q8_0); 4 is
    allowed each, and matrices trained apart differ by more than all of it."""
    pair = [about.tensors[name] for name in (_EMBEDDINGS, _HEAD) if name in about.tensors]
    if len(pair) < 2 or pair[0].shape.tolist() != pair[1].shape.tolist():
        return None
    allowed = min(0.8, sum(4 / 2 ** _bits(tensor) for tensor in pair))
    for start in range(0, len(pair[0].data), _ROWS):
        one, other = (gguf.dequantize(t.data[start : start + _ROWS], t.tensor_type) for t in pair)
        norms = np.linalg.norm(other, axis=1)
        # Rows far below the others' norm, as of tokens without use, may be rounded to nothing.
        if (np.linalg.norm(one - other, axis=1) > allowed * np.maximum(norms, norms.mean())).any():
            return None
    rest = {name: tensor for name, tensor in about.tensors.items() if name != _HEAD}
    return replace(about, tensors=rest | {_EMBEDDINGS: max(pair, key=_bits)})


def _bits(tensor: gguf.ReaderTensor) -> int:
    """Return the significant bits of a number of that type."""
    block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    return {"F32": 24, "F16": 11, "BF16": 8}.get(tensor.tensor_type.name, 8 * size // block)


def _said_of_head(about: header.Header) -> str:
    head, embeddings = about.tensors[_HEAD], about.tensors[_EMBEDDINGS]
    return (
        f"its head ({_HEAD}, {head.tensor_type.name}) is its embeddings ({_EMBEDDINGS}, {embeddings.tensor_type.name}) again, so "
        f"both are one matrix here, read from {_HEAD if _bits(head) > _bits(embeddings) else _EMBEDDINGS}"
    )


def _meta_model(file: Path, about: header.Header, tied: bool) -> PreTrainedModel:
    """Return the model without its weights; `tied`: its head is its embeddings although the file stores one. Raises UserError."""
    config = _transformers(AutoConfig, file)
    if tied:
        config.tie_word_embeddings = True
    for leftover in ("_model_name_or_path", "quantization_config", "_pre_quantization_dtype"):
        config.__dict__.pop(leftover, None)
    if about.head_dim and hasattr(config, "head_dim"):  # of some families transformers takes the usual one
        config.head_dim = about.head_dim
    config.dtype = torch.float32
    check_sizes(config.to_dict(), str(file))
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise _unread(
            file, f"its header describes no {about.architecture} model that can be built ({error})"
        ) from error
    config.architectures = [type(model).__name__]
    return model


def _transformers(auto: Any, file: Path) -> Any:
    """Return what transformers makes of the file and of nothing beside it, such as a tokenizer.json. Raises UserError."""
    try:
        with temporary.folder() as alone:
            (alone / file.name).symlink_to(file.resolve())
            return auto.from_pretrained(alone, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # config classes, the tokenizers package and the reader each raise their own kinds
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        part = "config" if auto is AutoConfig else "tokenizer"
        raise _unread(file, f"transformers cannot read its {part} ({cause})") from error


def _by_parameter(file: Path, about: header.Header, model: PreTrainedModel) -> dict[str, Any]:
    """Return what makes each parameter of `model`, by name. Raises UserError unless the file has exactly these tensors."""
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == about.architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    left, made = dict(about.tensors), {}
    turned = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, p in model.named_parameters():
        module, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(module)}.{suffix}"
        tensor = left.pop(stored, None)
        if tensor is None:
            raise _unread(file, f"it lacks {stored}, which the model that its header describes has")
        if (shape := tuple(reversed(tensor.shape.tolist()))) != tuple(p.shape):
            raise _unread(file, f"{stored} is {list(shape)}, not {list(p.shape)} as by its header")
        heads = turned.get(module.rpartition(".")[2], 0) if header.ARCHITECTURES[about.architecture] else 0
        # Gemma's norms multiply by 1 + weight, and files hold that sum.
        made[name] = dequantised(tensor, heads, float(about.architecture == "gemma3" and "norm" in module))
    if left:
        raise _unread(file, f"{min(left)} has no place in the model that its header describes")
    return made


def _unread(file: Path, what: str) -> UserError:
    return UserError(f"GGUF file {file} cannot be read: {what}; give the model in Hugging Face format")


def dequantised(tensor: gguf.ReaderTensor, heads: int, less: float = 0.0) -> Any:
    """Return a function that gives the tensor in float32, `less` a number; with `heads`, rows 2i and 2i + 1 of each go half a head
    apart."""

    def make() -> torch.Tensor:
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])  # of experts all after each other
        values = np.empty((len(rows), int(tensor.shape[0])), np.float32)
        for start in range(0, len(rows), _ROWS):
            values[start : start + _ROWS] = gguf.dequantize(rows[start : start + _ROWS], tensor.tensor_type)
        tensor_values = torch.from_numpy(values).view(*reversed(tensor.shape.tolist())).sub_(less)
        return tensor_values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else tensor_values

    return make
