"""Load a model and its tokenizer, or only its shape, and say in one sentence what is missing when that fails."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PretrainedConfig
from transformers.utils import logging as transformers_logging

from tune_prune.config import digest
from tune_prune.errors import UserError
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import Family, family_of
from tune_prune.models.geometry import Geometry, read_geometry

# A weight file up to this size is hashed whole; of a larger one, evenly spaced pieces (seconds instead of minutes).
WHOLE_HASH_BYTES = 256 * 2**20
HASHED_PIECES = 64


@dataclass
class LoadedModel:
    """A dense model in memory. Nothing may change its weights: pruned copies share its tensors."""

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    family: Family
    geometry: Geometry

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_length(self) -> int:
        """Longest input in tokens."""
        return int(self.model.config.max_position_embeddings)


def load_config(source: ModelSource) -> PretrainedConfig:
    """The model's config; for hub models also pins what was found: `config._commit_hash`. Raises UserError."""
    try:
        return AutoConfig.from_pretrained(source.location, revision=source.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        raise _unavailable(source, error) from error


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer, silent about long texts: whoever tokenises one cuts it into windows. Raises UserError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, revision=source.revision or "main")
    except Exception as error:  # tokenizers raises bare Exceptions, the hub its own kinds
        raise _unavailable(source, error) from error
    tokenizer.model_max_length = 10**30  # transformers' own value for "no limit"
    return tokenizer


def config_geometry(config: PretrainedConfig) -> tuple[Family, Geometry]:
    """Family and geometry from a config alone: the model is built without memory, on torch's meta device."""
    family = family_of(config.model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return family, read_geometry(model, family)


def load_model(source: ModelSource, dtype: torch.dtype, device: str) -> LoadedModel:
    """Load weights and tokenizer. Raises UserError where the model cannot be had, its weights do not fit its config
    (never leaves a tensor at random values), or its family is not supported."""
    config = load_config(source)
    family = family_of(config.model_type)
    revision = source.revision or "main"
    tokenizer = load_tokenizer(source)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its load report is turned into our sentence below
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.location, revision=revision, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
        model, report = loaded
    except Exception as error:  # safetensors, torch and the hub each raise their own kinds
        raise _unavailable(source, error) from error
    finally:
        transformers_logging.set_verbosity(level)
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise UserError(
            f"the weights of {source.location} do not fit its config.json: {len(wrong)} tensors are missing or of another "
            f"shape, e.g. {wrong[0]}; download the model again or point --model at a complete folder"
        )
    model.eval().requires_grad_(False).to(device)
    return LoadedModel(source, model, tokenizer, family, read_geometry(model, family))


def fingerprint(source: ModelSource, config: PretrainedConfig) -> str:
    """What a model is, by content: hub models by commit, folders by config, tokenizer and weight files.

    Folder paths do not count, so that a copy of a model is the same model.
    """
    commit = getattr(config, "_commit_hash", None)
    if source.kind == "hub" and commit:
        return digest({"hub": source.location, "commit": commit})
    folder = Path(source.location)
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name in {"config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"}
        or path.suffix in {".safetensors", ".bin"}
    )
    return digest({name: _file_hash(folder / name) for name in names})


def _file_hash(path: Path) -> str:
    size = path.stat().st_size
    state = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_HASH_BYTES:
            state.update(file.read())
        else:
            for piece in range(HASHED_PIECES):
                file.seek((size - 2**20) * piece // (HASHED_PIECES - 1))
                state.update(file.read(2**20))
    return state.hexdigest()


def _unavailable(source: ModelSource, error: Exception) -> UserError:
    """One sentence: what could not be had, the cause, and how to get it."""
    cause = " ".join(str(error).split()) or type(error).__name__
    cause = cause if len(cause) <= 160 else cause[:157] + "..."
    if source.kind != "hub":
        return UserError(
            f"model folder {source.location} cannot be loaded ({cause}); check that config, tokenizer and weights are complete"
        )
    text = f"{type(error).__name__} {error} {error.__cause__!r}".lower()
    if "gated" in text or "401" in text or "403" in text:
        step = f"accept its licence at https://huggingface.co/{source.location} and run `hf auth login`"
    elif os.environ.get("HF_HUB_OFFLINE") == "1":
        step = f"unset HF_HUB_OFFLINE, or run `hf download {source.location}` on a machine with network"
    else:
        step = f"check the network and the name, or run `hf download {source.location} --local-dir DIR` elsewhere"
    return UserError(
        f"model {source.location} cannot be had from the Hugging Face hub ({cause}); {step}, or give a local folder: --model DIR"
    )
