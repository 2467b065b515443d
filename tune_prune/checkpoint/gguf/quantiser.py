"""A GGUF file in fewer bits, by llama.cpp's own quantiser, and which of its matrices are not of the type that was asked for.

llama.cpp quantises rows in blocks: of 256 numbers for K-quants and IQ4_XS, of 32 for all others. A matrix whose rows are no
multiple of its type's block gets a type with blocks of 32, which is larger, and F16 where they are no multiple of 32 either.

Source: llama.cpp, tools/quantize/quantize.cpp (command line), tensor_type_fallback in src/llama-quant.cpp (blocks).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import gguf

from tune_prune.checkpoint.quantisation import llama_quantize
from tune_prune.core.errors import UserError, cause_in
from tune_prune.models.gguf.files import FLOATS

BLOCK, K_BLOCK = 32, 256  # numbers of a row that share a scale
_NAMED = 3  # matrices of a note that are named


def quantise(source: Path, target: Path, kind: str) -> None:
    """Write the matrices of the GGUF file `source` as type `kind` to `target`. Raises UserError where the quantiser fails."""
    command = [*llama_quantize(kind), str(source), str(target), kind.upper()]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not target.is_file():
        raise UserError(
            f"llama.cpp's quantiser could not make a {kind} file ({command[0]}: {cause_in(done.stdout, done.stderr)}); "
            "install a newer llama.cpp, or save without --quantize"
        )


def matrix_type(columns: int) -> gguf.GGMLQuantizationType:
    """Return the type of a matrix with rows of so many `columns` in a Q8_0 file."""
    return gguf.GGMLQuantizationType.F16 if columns % BLOCK else gguf.GGMLQuantizationType.Q8_0


def notes(file: Path, kind: str) -> tuple[str, ...]:
    """Return which matrices of a quantised file are in more bits than its `kind` says, because of their widths: sentences."""
    matrices = [tensor for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) > 1]
    floats = [tensor for tensor in matrices if _is_float(tensor)]
    sentences = []
    if floats:
        sentences.append(
            f"{_which(floats, len(matrices))} {_types(floats)}, not quantised, as their rows are no multiple of {BLOCK}"
        )
    in_256s = "_k" in kind or kind == "iq4_xs"
    larger = [tensor for tensor in matrices if in_256s and tensor.shape[0] % K_BLOCK and not _is_float(tensor)]
    if larger:
        sentences.append(
            f"{_which(larger, len(matrices))} {_types(larger)}, larger than K-quants, as their rows are no multiple of {K_BLOCK}"
        )
    return tuple(sentences)


def _is_float(tensor: gguf.ReaderTensor) -> bool:
    return tensor.tensor_type.name in FLOATS


def _which(matrices: Sequence[gguf.ReaderTensor], of: int) -> str:
    """Return the beginning of a sentence, `3 of 211 matrices (names) are`."""
    names = [tensor.name for tensor in matrices[:_NAMED]]
    more = f" and {len(matrices) - len(names)} more" if len(matrices) > len(names) else ""
    return f"{len(matrices)} of {of} matrices ({', '.join(names)}{more}) {'is' if len(matrices) == 1 else 'are'}"


def _types(matrices: Sequence[gguf.ReaderTensor]) -> str:
    return " and ".join(sorted({tensor.tensor_type.name for tensor in matrices}))
