"""A model whose weights stay in the files of its checkpoint: what it is made of is there, and its layers are read when their turn
comes (layer_runner).

accelerate's `OffloadedWeightsLoader` reads a tensor from a safetensors file in place (memory-mapped), in the type that is
asked for, and its `init_empty_weights` builds models that have buffers and no parameters.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from accelerate.utils import OffloadedWeightsLoader
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from tune_prune.core.errors import UserError
from tune_prune.models import hub, loading, weight_files
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.loading import LoadedModel
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.models.runner.residency import RESIDENT, Residency


def map_model(source: ModelSource, dtype: torch.dtype, device: str, residency: Residency = RESIDENT) -> LoadedModel:
    """Open a model as `loading.load_model` does, but without memory for weights: they are read from safetensors files, as
    `dtype`, when they are needed on `device`. `residency` says where hidden states are. Raises UserError as `load_model` does,
    from the files' headers alone, and for weights that are pickled."""
    transformers_logging.disable_progress_bar()
    config = loading.load_config(source)
    family = family_of(config.model_type)
    revision = source.revision or "main"
    if device == "cuda":
        loading.set_up_gpu()
    tokenizer = loading.load_tokenizer(source)
    folder = _folder(source)
    # Its buffers are in no file (rotary frequencies): they are made on the CPU, and its parameters nowhere.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    model.tie_weights()  # what was tied has become two parameters
    if cached_file(
        source.location, "generation_config.json", revision=revision, _raise_exceptions_for_missing_entries=False
    ):
        model.generation_config = GenerationConfig.from_pretrained(source.location, revision=revision)
    model.eval().requires_grad_(False)
    places = weight_files.stored_tensors(folder, model, source.location)
    residency = replace(residency, weights=_stored_weights(places, dtype), device=torch.device(device))
    return LoadedModel(source, model, tokenizer, family, read_geometry(model, family), residency)


def readable_in_place(source: ModelSource) -> bool:
    """Return whether the weights can stay in their files: those that are pickled cannot. Downloads those of the hub. Raises
    UserError."""
    return bool(weight_files.files(_folder(source)))


def to_bring_layers(readable: bool, gpus: int) -> str:
    """Say what has to be done before layers can be brought one at a time, of weights that are `readable_in_place` or not, to so
    many GPUs; "" where they can be."""
    steps = {
        "save the model with save_pretrained, which writes safetensors (tensors of a pickle cannot be read one at a time)": (
            not readable
        ),
        "use --gpus-per-trial 1 (layers are brought one at a time to one GPU only)": gpus > 1,
    }
    return " and ".join(step for step, needed in steps.items() if needed)


def _stored_weights(places: Mapping[str, weight_files.Place], dtype: torch.dtype) -> LazyWeights:
    """Make a mapping of the parameters as `dtype`; `places`: where each is. A file is opened for every tensor, so that none
    stays mapped. A tensor that cannot be read any more is a UserError, and so is one whose file has changed: numbers would be
    those of two models, and to read a map beyond the end of a file that was cut ends the process."""
    kind = str(dtype).removeprefix("torch.")
    index = {
        name: {"safetensors_file": str(path), "weight_name": stored, "dtype": kind}
        for name, (path, stored) in places.items()
    }
    loader = OffloadedWeightsLoader(index=index)
    states = {path: _state(path) for path, _ in places.values()}

    def find(name: str) -> torch.Tensor:
        path, stored = places[name]
        try:
            if _state(path) != states[path]:
                raise OSError("it has changed since the start")
            tensor: torch.Tensor = loader[name]
        except (OSError, SafetensorError) as error:
            cause = " ".join(str(error).split())
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise MemoryError(f"{path} cannot be mapped: {cause}") from error
            raise UserError(
                f"{stored} cannot be read from weight file {path} any more ({cause}); restore the file, then start again"
            ) from error
        return tensor

    return LazyWeights(places, find)


def _state(path: Path) -> tuple[int, int]:
    """Return what tells that a file is still the same: bytes and time of its last change."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _folder(source: ModelSource) -> Path:
    """Return the folder of the weight files; those of the hub are downloaded. Raises UserError."""
    if source.kind != "hub":
        return Path(source.location)
    loading.fetch_weights(source)
    folder = hub.folder(source.location, source.revision)
    assert folder is not None, "load_config has read its config.json"
    return folder
