"""Checks that the weights of a model folder are complete, from the headers of its files, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from tune_prune.core.errors import UserError

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
