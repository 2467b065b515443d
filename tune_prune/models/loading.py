"""Load a model and its tokenizer, or only its shape, and say in one sentence what is missing when that fails.

A model is modules that transformers makes of its config and a mapping from names to weights, which reads the files: `load_model`
brings all of them to a device, `map_model` leaves them where they are.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import OffloadedWeightsLoader
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from tune_prune.core import terminal
from tune_prune.core.errors import UserError
from tune_prune.core.hashing import digest
from tune_prune.models import (
    fingerprints,
    fused,
    hub,
    quantised,
    registration,
    stored_experts,
    unsupported,
    weight_files,
)
from tune_prune.models.catalog import ModelSource
from tune_prune.models.families import FAMILIES, PRUNED_PREFIX, Family, choose_experts_kernel, family_of
from tune_prune.models.geometry import Geometry, check_sizes, read_geometry
from tune_prune.models.gguf import convert
from tune_prune.models.gguf import files as gguf_files
from tune_prune.models.runner import devices, spread
from tune_prune.models.runner.layer_weights import LazyWeights, bring
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.models.wrapper import (
    Surroundings,
    is_wrapper,
    language_config,
    name_in_wrapper,
    outside,
    outside_params,
)

WIDE = ("float32", "float64", "F32")  # of `stored_as`: what bfloat16 would round

# What a config.json may say of how a model is run: that is decided here, so that it changes nothing.
_RUN: dict[str, Any] = {
    "return_dict": True, "output_hidden_states": False, "output_attentions": False, "use_cache": True,
    "attn_implementation": None, "_attn_implementation": None,
}  # fmt: skip
_RUN_OTHERWISE = ("gradient_checkpointing", "fusion_config", "torchscript")  # what is no field of a config

_LARGE = ("config.json", "tokenizer.json", "tokenizer.model")  # which Git may have left out, beside weights
# What every family's config says in whole numbers.
CONFIG_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip


@dataclass
class LoadedModel:
    """A dense model in memory; of a wrapper the language model inside. Nothing may change its weights: pruned copies share its
    tensors."""

    source: ModelSource
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    family: Family
    geometry: Geometry
    residency: Residency = RESIDENT  # where its weights are; with weights elsewhere `model` is on the meta device
    around: Surroundings | None = None  # of a wrapper

    @property
    def device(self) -> torch.device:
        """Return the device on which it is run."""
        return self.residency.device or self.model.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return all devices on which it is run: the first is `device`."""
        if self.residency.gpus == 1:
            return (self.device,)
        return tuple(dict.fromkeys(p.device for p in self.model.parameters()))

    @property
    def max_length(self) -> int:
        """Return the longest input in tokens."""
        return int(self.model.config.max_position_embeddings)


def pick_device(asked: str) -> str:
    """Return the device that --device (auto, cpu or cuda) means. Raises UserError for a GPU that is not there or lacks kernels."""
    has_gpu = asked != "cpu" and torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise UserError("--device is cuda, but torch finds no GPU on this machine; use --device cpu, or leave it out")
    if has_gpu:
        set_up_gpu()  # to ask torch about a GPU is a use of it
        if problem := devices.lacks_kernels(0):
            raise UserError(f"{problem}: {devices.NO_KERNELS_STEP} (--device cpu)")
    return "cuda" if has_gpu else "cpu"


def stored_as(source: ModelSource, config: PretrainedConfig) -> str:
    """Return what weights are stored in: a data type such as bfloat16, as config.json says or, where it does not, most of the
    numbers of the files; of a GGUF file what it is quantised to, such as Q4_1 or F32."""
    if source.gguf is not None:
        return source.gguf.quantization
    folder = Path(source.location) if source.kind != "hub" else hub.folder(source.location, source.revision)
    stated = getattr(config, "dtype", None) or (folder and weight_files.usual_dtype(folder)) or torch.float32
    return str(stated).removeprefix("torch.")


