"""Weight files of a model folder: where each tensor is and whether all are complete, from the files' headers; and writing them a
tensor at a time."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core.errors import UserError
from tune_prune.core.hashing import digest
from tune_prune.core.terminal import progress

# A file up to this size is hashed whole; of a larger one pieces (seconds instead of minutes).
WHOLE_HASH_BYTES = 256 * 2**20
HASHED_PIECES = 64
TENSOR_PIECES = 16  # of each tensor, from its first byte to its last: an edit of some rows must not go unseen
PIECE_BYTES = 4096

_WHOLE = ("F64", "F32", "F16", "BF16")  # what safetensors calls numbers that need no scale beside them
_AGAIN = "download the model again or point --model at a complete folder"


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}  # in safetensors' words

# Where a tensor is: its file, and its name there.
Place = tuple[Path, str]


def check_weights(folder: Path, model: nn.Module) -> None:
    """Raise UserError unless the weight files of `folder` are undamaged and hold every parameter of `model` (on the meta
    device) in its shape, and no other weights. Of weights that are pickled (.bin) only the existence is checked."""
    if files(folder) or not _pickled(folder):
        stored_tensors(folder, model)


def are_here(folder: Path) -> bool:
    """Whether `folder` has all weight files that it should have, or pickled ones."""
    found = files(folder)
    return all(path.is_file() for path in found) if found else _pickled(folder)


def stored_tensors(folder: Path, model: nn.Module) -> dict[str, Place]:
    """Where every parameter of `model` (on the meta device) is in the safetensors files of `folder`; tied ones stand under each of
    their names. Raises UserError as `check_weights` does, where weights are pickled, and where some are left over: without them it
    would be another model."""
    if not files(folder) and _pickled(folder):
        raise UserError(
            f"the weights of {folder} are pickled (.bin), and a tensor of a pickle cannot be read alone; save the model with "
            "save_pretrained, which writes safetensors"
        )
    places, unused = _places(folder, model)
    if unused:
        raise UserError(
            f"the weights of {folder} do not fit its config.json: {unused[0]} is not used, and {len(unused) - 1} more such "
            f"tensors; {_AGAIN}"
        )
    return places


def _places(folder: Path, model: nn.Module) -> tuple[dict[str, Place], list[str]]:
    """Where the parameters are, and the names of weights and biases that are none of them."""
    found = files(folder)
    if not found:
        only = ", only a GGUF file (name that file itself)" if any(folder.glob("*.gguf")) else ""
        raise UserError(f"model folder {folder} has no weights (model.safetensors){only}; {_AGAIN}")
    absent = [path.name for path in found if not path.is_file()]
    if absent:
        raise UserError(
            f"model folder {folder} lacks {len(absent)} of {len(found)} weight files, e.g. {absent[0]}; {_AGAIN}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    paths: dict[str, Path] = {}
    kinds: dict[str, str] = {}
    for path in found:
        try:
            with safe_open(path, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                own = {name: tuple(part.get_shape()) for name, part in slices.items()}
                kinds |= {name: part.get_dtype() for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            cause = " ".join(str(error).split())
            size = path.stat().st_size
            raise UserError(f"weight file {path} is damaged or cut off ({size:,} bytes; {cause}); {_AGAIN}") from error
        except (MemoryError, RuntimeError) as error:
            # Linux maps no file larger than its memory for private use, which is how torch asks for it.
            raise UserError(
                f"weight file {path} cannot be mapped into memory ({' '.join(str(error).split())}); on a machine with more of it, "
                "save the model again in smaller files: save_pretrained(folder, max_shard_size='5GB')"
            ) from error
        shapes |= own
        paths |= dict.fromkeys(own, path)
    names: dict[nn.Parameter, list[str]] = {}  # tied weights have several, and are stored under any of them
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    wrong = []
    places: dict[str, Place] = {}
    unused = {name for name in shapes if name.endswith((".weight", ".bias"))}
    for parameter, known_as in names.items():
        spelt = [spelling for name in known_as for spelling in (name, name.removeprefix("model."))]  # some leave it out
        unused -= {*spelt}
        stored = next((name for name in spelt if name in shapes), None)
        _check_tied(folder, [(paths[name], name) for name in dict.fromkeys(spelt) if name in shapes])
        if stored is None:
            wrong.append(f"{known_as[0]} is missing")
        elif kinds[stored] not in _WHOLE:
            raise UserError(
                f"the weights of {folder} are quantised ({stored} is {kinds[stored]}); what is pruned needs them whole: name the "
                "model that they were made from"
            )
        elif shapes[stored] != tuple(parameter.shape):
            wrong.append(f"{known_as[0]} is {list(shapes[stored])} instead of {list(parameter.shape)}")
        else:
            places |= dict.fromkeys(known_as, (paths[stored], stored))
    if wrong:
        raise UserError(
            f"the weights of {folder} do not fit its config.json: {len(wrong)} tensors are missing or of another shape, e.g. "
            f"{wrong[0]}; {_AGAIN}"
        )
    return places, sorted(unused)


def _check_tied(folder: Path, places: list[Place]) -> None:
    """Raise UserError where one parameter is stored under several names with different values: transformers then takes it for
    several, and config.json for one."""
    if len(places) > 1:
        first, *others = [_read(*place) for place in places]
        if not all(torch.equal(first, other) for other in others):
            names = " and ".join(name for _, name in places)
            raise UserError(
                f"the weights of {folder} have different {names}, but its config.json says that they are one "
                "(tie_word_embeddings); write false there, or save the model again"
            )


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as tensors:
        return cast(torch.Tensor, tensors.get_tensor(name))


def _pickled(folder: Path) -> bool:
    return any(folder.glob("pytorch_model*.bin"))


def files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read, whether they exist or not. Raises UserError for an index without a
    weight_map."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole] if whole.is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} does not say which files hold the weights (no weight_map); {_AGAIN}") from error


def write_weights(folder: Path, model: PreTrainedModel, weights: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
    """Write `weights` for the parameters of `model` (on the meta device) to `folder`, in files of `shard_bytes` at most: byte for
    byte what transformers' save_pretrained writes of that model in memory. Takes the memory of one tensor, where safetensors'
    own functions want all of a file; its format: github.com/huggingface/safetensors."""
    split = split_state_dict_into_shards_factory(
        dict(model.named_parameters()),
        get_storage_size=lambda p: p.nbytes,
        get_storage_id=lambda p: (
            None if p.numel() else ""
        ),  # what has no elements goes to the file of the first of that kind
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(names):
            p = model.get_parameter(name)
            header[name] = {"dtype": _DTYPES[p.dtype], "shape": [*p.shape], "data_offsets": [end, end + p.nbytes]}
            end += p.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in progress.over(sorted(names), f"writing {file_name}", "tensors"):
                tensor = weights[name].to("cpu").contiguous()
                assert (tensor.shape, tensor.dtype) == (model.get_parameter(name).shape, model.dtype), name
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
    if split.is_sharded:
        about = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": about, "weight_map": split.tensor_to_filename}
        text_of_index = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text_of_index, encoding="utf-8")


def content_hash(path: Path) -> str:
    """SHA-256 of a file's size and content: all of it, or of a large safetensors file its header and 64 KiB of every tensor."""
    size = path.stat().st_size
    if size <= WHOLE_HASH_BYTES or path.suffix != ".safetensors":
        return pieces_hash(path)
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")  # the format: length of the header, header, tensors
        header = file.read(start - 8)
        state.update(header)
        tensors = (about["data_offsets"] for name, about in json.loads(header).items() if name != "__metadata__")
        for first, end in sorted(tensors):
            whole = end - first <= TENSOR_PIECES * PIECE_BYTES
            count, length = (1, end - first) if whole else (TENSOR_PIECES, PIECE_BYTES)
            for piece in range(count):
                file.seek(start + first + (end - first - length) * piece // (TENSOR_PIECES - 1))
                state.update(file.read(length))
    return state.hexdigest()


def pieces_hash(path: Path) -> str:
    """SHA-256 of a file's size and content: all of it, or of a large one evenly spaced pieces of 1 MiB."""
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_HASH_BYTES:
            while part := file.read(2**20):
                state.update(part)
        else:
            for piece in range(HASHED_PIECES):
                file.seek((size - 2**20) * piece // (HASHED_PIECES - 1))
                state.update(file.read(2**20))
    return state.hexdigest()


def folder_fingerprint(folder: Path, file_hash: Callable[[Path], str], beside: bool = True) -> str:
    """What the model in `folder` is, by the contents of config, tokenizer and weight files (`content_hash`, or an older one).
    `beside` False: without the tokens that older files add to a tokenizer.json, as in fingerprints of older versions."""
    own = {"config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        own |= {"vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"}
    settings = folder / "tokenizer_config.json"
    # transformers reads these two unless that file has the key (tokenization_utils_base.py, _from_pretrained).
    if beside and not (settings.is_file() and b'"added_tokens_decoder"' in settings.read_bytes()):
        own |= {"added_tokens.json", "special_tokens_map.json"}
    there = [path for path in folder.iterdir() if path.is_file()]  # no device or pipe, which may have no end
    names = {path.name for path in there if path.name in own or path.suffix in {".safetensors", ".bin"}}
    below = [path for path in files(folder) if path.is_file()]  # an index may name them in other folders
    names |= {os.path.relpath(path, folder) for path in below}
    return digest({name: file_hash(folder / name) for name in sorted(names)})
