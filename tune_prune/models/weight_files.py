"""Weight files of a model folder: where each tensor is and whether all are complete, from the files' headers; and writing them a
tensor at a time."""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.models.stored_experts import stored_tensors, unstacked

_WHOLE = ("F64", "F32", "F16", "BF16")  # what safetensors calls numbers that need no scale beside them
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"  # of weights in one file
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_AGAIN = "download the model again or point --model at a complete folder"


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}  # in safetensors' words

# What names of parameters began with before transformers 4.52, in models that have a language model inside; its
# conversion_mapping.py has these as "llava", "LlavaModel" and "SiglipVisionModel". Files of the hub have them, and what 5 saves.
_OLDER = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.vision_model.",
    # And of Gemma 4 12B, "gemma4_unified" there.
    "model.embed_vision.patch_": "model.vision_embedder.patch_",
    "model.embed_vision.pos_": "model.vision_embedder.pos_",
    "model.embed_vision.multimodal_embedder.": "model.embed_vision.",
}

# Where a tensor is: its file, and its name there.
Place = tuple[Path, str]


def check_weights(folder: Path, model: nn.Module, name: str | None = None, in_place: bool = False) -> dict[str, Place]:
    """Return where the parameters of `model` (on the meta device) are in the weight files of `folder`, safetensors or, unless each
    is to be read `in_place`, pickled; tied ones stand under each of their names, and experts by those in files.

    Raises UserError unless these are undamaged and hold every parameter in its shape and as numbers that need no scale beside
    them, and no other weights nor parts of one: without them it would be another model. `name`: of the model, where it is not
    known by its folder."""
    name = name or str(folder)
    paths = files(folder) or pickled_files(folder)
    if in_place and paths and not files(folder):
        raise UserError(
            f"the weights of {name} are pickled (.bin), and a tensor of a pickle cannot be read alone; save the model with "
            "save_pretrained, which writes safetensors"
        )
    if not paths:
        only = ", only a GGUF file (name that file itself)" if any(folder.glob("*.gguf")) else ""
        raise UserError(f"model folder {folder} has no weights (model.safetensors){only}; {_AGAIN}")
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(
            f"model folder {folder} lacks {len(absent)} of {len(paths)} weight files, e.g. {absent[0]}; {_AGAIN}"
        )
    check_pointers(paths)
    tensors = {stored: (path, *about) for path in paths for stored, about in _header(path).items()}
    names: dict[torch.Tensor, list[str]] = {}  # tied weights have several, and are stored under any of them
    for known_as, parameter in stored_tensors(model, remove_duplicate=False):
        names.setdefault(parameter, []).append(known_as)
    wrong = []
    places: dict[str, Place] = {}
    left, modules = set(tensors), set()
    for parameter, known in names.items():
        spelt = [spelling for name_of in known for spelling in _spellings(name_of)]
        left -= {*spelt}
        modules |= {spelling.rpartition(".")[0] for spelling in spelt}
        stored = [spelling for spelling in dict.fromkeys(spelt) if spelling in tensors]
        for spelling in stored:
            if (kind := tensors[spelling][2]) not in _WHOLE:
                raise _quantised(name, f"{spelling} is {kind}")
        _check_tied(name, [(tensors[spelling][0], spelling) for spelling in stored])
        if not stored:
            wrong.append(f"{known[0]} is missing")
            continue
        path, shape, _ = tensors[stored[0]]
        if shape == tuple(parameter.shape):
            places |= dict.fromkeys(known, (path, stored[0]))
        else:
            wrong.append(f"{known[0]} is {list(shape)} instead of {list(parameter.shape)}")
    # What transformers leaves unread in files of this model: heads that predict several tokens at once.
    unread = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = {spelling for spelling in left if not any(pattern.search(spelling) for pattern in unread)}
    unused = sorted(spelling for spelling in left if spelling.endswith((".weight", ".bias")))
    # What stands beside a weight is its scale, its zero points or, in its place, its codes.
    if parts := [one for one in left.difference(unused) if any(one.startswith(f"{module}.") for module in modules)]:
        raise _quantised(name, f"{min(parts)} is a part of one")
    if wrong := wrong or [f"{spelling} is not used" for spelling in unused]:
        others = f", and {len(wrong) - 1:,} more such tensors" if len(wrong) > 1 else ""
        raise UserError(f"the weights of {name} do not fit its config.json: {wrong[0]}{others}; {_AGAIN}")
    return places


def _spellings(name: str) -> list[str]:
    """Return the names under which files may have a parameter; some leave out what all names begin with."""
    older = [before + name.removeprefix(now) for now, before in _OLDER.items() if name.startswith(now)]
    return [name, name.removeprefix("model."), *older]