def default_dtype(stored: str, fast: Callable[[], bool]) -> str:
    """Return the data type to compute in where no --dtype names one: bfloat16 for weights that are `stored_as` fewer than 32 bits,
    on a device that is `fast` at it; else float32."""
    return "float32" if stored in WIDE or not fast() else "bfloat16"


def set_up_gpu() -> None:
    """Set up this process for computing on a GPU; before its first use, as torch's allocator reads them once."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        # Batches differ in size: less is lost between blocks that can grow.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.backends.cuda.enable_cudnn_sdp(False)  # makes a plan for every new shape, and zero-shot rows have hundreds
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of products stay in float32


def load_config(source: ModelSource) -> PretrainedConfig:
    """Return the config of the model, of a wrapper that of the language model inside; of a GGUF file its folder is filled. Raises
    UserError, also for a family that is not supported."""
    return language_config(whole_config(source))


def whole_config(source: ModelSource) -> PretrainedConfig:
    """Return what config.json says as a whole: of a wrapper its own config, around that of its language model. Raises UserError as
    `load_config`."""
    if source.file is not None:
        convert.ensure(source.file, Path(source.location))
    where = {"pretrained_model_name_or_path": source.location, "revision": source.revision or "main"}
    try:
        if source.kind == "hub":
            hub.probe(source.location, "config.json", source.revision)
            values, _ = PretrainedConfig.get_config_dict(**where)
        else:
            weight_files.check_pointers(Path(source.location) / name for name in _LARGE)
            values = json.loads((Path(source.location) / "config.json").read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ValueError("it names no model_type")
        check_sizes(values, source.location)
        unsupported.check_followed(values, source.location)
        unsupported.check_adapter(source)
        pruned = values["model_type"].startswith(PRUNED_PREFIX)
        if pruned:
            registration.register()  # ours, so that none of the code in the folder is run
        if values["model_type"] not in CONFIG_MAPPING:  # before transformers looks for code to run for an unknown one
            family_of(values["model_type"])
        inside = values.get("text_config") or values
        own_heads = inside.get("model_type") in FAMILIES and FAMILIES[inside["model_type"]].own_heads
        if not (pruned or own_heads) and (values.get("per_layer_config") or inside.get("per_layer_config")):
            raise UserError(
                f"config.json of {source.location} gives its layers sizes of their own (per_layer_config), which transformers does "
                f"not follow in {values['model_type']} models; it was pruned by another tool: give the original model, or a "
                "checkpoint of tune_prune"
            )
        config = AutoConfig.from_pretrained(**where, trust_remote_code=False, **_RUN)
        if is_wrapper(config):
            _complete_inside(config, values)
        for name in _RUN_OTHERWISE:
            language_config(config).__dict__.pop(name, None)
            config.__dict__.pop(name, None)
        if getattr(config, "output_router_logits", False):
            # They are for a loss of training, which wants one number of experts in every layer.
            config.output_router_logits = False
        family = _family(config)
        place = hub.folder(source.location, source.revision) if source.kind == "hub" else Path(source.location)
        if place is None or quantised.about(place) is None:
            unsupported.check_quantisation(values, source.location)
        config.__dict__.pop("quantization_config", None)  # read where the weights are
    except UserError:
        raise
    except Exception as error:  # transformers, its validation of fields and the hub client each raise their own kinds
        raise unsupported.unavailable(source, error, "config.json") from error
    stated = language_config(
        config
    ).to_dict()  # a pruned config does not give away as an attribute what differs between its layers
    wrong = [name for name in CONFIG_SIZES if not isinstance(size := stated.get(name), int) or size < 1]
    if wrong:
        raise UserError(
            f"config.json of {source.location} says {wrong[0]} {stated.get(wrong[0])!r}, but a {family.model_type} model needs a "
            "whole number of at least 1; download the model again or correct it"
        )
    return config


def _complete_inside(config: PretrainedConfig, values: Mapping[str, Any]) -> None:
    """Have the text_config of a wrapper's `config` say what is said once, for the whole: `values` are those of config.json."""
    text = type(config.text_config).from_dict(config.text_config.to_dict(), **_RUN)
    text.name_or_path = config.name_or_path
    text.dtype = config.dtype = config.dtype or text.dtype
    # transformers follows the whole's alone; one that is left out there has a default that need not be the language model's.
    text.tie_word_embeddings = values.get("tie_word_embeddings", text.tie_word_embeddings)
    config.tie_word_embeddings = text.tie_word_embeddings
    config.text_config = text


