"""The choice of the llama.cpp architecture that can represent a pruned model; an error where none can.

    architecture   layers may differ        models
    llama          no                       Llama, Mistral, Ministral, Granite, Phi-3, Seed-OSS, ERNIE 4.5
    qwen2          no, heads fill H         Qwen2
    qwen3          no                       Qwen3 without biases
    mistral3       no                       Ministral-3
    smollm3        no                       SmolLM3 without biases, every fourth layer without rotary embedding
    qwen3moe       no                       Qwen3-MoE without biases, experts in every layer
    deci           yes                      those of llama and Qwen2, with all their biases
    openelm        yes                      Qwen3 without biases, with tied embeddings
    gemma          no                       Gemma with tied embeddings, without biases
    gemma3         no                       Gemma 3 without biases, every sixth layer attending to everything

Granite is Llama with a scale in four places. They are written into the weights and the epsilon of the norms (`Scales`), since
llama.cpp's own graph of it has one width for all layers.

Phi-3 with its fused projections apart is Llama where it rotates whole heads and slides no window. llama.cpp's own graph of it has
one width for all layers.

Source: llama.cpp, src/models/{llama,mistral3,qwen2,qwen3,smollm3,qwen3moe,deci,openelm,gemma,gemma3}.cpp and load_hparams in
src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tune_prune.checkpoint.layers import widths
from tune_prune.core.errors import UserError
from tune_prune.models.families import Family, decoder_layers
from tune_prune.pruning.shapes import is_uniform


@dataclass(frozen=True)
class Architecture:
    """A graph of llama.cpp, and the models that it can represent."""

    name: str
    per_layer: bool = False  # layers of different widths, or without a block
    biases: frozenset[str] = frozenset()  # projections that may have one
    square: bool = False  # query heads must fill the hidden size
    pairs: bool = False  # rotates rows 2i and 2i+1 of a head; else i and i + d/2, as transformers does
    frequencies: bool = False  # reads a factor for each rotary frequency
    fused: bool = False  # q, k and v are one matrix
    tied: bool = False  # the embedding is the output head
    centred: bool = False  # norms multiply by what the file says, where the model's do by 1 more than their weight
    slides: bool = False  # attends in windows, to everything in every sixth layer
    experts: bool = False  # a mixture in every layer, whose router's weights are divided by their sum


_ALL = frozenset({"query", "key", "value", "output", "gate", "up", "down"})
_LLAMA = Architecture("llama", biases=_ALL, pairs=True, frequencies=True)
_DECI = Architecture("deci", per_layer=True, biases=_ALL, pairs=True, frequencies=True)
_MISTRAL3 = Architecture("mistral3", biases=_ALL, pairs=True, frequencies=True)
_QWEN2 = Architecture("qwen2", biases=frozenset({"query", "key", "value"}), square=True)
_QWEN3 = Architecture("qwen3")
_SMOLLM3 = Architecture("smollm3", pairs=True)
_QWEN3MOE = Architecture("qwen3moe", experts=True)
_OPENELM = Architecture("openelm", per_layer=True, fused=True, tied=True)
_GEMMA = Architecture("gemma", tied=True, centred=True)
_GEMMA3 = Architecture("gemma3", centred=True, slides=True)

# In order of preference, by the family's model type.
ARCHITECTURES: dict[str, tuple[Architecture, ...]] = {
    "llama": (_LLAMA, _DECI),
    "mistral": (_LLAMA, _DECI),
    "ministral3": (_MISTRAL3,),
    "qwen2": (_QWEN2, _DECI),
    "qwen3": (_QWEN3, _OPENELM),
    "smollm3": (_SMOLLM3,),
    "granite": (_LLAMA, _DECI),
    "phi3": (_LLAMA, _DECI),
    "gemma": (_GEMMA,),
    "gemma3_text": (_GEMMA3,),
    "seed_oss": (_LLAMA, _DECI),
    "ministral": (_LLAMA, _DECI),
    # Transformers rotates neighbouring rows of ERNIE's heads, too.
    "ernie4_5": (replace(_LLAMA, pairs=False), replace(_DECI, pairs=False)),
    "qwen3_moe": (_QWEN3MOE,),
}

# Rotary parameters that llama.cpp has as constants in these architectures.
_FIXED_ROPE = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
_ONE_WIDTH = "has one width for all layers"
_UNIFORM_HELPS = "search with --shape uniform, or "
# Least and most of Granite's scales that are written: the epsilon of norms is divided by the square of one.
_SCALES = (1e-6, 1e6)
# Of Gemma 3 every such layer attends to everything, windows have this rotary embedding, and models of so many layers another scale
# than their head size's, whatever a file says.
_WHOLE, _WINDOW_THETA, _OTHER_SCALE = 6, 10_000.0, 62
_UNROTATED = 4  # of SmolLM3 every such layer has no rotary embedding, whatever a file says


def choose_architecture(model: PreTrainedModel, family: Family) -> Architecture:
    """Return the first architecture of the family that can represent `model` (of the family's own class, its layers cut or all
    alike). Raises UserError where none can, with every reason, and ValueError where the first layer has no attention."""
    check_config(model.config)
    if not widths(model, family)[0].kv_heads:
        raise ValueError("the first layer has no attention: llama.cpp would read the head size and the cache there")
    _check_parameters(model, family)
    reasons = []
    uniform_helps = False
    for architecture in ARCHITECTURES[family.model_type]:
        problems = list(_problems(architecture, model, family))
        if not problems:
            return architecture
        reasons.append(f"architecture {architecture.name} {' and '.join(problems)}")
        uniform_helps |= problems == [_ONE_WIDTH]
    raise _unsupported("; ".join(reasons), _UNIFORM_HELPS if uniform_helps else "")


@dataclass(frozen=True)
class Scales:
    """Factors of tensors of the file, so that a Llama graph makes the logits of a Granite model; 1 for other models.

    With hidden states h, blocks f and Granite's multipliers m (embeddings), r (residuals) and s (logits), h_0 = m E and h_i+1 =
    h_i + r f(norm(h_i)); logits are W norm(h_n) / s. Of h / r the blocks add f itself, it begins with m/r E, and its norms are the
    same with eps / r^2. Tied embeddings are W, too, and the last norm takes back what they are multiplied by.
    """

    embedding: float
    query: float  # the attention multiplier by 1 / sqrt(d), which the graph has
    last_norm: float
    eps: float  # of all norms: no factor, but the value

    @classmethod
    def of(cls, model: PreTrainedModel, head_dim: int) -> Scales:
        config = model.config
        residual = getattr(config, "residual_multiplier", 1.0)
        embedding = getattr(config, "embedding_multiplier", 1.0) / residual
        attention = getattr(config, "attention_multiplier", None)
        return cls(
            embedding,
            1.0 if attention is None else attention * head_dim**0.5,
            1 / getattr(config, "logits_scaling", 1.0) / (embedding if is_tied(model) else 1.0),
            config.rms_norm_eps / residual**2,
        )


def embedding(model: PreTrainedModel) -> torch.Tensor:
    """Return the embeddings [vocabulary, H]."""
    return cast(torch.Tensor, model.get_input_embeddings().weight)


def head(model: PreTrainedModel) -> torch.Tensor:
    """Return the output head [vocabulary, H]."""
    return cast(torch.Tensor, model.get_output_embeddings().weight)


def is_tied(model: PreTrainedModel) -> bool:
    return head(model) is embedding(model)


def parameter(module: nn.Module, path: str) -> torch.Tensor | None:
    """Return a parameter by its path, or None where it, or the module that would have it, is not there."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return cast("torch.Tensor | None", value)