def _quantised(name: str, what: str) -> UserError:
    return UserError(
        f"the weights of {name} are quantised ({what}); what is pruned needs them whole: name the model that they were made from"
    )


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type (in safetensors' words) of every tensor of a weight file, by its header alone. Raises UserError."""
    try:
        if path.suffix == ".bin":
            tensors = {name: tensor for name, tensor in unpickled(path).items() if isinstance(tensor, torch.Tensor)}
            return {name: (tuple(t.shape), _DTYPES.get(t.dtype, str(t.dtype))) for name, t in tensors.items()}
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except pickle.UnpicklingError as error:
        raise UserError(
            f"the weights of {path.parent} are a pickle of Python objects, as some pruning tools save them, and unpickling can "
            "run any code; save that model's weights as safetensors (save_pretrained), or give the original model"
        ) from error
    except (SafetensorError, OSError, EOFError) as error:
        cause = " ".join(str(error).split())
        size = path.stat().st_size
        raise UserError(f"weight file {path} is damaged or cut off ({size:,} bytes; {cause}); {_AGAIN}") from error
    except (MemoryError, RuntimeError) as error:
        # Linux maps no file larger than its memory for private use, which is how torch asks for it.
        raise UserError(
            f"weight file {path} cannot be mapped into memory ({' '.join(str(error).split())}); on a machine with more of it, "
            "save the model again in smaller files: save_pretrained(folder, max_shard_size='5GB')"
        ) from error


def unpickled(path: Path) -> dict[str, Any]:
    """Return what a .bin file holds, as transformers reads it; tensors of one that torch has written since 2020 stay there."""
    whole = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        first = file.read(1)
    if not whole and first != b"\x80":  # of older pickles
        raise EOFError("it ends too early, or is no file of weights")  # but the page of a failed download, say
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=whole)
    if not isinstance(content, dict):
        raise EOFError("it holds no tensors by name")
    return content


def check_pointers(paths: Iterable[Path]) -> None:
    """Raise UserError for a file that Git has left to its extension for large ones, and that names the content only."""
    for path in paths:
        if path.is_file() and path.stat().st_size < _POINTER_BYTES and path.read_bytes().startswith(_POINTER):
            raise UserError(
                f"{path} is a pointer of Git LFS in the place of the file; run `git lfs pull` in that folder, or download the "
                "file itself"
            )


def _check_tied(model: str, places: list[Place]) -> None:
    """Raise UserError where one parameter is stored under several names with different values: transformers then takes it for
    several, and config.json for one."""
    if len(places) > 1:
        first, *others = [_read(*place) for place in places]
        if not all(torch.equal(first, other) for other in others):
            names = " and ".join(name for _, name in places)
            raise UserError(
                f"the weights of {model} have different {names}, but its config.json says that they are one "
                "(tie_word_embeddings); write false there, or save the model again"
            )


def _read(path: Path, name: str) -> torch.Tensor:
    if path.suffix == ".bin":
        return cast(torch.Tensor, unpickled(path)[name])
    with safe_open(path, framework="pt") as tensors:
        return cast(torch.Tensor, tensors.get_tensor(name))


def files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers would read, whether they exist or not. Raises UserError."""
    return named(folder / SAFETENSORS)


def pickled_files(folder: Path) -> list[Path]:
    """Return the pickled files that transformers would read where there are no safetensors files; raises as `files`."""
    return named(folder / PICKLED)


def are_here(folder: Path) -> bool:
    """Return whether all weight files are here, of whichever kind."""
    paths = files(folder) or pickled_files(folder)
    return bool(paths) and all(path.is_file() for path in paths)


def usual_dtype(folder: Path) -> torch.dtype | None:
    """Return the data type of most numbers in the weight files of `folder`; None where they are not here. Raises UserError."""
    counts: Counter[str] = Counter()
    for path in (files(folder) or pickled_files(folder)) if are_here(folder) else []:
        for shape, kind in _header(path).values():
            counts[kind] += math.prod(shape)
    usual = max(counts, key=counts.__getitem__, default=None)
    return next((dtype for dtype, kind in _DTYPES.items() if kind == usual), None)


def named(whole: Path) -> list[Path]:
    """Return the file `whole`, or the files that an index in its place names. Raises UserError for one without a weight_map."""
    index = whole.with_name(f"{whole.name}.index.json")
    if whole.is_file() or not index.is_file():
        return [whole] * whole.is_file()
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} does not say which files hold the weights (no weight_map); {_AGAIN}") from error


def write_weights(
    folder: Path,
    model: PreTrainedModel,
    weights: Mapping[str, torch.Tensor],
    shard_bytes: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    called: Mapping[str, str] | None = None,
) -> None:
    """Write `weights` for the parameters of `model` (on the meta device) to `folder`, in files of `shard_bytes` at most: byte for
    byte what transformers' save_pretrained writes of that model in memory, only that several files hold experts in another order.
    Takes the memory of one tensor (of a layer's experts, where it has some), where safetensors' own functions want all of a file;
    its format: github.com/huggingface/safetensors. `tensors`: what is stored in their place, by names of `weights`. `called`:
    other names of parameters in the files."""
    if tensors is None:
        tensors, weights = dict(stored_tensors(model)), unstacked(weights, model)
    own_names = {(called or {}).get(name, name): name for name in tensors}
    tensors = {name: tensors[own] for name, own in own_names.items()}
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda p: p.nbytes,
        get_storage_id=lambda p: (
            None if p.numel() else ""  # what has no elements goes to the file of the first of that kind
        ),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    with terminal.step("writing", lambda: len(split.tensor_to_filename), "tensors") as advance:
        for file_name, names in split.filename_to_tensors.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for name in sorted(names):
                p = tensors[name]
                header[name] = {"dtype": _DTYPES[p.dtype], "shape": [*p.shape], "data_offsets": [end, end + p.nbytes]}
                end += p.nbytes
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            text += b" " * (-len(text) % 8)
            with (folder / file_name).open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                for name in sorted(names):
                    tensor = weights[own_names[name]].to("cpu").contiguous()
                    assert (tensor.shape, tensor.dtype) == (tensors[name].shape, tensors[name].dtype), name
                    file.write(tensor.view(-1).view(torch.uint8).numpy().data)
                    advance(1)
    if split.is_sharded:
        about = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": about, "weight_map": split.tensor_to_filename}
        text_of_index = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text_of_index, encoding="utf-8")