def _family(config: PretrainedConfig) -> Family:
    """Return the row of the config's family. Raises UserError, with the reason, for a family that has none."""
    text = language_config(config)
    if text.model_type in FAMILIES or text.model_type.startswith(PRUNED_PREFIX):
        return family_of(text.model_type)
    inside = text is config and getattr(config, "text_config", None) is not None
    if inside or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(unsupported.no_language_model(config))
    raise UserError(unsupported.reason(meta_model(text)))


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, silent about long texts: whoever tokenises one cuts it into windows. Raises UserError."""
    tokenizer = original_tokenizer(source)
    tokenizer.model_max_length = 10**30  # transformers' own value for "no limit"
    return tokenizer


def original_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer as it came, to be saved with another model. Raises UserError."""
    try:
        tokenizer = _tokenizer_class(source).from_pretrained(
            source.location, revision=source.revision or "main", trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises bare Exceptions, the hub its own kinds
        raise unsupported.unavailable(source, error, "tokenizer") from error
    # transformers makes up an empty one where the files are missing
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(
            f"the tokenizer of {source.location} has an empty vocabulary; tokenizer.json (or tokenizer.model) is missing or empty: "
            "download the model again or point --model at a complete folder"
        )
    return tokenizer


def _tokenizer_class(source: ModelSource) -> Any:
    """Return AutoTokenizer, or the plain class where a folder's tokenizer_config.json names it: AutoTokenizer of transformers 5
    puts the family's own (Qwen2's BPE in every qwen2 folder) in its place and so changes every token."""
    path = Path(source.location) / "tokenizer_config.json"
    if source.kind == "hub" or not path.is_file() or not path.with_name("tokenizer.json").is_file():
        return AutoTokenizer
    named = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class")
    return PreTrainedTokenizerFast if named in ("PreTrainedTokenizerFast", "TokenizersBackend") else AutoTokenizer


def config_geometry(config: PretrainedConfig, source: ModelSource | None = None) -> tuple[Family, Geometry]:
    """Return family and geometry of a language model from its config alone; with its `source` also what stands around it is
    counted. Raises UserError for a config that describes no such model."""
    family, model = _family(config), meta_model(config)
    fused.take_apart(model, family)
    geometry = read_geometry(model, family)
    if source is not None and (whole := _around(source, config)) is not config:
        geometry = geometry.within(outside_params(meta_model(whole)))
    return family, geometry


def _around(source: ModelSource, config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the wrapper around a language model whose `config` was read from `source`; without one that itself."""
    folder = Path(source.location) if source.kind != "hub" else hub.folder(source.location, source.revision)
    assert folder is not None, "load_config has read its config.json"
    stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config if stated["model_type"] == config.model_type else whole_config(source)


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of a config, as its files have it, without its memory, on torch's meta device. Raises UserError where it
    cannot be built."""
    try:
        auto: Any = AutoModelForImageTextToText if is_wrapper(config) else AutoModelForCausalLM
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, trust_remote_code=False)
        return model
    except Exception as error:  # whatever a modelling file trips over
        raise UserError(
            f"config.json of {config.name_or_path} describes no model that can be built ({unsupported.cause(error)}); download the "
            "model again or correct it"
        ) from error


def fetch_weights(source: ModelSource) -> None:
    """Download the weights of a hub model that this machine's cache lacks. Raises UserError."""
    if source.kind == "hub":
        try:
            hub.fetch_weights(source.location, source.revision)
        except Exception as error:  # the hub client and the network libraries each raise their own kinds
            raise unsupported.unavailable(source, error, "weights") from error


def check_weights(source: ModelSource, config: PretrainedConfig, needed: bool = True) -> None:
    """Raise UserError unless the weights of the model fit its config (weight_files.check_weights). Of those of the hub nothing is
    known before they are in the cache, nor of a folder's that are not here where they are not `needed`."""
    local = source.kind != "hub"
    folder = Path(source.location) if local else hub.folder(source.location, source.revision)
    if folder is not None and quantised.about(folder) is not None:
        return  # its manifest has their checksums
    if folder is not None and ((local and needed) or weight_files.are_here(folder)):
        weight_files.check_weights(folder, meta_model(_around(source, config)), source.location)


def load_model(source: ModelSource, dtype: torch.dtype, device: str, residency: Residency = RESIDENT) -> LoadedModel:
    """Load weights and tokenizer, straight to the device, a tensor at a time. `residency` is how passes over the model hold what
    else they need, and over how many GPUs its layers are spread. Raises UserError where the model is not available, its weights do
    not fit its config (never leaves a tensor at random values), or its family is not supported."""
    loaded, stored = _opened(source, dtype, device)
    model, family = loaded.model, loaded.family
    spread_over = range(residency.gpus)
    places: dict[str, Any] = {"": device} if residency.gpus == 1 else spread.device_map(model, family, spread_over)
    with terminal.step("weights", lambda: len(list(model.parameters())), "tensors") as advance:

        def weights_below(module: str) -> LazyWeights:
            def find(name: str) -> torch.Tensor:
                advance(1)
                return stored[f"{module}.{name}".removeprefix(".")]

            return LazyWeights([name for name, _ in model.get_submodule(module).named_parameters()], find)

        for module, place in places.items():
            bring(model.get_submodule(module), weights_below(module), torch.device(place))
    model.tie_weights()  # where the parts of a spread model had one weight
    if residency.gpus > 1:
        spread.follow_weights(model, family)
    return replace(loaded, residency=residency)


def map_model(source: ModelSource, dtype: torch.dtype, device: str, residency: Residency = RESIDENT) -> LoadedModel:
    """Open a model without memory for its weights: they are read from safetensors files, as `dtype`, when they are needed on
    `device`. `residency` says where hidden states are. Raises UserError as `load_model` does, from the files' headers alone, and
    for weights that are pickled."""
    loaded, stored = _opened(source, dtype, device, in_place=True)
    return replace(loaded, residency=replace(residency, weights=stored, device=torch.device(device)))


def _opened(
    source: ModelSource, dtype: torch.dtype, device: str, in_place: bool = False
) -> tuple[LoadedModel, LazyWeights]:
    """Return a model whose parameters are on the meta device, and its weights, which are read when they are asked for. `in_place`:
    raise UserError for weights that can only be loaded as a whole."""
    transformers_logging.disable_progress_bar()
    whole = whole_config(source)
    config = language_config(whole)
    family = family_of(config.model_type)
    if device == "cuda":
        set_up_gpu()
    tokenizer = load_tokenizer(source)
    folder = weights_folder(source)
    # Most of its buffers are in no file (rotary frequencies): they are made on the CPU, and its parameters nowhere.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    choose_experts_kernel(model, family)
    model.tie_weights()  # what was tied has become two parameters
    # None where there is none, or the hub does not answer.
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    generation_file = cached_file(
        source.location, "generation_config.json", revision=source.revision or "main", **quietly
    )
    if generation_file:
        model.generation_config = GenerationConfig.from_pretrained(Path(generation_file).parent)
    else:  # made from config.json, so with what that says of how a model is run
        generation = model.generation_config
        generation.use_cache = None if generation.use_cache is None else True
        for name in ("output_attentions", "output_hidden_states", "return_dict_in_generate"):
            setattr(generation, name, getattr(generation, name) and None)  # no longer True; False and None stay
    model.eval().requires_grad_(False)
    around = None
    if (about := quantised.about(folder)) is not None:
        stored = quantised.weights(folder, model, about, dtype)
    elif whole is config:
        places = weight_files.check_weights(folder, model, source.location, in_place)
        stored = stored_experts.stacked(_stored_weights(places, dtype), model)
    else:
        wrapper = meta_model(whole)
        places = weight_files.check_weights(folder, wrapper, source.location, in_place)
        others = _stored_weights({name: places[name] for name in outside(wrapper)}, dtype)
        around = Surroundings(wrapper, others, {name: spelling for name, (_, spelling) in places.items()})
        stored = _stored_weights({name: places[name_in_wrapper(name)] for name in model.state_dict()}, dtype)
    for name, buffer in stored_experts.stored_buffers(model).items():
        buffer.copy_(stored[name])
    rows = fused.take_apart(model, family)
    stored = fused.parts(stored, model, rows)
    geometry = read_geometry(model, family)
    if around is not None:
        geometry = geometry.within(around.params)
    return LoadedModel(source, model, tokenizer, family, geometry, around=around), stored


def _stored_weights(places: Mapping[str, weight_files.Place], dtype: torch.dtype) -> LazyWeights:
    """Map parameters to their weights as `dtype`; `places`: where each is. A file is opened for every tensor, so that none stays
    mapped. A tensor that cannot be read any more is a UserError, and so is one whose file has changed: numbers would be those of
    two models, and to read a map beyond the end of a file that was cut ends the process."""

    def state(path: Path) -> tuple[int, int]:
        about = path.stat()
        return about.st_size, about.st_mtime_ns

    states = {path: state(path) for path, _ in places.values()}
    pickles = {path: weight_files.unpickled(path) for path in states if path.suffix == ".bin"}
    kind = str(dtype).removeprefix("torch.")
    # accelerate's loader reads a tensor from a safetensors file in place (memory-mapped), in the type that is asked for.
    loader = OffloadedWeightsLoader(
        index={
            name: {"safetensors_file": str(path), "weight_name": stored, "dtype": kind}
            for name, (path, stored) in places.items()
        }
    )

    def find(name: str) -> torch.Tensor:
        path, stored = places[name]
        try:
            if state(path) != states[path]:
                raise OSError("it has changed since the start")
            tensor: torch.Tensor = pickles[path][stored].to(dtype) if path in pickles else loader[name]
        except (OSError, SafetensorError) as error:
            cause = " ".join(str(error).split())
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise MemoryError(f"{path} cannot be mapped: {cause}") from error
            raise UserError(
                f"{stored} cannot be read from weight file {path} any more ({cause}); restore the file, then start again"
            ) from error
        return tensor

    return LazyWeights(places, find)


def weights_folder(source: ModelSource) -> Path:
    """Return where the weight files are; those of the hub are downloaded. Raises UserError."""
    fetch_weights(source)
    folder = Path(source.location) if source.kind != "hub" else hub.folder(source.location, source.revision)
    assert folder is not None, "load_config has read its config.json"
    return folder


def model_fingerprint(source: ModelSource, config: PretrainedConfig) -> str:
    """Return what a model is, by content and not by place: hub models by commit, GGUF files by SHA-256, folders by config,
    tokenizer and weight files."""
    commit = hub.commit(source.location, source.revision) if source.kind == "hub" else None
    if commit:
        return digest({"hub": source.location, "commit": commit})
    if source.kind == "gguf":
        return gguf_files.fingerprint(Path(source.location))
    return fingerprints.folder_fingerprint(Path(source.location))


def readable_in_place(source: ModelSource) -> bool:
    """Return whether the weights can stay in their files: pickled ones cannot. Downloads those of the hub. Raises UserError."""
    return bool(weight_files.files(weights_folder(source)))
