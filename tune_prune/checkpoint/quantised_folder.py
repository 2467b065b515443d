"""Matrices of a folder for transformers and vLLM in 8 or 4 bits, in the form of compressed-tensors, which both read.

    int8   a row is rounded to whole numbers times a scale, its largest number by 127.5; while the model runs, so is what goes into
           a matrix, for each token (W8A8)
    int4   a scale for each group of numbers of a row, their largest by 7.5; the rest is computed in full precision (W4A16)

Rounding is to the nearest, so no text is needed. Embeddings, output head, norms and biases stay as they are. The package does the
rounding and the packing, a matrix at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn
from transformers import PreTrainedModel

from tune_prune.core.errors import UserError
from tune_prune.models.runner.layer_weights import LazyWeights, Weights
from tune_prune.models.stored_experts import stored_tensors

GROUPS = (
    128,
    64,
    32,
)  # sizes of int4's groups: the first that divides the rows of all matrices. vLLM has kernels for these


@dataclass(frozen=True)
class QuantisedWeights:
    """What the files of a quantised model hold."""

    tensors: dict[str, Tensor]  # of the files, by name, on the meta device
    weights: Weights  # their values
    config: dict[str, Any]  # quantization_config of config.json


def quantise(model: PreTrainedModel, weights: Weights, kind: str) -> QuantisedWeights:
    """Return the `weights` of `model`, which may be on the meta device, with its matrices as `kind`, int8 or int4. Raises UserError
    where that kind cannot hold one of them."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    matrices = {f"{name}.weight": module.weight for name, module in linears.items() if module is not head}
    matrices = {name: weight for name, weight in matrices.items() if weight.numel()}  # others keep a bias alone
    scheme = _scheme(kind, matrices)
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)

    @lru_cache(maxsize=1)  # a matrix is stored in parts, one after the other
    def parts(name: str) -> dict[str, Tensor]:
        return _compressed(compressor, scheme, weights[name])

    tensors: dict[str, Tensor] = {name: p for name, p in stored_tensors(model) if name not in matrices}
    matrix_of: dict[str, tuple[str, str]] = {}  # by name of a part: the matrix, and the part's name in its module
    for name, weight in matrices.items():
        for part, tensor in _compressed(compressor, scheme, weight.to("meta")).items():
            stored = f"{name.removesuffix('weight')}{part}"
            tensors[stored], matrix_of[stored] = tensor.to("meta"), (name, part)

    def find(name: str) -> Tensor:
        if name not in matrix_of:
            return weights[name]
        matrix, part = matrix_of[name]
        return parts(matrix)[part]

    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=sorted(name for name in linears if f"{name}.weight" not in matrices),
    )
    return QuantisedWeights(tensors, LazyWeights(tensors, find), config.model_dump(mode="json", exclude_none=True))


def _scheme(kind: str, matrices: dict[str, Tensor]) -> QuantizationScheme:
    if kind == "int8":
        rounded = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
        each_row = QuantizationArgs(num_bits=8, strategy="channel")
        return QuantizationScheme(
            targets=["Linear"], weights=each_row, input_activations=rounded, format="int-quantized"
        )
    for name, weight in matrices.items():
        if any(size % GROUPS[-1] for size in weight.shape):
            raise UserError(
                f"--quantize int4 takes matrices whose sizes are multiples of {GROUPS[-1]}, and {name} is {list(weight.shape)}; "
                "search with --shape aligned, or take --quantize int8"
            )
    group = next(size for size in GROUPS if not any(weight.shape[1] % size for weight in matrices.values()))
    in_groups = QuantizationArgs(num_bits=4, strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=in_groups, format="pack-quantized")


def _compressed(compressor: Any, scheme: QuantizationScheme, weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of a matrix [out, in] by their names in its module: codes, scales in the matrix's data type and, where the
    codes are packed, the shape."""
    args, wide = scheme.weights, weight.to(torch.float32)
    assert args is not None
    groups = wide.unflatten(1, (-1, args.group_size or weight.shape[1]))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scale = scale.to(weight.dtype)
    made: dict[str, Tensor] = compressor.compress({"weight": wide, "weight_scale": scale.to(wide.dtype)}, scheme)
    return made | {"weight_scale": scale}
