"""Fingerprints: what a model is, by the contents of its files, wherever they lie."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tune_prune.core.hashing import digest
from tune_prune.models import weight_files

# A file up to this size is hashed whole; of a larger one pieces (seconds instead of minutes).
WHOLE_BYTES = 256 * 2**20
BLOCK_BYTES = 2**20
LARGE_PIECES = 64  # blocks of a large file that is no safetensors file
TENSOR_PIECES = 16  # of each tensor, from its first byte to its last: an edit of some rows must not go unseen
PIECE_BYTES = 4096


def folder_fingerprint(folder: Path) -> str:
    """Return what the model in `folder` is, by the contents of config, tokenizer and weight files."""
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
    present = [path for path in folder.iterdir() if path.is_file()]  # no device or pipe, which may have no end
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        names |= {"vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"}
    settings = folder / "tokenizer_config.json"
    # transformers reads these two unless that file has the key (tokenization_utils_base.py, _from_pretrained).
    if not (settings.is_file() and b'"added_tokens_decoder"' in settings.read_bytes()):
        names |= {"added_tokens.json", "special_tokens_map.json"}
    if not (folder / "tokenizer.json").is_file():  # in whose place it takes any of these (from_pretrained)
        in_its_place = r"tekken\.json|tokenizer\.model|tiktoken\.model"
        names |= {path.name for path in present if re.match(in_its_place, path.name)}
    hashed = {path.name for path in present if path.name in names or path.suffix in {".safetensors", ".bin"}}
    # An index may name weight files in other folders.
    hashed |= {os.path.relpath(path, folder) for path in weight_files.files(folder) if path.is_file()}
    return digest({name: content_hash(folder / name) for name in sorted(hashed)})


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file's size and content: all of it; of a large safetensors file its header and 64 KiB of every
    tensor; of another large one evenly spaced blocks."""
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start, length in _pieces(file, size, path.suffix == ".safetensors"):
            file.seek(start)
            state.update(file.read(length))
    return state.hexdigest()


def _pieces(file: BinaryIO, size: int, safetensors: bool) -> Iterator[tuple[int, int]]:
    """Yield first byte and length of each piece that is hashed."""
    if size <= WHOLE_BYTES:
        yield from ((start, BLOCK_BYTES) for start in range(0, size, BLOCK_BYTES))
    elif not safetensors:
        yield from (((size - BLOCK_BYTES) * piece // (LARGE_PIECES - 1), BLOCK_BYTES) for piece in range(LARGE_PIECES))
    else:
        begin = 8 + int.from_bytes(file.read(8), "little")  # the format: length of the header, header, tensors
        header = json.loads(file.read(begin - 8))
        yield 8, begin - 8
        for first, end in sorted(about["data_offsets"] for name, about in header.items() if name != "__metadata__"):
            whole = end - first <= TENSOR_PIECES * PIECE_BYTES
            count, length = (1, end - first) if whole else (TENSOR_PIECES, PIECE_BYTES)
            for piece in range(count):
                yield begin + first + (end - first - length) * piece // (TENSOR_PIECES - 1), length
