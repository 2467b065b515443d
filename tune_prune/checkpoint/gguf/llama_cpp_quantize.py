"""llama-quantize where only its library is installed, with llama-cpp-python. A process of its own: the library ends it where an
assertion fails.

    python -m tune_prune.checkpoint.gguf.llama_cpp_quantize FILE.gguf QUANTISED.gguf Q4_K_M
"""

from __future__ import annotations

import ctypes
import os
import sys

import llama_cpp


def main(source: str, target: str, kind: str) -> int:
    """Quantise the file `source` to `target`; returns 0 where that has worked."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    return int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(settings)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
