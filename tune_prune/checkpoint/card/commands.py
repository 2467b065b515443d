"""What a checkpoint can be used for, as commands for a shell: those that hold for its format and its layers, and no others."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tune_prune.checkpoint.manifest import Manifest

QUANTISED = "Q4_K_M"  # llama.cpp's usual choice
_VLLM_HEAD = 32  # the smallest head size that vLLM's attention takes


def saved_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json; a GGUF file has none."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def uses(folder: Path, about: Manifest, where: str) -> list[tuple[str, str]]:
    """To try it, to serve it and, of a GGUF file, to quantise it: names and commands. `where`: how `folder` is named in them."""
    if about.format == "gguf":
        file = next(iter(about.files)) if where == "." else f"{where}/{next(iter(about.files))}"
        of_text = {"chat": ["llama-cli", "-m", file], "serve": ["llama-server", "-m", file]} if about.for_text else {}
        small = ["llama-quantize", file, f"{file.removesuffix('.gguf')}-{QUANTISED}.gguf", QUANTISED]
        return [(name, shlex.join(command)) for name, command in {**of_text, "quantise": small}.items()]
    config = saved_config(folder)
    own_classes = "auto_map" in config  # classes that lie beside it
    trust = ", trust_remote_code=True" if own_classes else ""
    write = f'pipeline("text-generation", {json.dumps(where)}{trust})'
    code = f'from transformers import pipeline; print({write}("Once upon a time"))'
    found = [("try", shlex.join(["python", "-c", code]))]
    bare = [str(place) for place, layer in enumerate(about.saved_layers) if not about.plan.kept_groups[layer]]
    if bare and about.format != "hf-padded":
        layers = f"layer{'s' * (len(bare) > 1)} {', '.join(bare)}"
        why = f"not with vLLM, as {layers} lost all attention: --shape aligned keeps some in every layer"
        return [*found, ("serve", why)]
    heads = config.get("num_attention_heads") or 1
    if (config.get("head_dim") or config.get("hidden_size", 0) // heads) >= _VLLM_HEAD:
        found.append(("serve", shlex.join(["vllm", "serve", where, *["--trust-remote-code"] * own_classes])))
    return found