def _unsupported(reason: str, first: str = "") -> UserError:
    return UserError(
        f"llama.cpp cannot represent this model: {reason}; {first}save the model with --format hf or --format hf-padded"
    )


def check_config(config: PretrainedConfig) -> None:
    """Raise UserError for what no graph of these architectures computes."""
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"GGUF files are written of {', '.join(ARCHITECTURES)} models, and this is a {config.model_type} model; save it with "
            "--format hf or --format hf-padded"
        )
    centred, slides = (getattr(ARCHITECTURES[config.model_type][0], name) for name in ("centred", "slides"))
    activation, known = _activation(config), "gelu_pytorch_tanh" if centred else "silu"
    if activation != known:
        raise _unsupported(f"hidden_act is {activation!r}, its graphs support only {known!r}")
    if slides:
        _check_windows(config)
        return
    if not getattr(config, "norm_topk_prob", True):
        raise _unsupported(
            "norm_topk_prob is false, and its graph divides the weights of a token's experts by their sum"
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is not None and slides and window < config.max_position_embeddings:
        raise _unsupported(
            f"sliding_window is {window}, less than max_position_embeddings ({config.max_position_embeddings}), and its "
            "graphs for this family attend to everything"
        )
    rope = rope_of(config)
    rope_types = ("default", "linear", "llama3", "yarn")
    if rope["rope_type"] not in rope_types:
        raise _unsupported(
            f"rope_type is {rope['rope_type']!r}, its graphs for this family support {', '.join(rope_types)}"
        )
    for key, value in _FIXED_ROPE.items():
        if rope.get(key) not in (None, value):
            raise _unsupported(
                f"{key} of rope_parameters is {rope[key]}, its graphs for this family support only {value}"
            )
    if rope.get("llama_4_scaling_beta") and rope["rope_type"] != "yarn":
        raise _unsupported(
            f"queries are scaled by their position (llama_4_scaling_beta), and rope_type is {rope['rope_type']!r}; its graph does "
            "that for 'yarn' alone"
        )
    rotated = (getattr(config, "no_rope_layers", None) or [])[: config.num_hidden_layers]
    if any(bool(rotary) != bool((index + 1) % _UNROTATED) for index, rotary in enumerate(rotated)):
        raise _unsupported(
            f"no_rope_layers is {rotated}, and its graph leaves rotary embedding out of every {_UNROTATED}th layer and no other"
        )
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        if not _SCALES[0] <= (value := getattr(config, key, 1.0)) <= _SCALES[1]:
            least, most = _SCALES
            raise _unsupported(
                f"{key} is {value}; its graph has no scales, and weights hold one between {least:g} and {most:g}"
            )


def rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary embedding of layers that attend to everything."""
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _activation(config: PretrainedConfig) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _check_windows(config: PretrainedConfig) -> None:
    """Raise UserError where a Gemma 3 is another than its graph computes."""
    kinds = [
        "sliding_attention" if (index + 1) % _WHOLE else "full_attention" for index in range(len(config.layer_types))
    ]
    rope, in_windows = rope_of(config), config.rope_parameters["sliding_attention"]
    for wrong, reason in (
        (config.layer_types != kinds, f"layer_types is not a full_attention in every {_WHOLE}th layer"),
        (config.num_hidden_layers == _OTHER_SCALE, f"of {_OTHER_SCALE} layers it scales attention otherwise"),
        (config.query_pre_attn_scalar != config.head_dim, "query_pre_attn_scalar is not head_dim"),
        (config.final_logit_softcapping is not None, "final_logit_softcapping is set"),
        (rope["rope_type"] not in ("default", "linear"), f"rope_type is {rope['rope_type']!r}"),
        (in_windows != {"rope_type": "default", "rope_theta": _WINDOW_THETA}, f"sliding layers have {in_windows}"),
    ):
        if wrong:
            raise _unsupported(f"{reason}, which its graph for this family does not know")


def check_shape(config: PretrainedConfig, shape: str) -> None:
    """Raise UserError where layers pruned in this shape differ, and no architecture of the family takes such."""
    check_config(config)
    if not is_uniform(shape) and not any(architecture.per_layer for architecture in ARCHITECTURES[config.model_type]):
        raise _unsupported(
            f"architecture {ARCHITECTURES[config.model_type][0].name} {_ONE_WIDTH}, and shape is {shape}",
            _UNIFORM_HELPS,
        )


def _check_parameters(model: PreTrainedModel, family: Family) -> None:
    """Raise UserError where the model has a parameter for which there is no place in any of these architectures."""
    expected = {*family.projections().values(), *family.layer_norms}
    expected |= {f"{family.attention}.{norm}" for norm in family.head_norms}
    expected |= {f"{family.mlp}.{part}" for part in (family.experts, family.router) if part}
    for index, layer in enumerate(decoder_layers(model, family)):
        for name, _ in layer.named_parameters():
            if name.rpartition(".")[0] not in expected:
                raise _unsupported(f"it has no place for the parameter {name!r} of layer {index}")
    if parameter(model.get_output_embeddings(), "bias") is not None:
        raise _unsupported("it has no place for the bias of the output head")


def _problems(architecture: Architecture, model: PreTrainedModel, family: Family) -> Iterator[str]:
    """Return why the architecture cannot represent the model: clauses that follow its name."""
    sizes = widths(model, family)
    layers = decoder_layers(model, family)
    if not architecture.per_layer and (len(set(sizes)) > 1 or sizes[0].skip(family.prunes)):
        yield _ONE_WIDTH
    if architecture.experts and not all(size.expert_width for size in sizes):
        yield "has experts in every layer"
    queries = sizes[0].heads * family.head_dim(layers[0])
    if architecture.square and queries != model.config.hidden_size:
        yield f"wants query heads that fill the hidden size ({queries} of {model.config.hidden_size})"
    if architecture.tied and not is_tied(model):
        yield "has no output head of its own (tie_word_embeddings is false)"
    paths = family.projections().items()
    biased = {role for layer in layers for role, path in paths if parameter(layer, f"{path}.bias") is not None}
    if biased - architecture.biases:
        yield f"has no place for biases of {', '.join(sorted(biased - architecture.biases))} projections"
    if rope_of(model.config)["rope_type"] == "llama3" and not architecture.frequencies:
        yield "does not read the frequency factors of rope_type 'llama3'"
