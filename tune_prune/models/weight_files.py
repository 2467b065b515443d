"""Checks that the weights of a model folder are complete, from the headers of its files, before anything is loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from tune_prune.core.errors import UserError

# A file up to this size is hashed whole; of a larger one pieces (seconds instead of minutes).
WHOLE_HASH_BYTES = 256 * 2**20
HASHED_PIECES = 64
TENSOR_PIECES = 16  # of each tensor, from its first byte to its last: an edit of some rows must not go unseen
PIECE_BYTES = 4096

_AGAIN = "download the model again or point --model at a complete folder"


def check_weights(folder: Path, model: nn.Module) -> None:
    """Raise UserError unless the weight files of `folder` are undamaged and hold every parameter of `model` (on the meta
    device) in its shape. Of weights that are pickled (.bin) only the existence is checked."""
    found = files(folder)
    if not found and any(folder.glob("pytorch_model*.bin")):
        return
    if not found:
        only = ", only a GGUF file for llama.cpp" if any(folder.glob("*.gguf")) else ""
        raise UserError(f"model folder {folder} has no weights (model.safetensors){only}; {_AGAIN}")
    absent = [path.name for path in found if not path.is_file()]
    if absent:
        raise UserError(
            f"model folder {folder} lacks {len(absent)} of {len(found)} weight files, e.g. {absent[0]}; {_AGAIN}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for path in found:
        try:
            with safe_open(path, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            cause = " ".join(str(error).split())
            size = path.stat().st_size
            raise UserError(f"weight file {path} is damaged or cut off ({size:,} bytes; {cause}); {_AGAIN}") from error
    names: dict[nn.Parameter, list[str]] = {}  # tied weights have several, and are stored under any of them
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    wrong = []
    for parameter, known_as in names.items():
        spelt = [spelling for name in known_as for spelling in (name, name.removeprefix("model."))]  # some leave it out
        stored = next((shapes[name] for name in spelt if name in shapes), None)
        if stored != tuple(parameter.shape):
            text = "missing" if stored is None else f"{list(stored)} instead of {list(parameter.shape)}"
            wrong.append(f"{known_as[0]} is {text}")
    if wrong:
        raise UserError(
            f"the weights of {folder} do not fit its config.json: {len(wrong)} tensors are missing or of another shape, e.g. "
            f"{wrong[0]}; {_AGAIN}"
        )


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
            state.update(file.read())
        else:
            for piece in range(HASHED_PIECES):
                file.seek((size - 2**20) * piece // (HASHED_PIECES - 1))
                state.update(file.read(2**20))
    return state.hexdigest()
