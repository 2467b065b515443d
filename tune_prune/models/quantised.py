"""Weights of a checkpoint of tune_prune that are stored in 8 or 4 bits, in the form of compressed-tensors: read as full numbers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from tune_prune.core.errors import UserError
from tune_prune.models import weight_files
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.stored_experts import stored_tensors

OWN = "tune_prune.json"  # beside config.json of such a checkpoint: others are not read, as they may be quantised in any form


def about(folder: Path) -> dict[str, Any] | None:
    """Return what config.json of a checkpoint of tune_prune says of its quantisation; None for one in full numbers, and for any
    other model."""
    path = folder / "config.json"
    if not (folder / OWN).is_file() or not path.is_file():
        return None
    config: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    return config


def weights(folder: Path, model: PreTrainedModel, config: dict[str, Any], dtype: torch.dtype) -> LazyWeights:
    """Return the weights of `model`, which may be on the meta device, as `dtype`; each is read when it is asked for. `config`: of
    `about`. Raises UserError where the package that reads them is not installed, or one of them is not there."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise UserError(
            f"the weights of {folder} are quantised, and the package compressed-tensors is not installed; pip install "
            "'tune_prune[quantize]'"
        )
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    parts: dict[str, dict[str, Path]] = {}  # by module: its tensors, and the files that hold them
    for path in weight_files.files(folder):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118
                module, _, part = stored.rpartition(".")
                parts.setdefault(module, {})[part] = path

    def read(module: str, part: str) -> Tensor:
        with safe_open(parts[module][part], framework="pt") as file:
            tensor: Tensor = file.get_tensor(f"{module}.{part}")
        return tensor

    def find(name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if part != "weight" or "weight_scale" not in parts[module]:
            return read(module, part).to(dtype)
        tensors = {stored: read(module, stored) for stored in parts[module] if stored != "bias"}
        tensors["weight_scale"] = tensors["weight_scale"].to(torch.float32)
        matrix: Tensor = compressor.decompress(tensors, scheme)["weight"]
        return matrix.to(dtype)

    names = [name for name, _ in stored_tensors(model)]
    for name in names:
        module, _, part = name.rpartition(".")
        if not {part, f"{part}_packed"} & parts.get(module, {}).keys():
            raise UserError(f"the weights of {folder} do not fit its config.json: {name} is missing; copy it again")
    return LazyWeights(names, find)
