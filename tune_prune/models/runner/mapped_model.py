"""A model whose weights stay in the files of its checkpoint: what it is made of is there, and its layers are read when their turn
comes (layer_runner)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, GenerationConfig

from tune_prune.models import loading, weight_files
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.layer_weights import CheckpointWeights
from tune_prune.models.runner.residency import RESIDENT, Residency


def map_model(source: ModelSource, dtype: torch.dtype, device: str, residency: Residency = RESIDENT) -> LoadedModel:
    """`loading.load_model` without memory for weights: they are read from safetensors files, as `dtype`, when they are needed on
    `device`. `residency` says where hidden states are. Raises UserError as `load_model` does, from the files' headers alone, and
    for weights that are pickled."""
    config = loading.load_config(source)
    family = family_of(config.model_type)
    tokenizer = loading.load_tokenizer(source)
    folder = _folder(source)
    # Its buffers are in no file (rotary frequencies): they are made on the CPU, and the parameters are not.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval().requires_grad_(False)
    places = weight_files.stored_tensors(folder, model)
    residency = replace(residency, weights=CheckpointWeights(places, dtype), device=torch.device(device))
    return LoadedModel(source, model, tokenizer, family, read_geometry(model, family), residency)


def _folder(source: ModelSource) -> Path:
    """Where the weight files are; those of the hub are downloaded. Raises UserError."""
    if source.kind != "hub":
        return Path(source.location)
    try:
        found = snapshot_download(source.location, revision=source.revision, allow_patterns=["*.safetensors", "*.json"])
    except Exception as error:  # the hub client has its own kinds
        raise loading.unavailable(source, error, "weights") from error
    return Path(found)
