"""The kinds of `prune --quantize`, and what each needs: looked for before hours of work. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from typing import TYPE_CHECKING

from tune_prune.core.config import alignment
from tune_prune.core.errors import UserError

if TYPE_CHECKING:
    from tune_prune.models.geometry import Geometry

GGUF_KINDS = (
    "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_xs", "iq4_nl",
    "q3_k_l", "q3_k_m", "q3_k_s", "q2_k",
)  # fmt: skip
FOLDER_KINDS = ("int8", "int4")
KINDS = (*GGUF_KINDS, *FOLDER_KINDS)
NOTES = {  # of folders
    "int8": (
        "matrices are in 8 bits, and what goes into one is rounded to 8 bits, too",
        "transformers reads it with the package compressed-tensors, which vLLM brings along",
    ),
    "int4": (
        "matrices are in 4 bits",
        "transformers reads it with the package compressed-tensors, which vLLM brings along",
    ),
}
PROGRAM = "llama-quantize"


def name_of(kind: str | None) -> str | None:
    """Return how a manifest writes a kind, e.g. Q4_K_M as files of llama.cpp are called."""
    return kind.upper() if kind in GGUF_KINDS else kind


def check(kind: str | None, fmt: str, shape: str, geometry: Geometry) -> None:
    """Raise UserError unless a checkpoint of format `fmt`, of a model of that `geometry` pruned in `shape`, can be quantised to
    `kind` with what is installed; None: it is not quantised."""
    if kind is None:
        return
    if (fmt == "gguf") != (kind in GGUF_KINDS):
        step = "add --format gguf" if kind in GGUF_KINDS else f"take one of {', '.join(GGUF_KINDS)}"
        raise UserError(f"--quantize {kind} is no type of --format {fmt}; {step}, or leave --quantize out")
    if any(geometry.mixtures):
        raise UserError(
            f"--quantize {kind} rounds the matrices of single projections, and the experts of this model are stacked; leave it "
            "out, and quantise the checkpoint with llm-compressor, a GGUF file with llama-quantize"
        )
    if fmt == "hf-padded":
        raise UserError(
            f"--quantize {kind} makes a model smaller, and --format hf-padded fills it up with zeros; take --format hf, with "
            "--shape uniform where no own classes can be loaded"
        )
    if kind in FOLDER_KINDS and geometry.around_params:
        raise UserError(
            f"--quantize {kind} is for models of text alone, and this one has a language model beside a vision tower; leave it out"
        )
    if kind == "int4" and (alignment(shape) or 1) % 32:
        raise UserError(
            f"--quantize int4 takes widths in multiples of 32, and --shape {shape} has others; search with --shape aligned, or "
            "take --quantize int8"
        )
    if kind in FOLDER_KINDS and importlib.util.find_spec("compressed_tensors") is None:
        raise UserError(
            f"--quantize {kind} needs the package compressed-tensors; pip install 'tune_prune[quantize]' (docs/checkpoints.md)"
        )
    if kind in GGUF_KINDS and kind != "q8_0":
        llama_quantize(kind)


def llama_quantize(kind: str) -> list[str]:
    """Return the command of llama.cpp's own quantiser, which takes a file, the file to write and the type: its program, or the
    function of the library that llama-cpp-python brings. Raises UserError where neither is installed."""
    if (program := shutil.which(PROGRAM)) is not None:
        return [program]
    if importlib.util.find_spec("llama_cpp") is not None:
        return [sys.executable, "-m", "tune_prune.checkpoint.gguf.llama_cpp_quantize"]
    raise UserError(
        f"--quantize {kind} is made by llama.cpp's own quantiser, and {PROGRAM} is not on PATH; install llama.cpp, or "
        "llama-cpp-python (pip install 'tune_prune[gguf]', which compiles it), or take --quantize q8_0, which needs neither"
    )
