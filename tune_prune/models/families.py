"""Decoder families as data: where a family keeps the parts that pruning removes.

One row per family; every room reads the row and none asks for a model's type. To support another family, add a row and
run `pytest tests/models/test_families.py`, which walks the table. `check_structure` compares a row with a built model, so that
an unknown layout becomes a sentence instead of wrong numbers.

Shapes: H hidden size, d head dim, K key/value heads, g query heads per KV head, M MLP width, E experts of m channels; weights are
[out, in].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from tune_prune.core.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LAYER_LISTS = ("layer_types", "no_rope_layers")  # fields of configs that have an entry for each layer

# The projections' roles, by the block they belong to.
ATTENTION = ("query", "key", "value", "output")
MLP = ("gate", "up", "down")
ROLES = {"attention": ATTENTION, "mlp": MLP}


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: a router scores all of them for a token, and the best `top_k` add what they make of it. The weights of
    all are stacked: gate and up [E, 2m, H], down [E, H, m], router [E, H]."""

    experts: nn.Module
    router: nn.Module

    @property
    def gate_up(self) -> nn.Parameter:
        return cast(nn.Parameter, self.experts.gate_up_proj)

    @property
    def down(self) -> nn.Parameter:
        return cast(nn.Parameter, self.experts.down_proj)

    @property
    def router_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.router.weight)

    @property
    def count(self) -> int:
        return len(self.down)

    @property
    def width(self) -> int:
        """Channels of each expert."""
        return self.down.shape[2]

    @property
    def top_k(self) -> int:
        return cast(int, self.router.top_k)

    @property
    def weights_used(self) -> int:
        """Weights that compute a token: the router's, and those of the experts that it takes."""
        return self.router_weight.numel() + self.top_k * (self.gate_up[0].numel() + self.down[0].numel())

    def fits(self, hidden: int) -> bool:
        """Say whether the weights are of one number of experts of one width on the hidden size, each with a channel."""
        count, width = self.count, self.width
        shapes = [tuple(weight.shape) for weight in (self.gate_up, self.down, self.router_weight)]
        wanted = [(count, 2 * width, hidden), (count, hidden, width), (count, hidden)]
        return shapes == wanted and min(count, width) > 0


@dataclass(frozen=True)
class Family:
    """Names of a decoder layer's parts, relative to the layer. Rows of q [K*g*d, H], k and v [K*d, H], gate and up
    [M, H] follow the pruned groups, and so do their biases; of o [H, K*g*d] and down [H, M] the columns follow.

    A projection whose name has a dot is a part of a fused one, e.g. "qkv_proj.q_proj" of the matrix qkv_proj: `models.fused`
    takes that apart."""

    model_type: str  # transformers' config.model_type
    # Of which blocks parts may go. Attention stays whole, whatever it is made of, where a cut would change what is left: norms over
    # all heads, or layers that attend in no usual way.
    prunes: tuple[str, ...] = ("attention", "mlp")
    layers: str = "model.layers"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    width: str = "intermediate_size"  # the config's field for channels of the MLP
    # Norms over head_dim inside attention: shared by all heads, removed with the last one.
    head_norms: tuple[str, ...] = ()
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    # Of these the norms behind o and behind down: what a block adds to the residual stream is what they give.
    output_norms: tuple[str, ...] = ()
    # Whether layers carry a state from token to token: they take no masks but those of padding, so each text is a row of its own.
    recurrent: bool = False
    # What layers are given to put their keys and values into, for layers behind them that have none of their own.
    shared_states: str = ""
    # Its plain config says in per_layer_config which sizes the heads of a layer have.
    own_heads: bool = False
    returns_tuple: bool = False  # its layers give their hidden states as a tuple of one
    heads_divide_hidden: bool = False  # its config refuses num_attention_heads that do not divide hidden_size
    # Its config refuses factors of longrope whose number is not that of hidden_size / num_attention_heads, whatever head_dim says.
    longrope_by_heads: bool = False
    # A BOS token stands in front of every text, as in training: without one a Gemma takes the first tokens for it, and all windows
    # are of another model (gemma-3-270m in windows of 128 tokens: perplexity 346, with one 46.5).
    bos: bool = False
    # Of a mixture of experts: modules inside the MLP, which other layers of the model have as a plain one.
    experts: str = ""
    router: str = ""
    expert_width: str = "moe_intermediate_size"  # the config's field for channels of each

    def projections(self) -> dict[str, str]:
        """Path inside a layer of each projection of the blocks that are pruned, by role."""
        return {role: f"{getattr(self, block)}.{getattr(self, role)}" for block in self.prunes for role in ROLES[block]}

    def fused(self) -> dict[str, tuple[str, ...]]:
        """Roles whose projections are consecutive rows of one matrix, by its path inside a layer."""
        matrices: dict[str, tuple[str, ...]] = {}
        for role, path in self.projections().items():
            if "." in getattr(self, role):
                matrix = path.rpartition(".")[0]
                matrices[matrix] = (*matrices.get(matrix, ()), role)
        return matrices

    def linears(self, layer: nn.Module) -> dict[str, nn.Linear]:
        """The projections of a decoder layer that passed `check_structure`, by role; of a pruned checkpoint's layer without
        attention, or without MLP, those that it has (what is left of a removed block's last projection has no inputs)."""
        found = {role: _submodule(layer, path) for role, path in self.projections().items()}
        return {role: module for role, module in found.items() if isinstance(module, nn.Linear) and module.in_features}

    def mixture(self, layer: nn.Module) -> Mixture | None:
        """The mixture of experts in the place of a layer's MLP; None where it has a plain one, or none."""
        experts = _submodule(layer, f"{self.mlp}.{self.experts}") if self.experts else None
        return None if experts is None else Mixture(experts, layer.get_submodule(f"{self.mlp}.{self.router}"))

    def group_weights(self, layer: nn.Module) -> list[torch.Tensor]:
        """The weights of a layer that belong to groups: those of its projections and, stacked, of its experts."""
        mixture = self.mixture(layer)
        weights: list[torch.Tensor] = [linear.weight for linear in self.linears(layer).values()]
        return weights if mixture is None else [*weights, mixture.gate_up, mixture.down]

    def head_dim(self, layer: nn.Module) -> int:
        return cast(int, layer.get_submodule(self.attention).head_dim)

    def kv_heads(self, layer: nn.Module) -> int:
        """Return the number of KV groups of a layer of which some may go; 0 where its attention stays whole, or is gone."""
        key = self.linears(layer).get("key")
        return 0 if key is None else key.out_features // self.head_dim(layer)

    def cached(self, layer: nn.Module) -> list[nn.Linear]:
        """Return the projections that fill the cache of a layer: of keys and of values, which may be the same."""
        keys, values = (_submodule(layer, f"{self.attention}.{name}") for name in (self.key, self.value))
        return [module for module in (keys, values or keys) if isinstance(module, nn.Linear) and module.in_features]


# Norms of queries and keys span all heads: without some of them the scale of the others would change.
OLMO2: dict[str, Any] = {
    "prunes": ("mlp",),
    "layer_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "output_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
# Four norms a layer.
GEMMA_NORMS: dict[str, Any] = {
    "layer_norms": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "output_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
# Layers of two head sizes, the last of which attend to keys and values of others.
GEMMA4: dict[str, Any] = {
    **GEMMA_NORMS,
    "prunes": ("mlp",),
    "shared_states": "shared_kv_states",
    "own_heads": True,
    "bos": True,
}

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", heads_divide_hidden=True),
        Family("mistral"),
        Family("ministral3"),
        Family("qwen2"),
        Family("qwen3", head_norms=("q_norm", "k_norm")),
        Family("smollm3"),
        Family("granite"),
        Family(
            "phi3",
            query="qkv_proj.q_proj",
            key="qkv_proj.k_proj",
            value="qkv_proj.v_proj",
            gate="gate_up_proj.gate_proj",
            up="gate_up_proj.up_proj",
            longrope_by_heads=True,
        ),
        Family(
            "glm4",
            gate="gate_up_proj.gate_proj",
            up="gate_up_proj.up_proj",
            layer_norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "post_self_attn_layernorm",
                "post_mlp_layernorm",
            ),
            output_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
        ),
        Family("gemma", bos=True),
        Family(
            "gemma3_text",
            head_norms=("q_norm", "k_norm"),
            **GEMMA_NORMS,
            heads_divide_hidden=True,
            bos=True,
        ),
        Family("gemma4_text", **GEMMA4),
        Family("gemma4_unified_text", **GEMMA4),
        Family("internlm3", heads_divide_hidden=True),
        Family("seed_oss"),
        Family("hunyuan_v1_dense", head_norms=("query_layernorm", "key_layernorm")),
        Family("ernie4_5"),
        Family("cwm", heads_divide_hidden=True),
        Family("ministral"),
        Family("olmo", layer_norms=()),  # without parameters
        Family("cohere", layer_norms=("input_layernorm",)),  # attention and MLP side by side
        Family("cohere2", layer_norms=("input_layernorm",)),
        Family(
            "exaone4",
            head_norms=("q_norm", "k_norm"),
            layer_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        ),
        Family("olmo2", **OLMO2),
        Family("olmo3", **OLMO2),
        # Three of four layers are linear attention, and the queries of the fourth have gates.
        Family("qwen3_5_text", prunes=("mlp",), recurrent=True),
        Family(
            "lfm2",
            prunes=("mlp",),
            mlp="feed_forward",
            gate="w1",
            up="w3",
            down="w2",
            layer_norms=("operator_norm", "ffn_norm"),
            recurrent=True,
        ),
        Family(
            "falcon_h1",
            prunes=("mlp",),
            mlp="feed_forward",
            layer_norms=("input_layernorm", "pre_ff_layernorm"),
            recurrent=True,
            returns_tuple=True,
        ),
        # Most layers are Mamba; of a model with routed experts most weights are in those, and it is refused.
        Family(
            "granitemoehybrid",
            prunes=("mlp",),
            mlp="shared_mlp",
            gate="input_linear.gate_proj",
            up="input_linear.up_proj",
            down="output_linear",
            width="shared_intermediate_size",
            recurrent=True,
        ),
        Family("qwen3_moe", head_norms=("q_norm", "k_norm"), experts="experts", router="gate"),
        Family("mixtral", experts="experts", router="gate", expert_width="intermediate_size"),
    )
}


# What stands before the family's name in the model_type of a pruned checkpoint.
PRUNED_PREFIX = "tune_prune_"


def family_of(model_type: str) -> Family:
    """The row for transformers' `config.model_type`, also of a pruned checkpoint of the family. Raises UserError for a family
    that is not in the table; why a model of it cannot be pruned, `unsupported.reason` says."""
    model_type = model_type.removeprefix(PRUNED_PREFIX)
    if model_type not in FAMILIES:
        raise UserError(f"model type {model_type!r} is not supported; {did_you_mean(model_type, FAMILIES)}")
    return FAMILIES[model_type]


def decoder_layers(model: nn.Module, family: Family) -> nn.ModuleList:
    layers = model.get_submodule(family.layers)
    assert isinstance(layers, nn.ModuleList)
    return layers


def choose_experts_kernel(model: PreTrainedModel, family: Family) -> None:
    """Have the experts of `model` computed one after the other where the usual kernel, for all of them in one product, does not
    take them: it wants rows of multiples of 16 bytes, and no float64."""
    layers = decoder_layers(model, family) if family.experts else ()
    widths = [mixture.width for layer in layers if (mixture := family.mixture(layer)) is not None]
    if any(width * model.dtype.itemsize % 16 for width in widths) or (widths and model.dtype == torch.float64):
        model.config._experts_implementation = "eager"


def known_family(model: PreTrainedModel) -> Family | None:
    """The row of the model's family; None where there is none, or where the model does not look like it."""
    try:
        family = family_of(model.config.model_type)
        decoder_layers(model, family)
    except (UserError, AttributeError):
        return None
    return family


def _submodule(layer: nn.Module, path: str) -> nn.Module | None:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def check_structure(model: PreTrainedModel, family: Family) -> None:
    """Raise UserError unless every decoder layer of `model` looks as the row says: separate linear projections of
    matching shapes, whole KV groups, and no other parameters than the named norms. A pruned checkpoint (model_type
    tune_prune_...) may have layers of which the attention or the MLP is gone, but for the bias it added."""
    try:
        layers = decoder_layers(model, family)
    except AttributeError:
        raise UserError(
            f"this {family.model_type} model has no {family.layers}, as that family has; give the original model"
        ) from None
    if getattr(model.config, "enable_moe_block", False):
        raise UserError(
            f"this {family.model_type} model has experts beside its MLPs (enable_moe_block), and nobody has tested what is left "
            "without parts of them; choose one without experts"
        )
    hidden = model.config.hidden_size
    pruned = model.config.model_type.startswith(PRUNED_PREFIX)
    expected = set(family.projections().values()) | set(family.layer_norms)
    expected |= {f"{family.attention}.{norm}" for norm in family.head_norms}
    if family.experts:
        expected |= {f"{family.mlp}.{part}" for part in (family.experts, family.router)}
    for index, layer in enumerate(layers):
        where = f"layer {index} of this {family.model_type} model"
        named = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        if "attention" not in family.prunes:  # what else there is stays as it is
            if any(name.endswith(".experts") for name, _ in layer.named_modules()):
                raise UserError(
                    f"{where} has experts beside the MLP that can be pruned, and most of its weights are in them; choose a model "
                    "of the family without (num_local_experts 0 in config.json)"
                )
            named = {name for name in named if name.startswith(f"{family.mlp}.")}
        unknown = named - expected
        if unknown:
            raise UserError(
                f"{where} has {sorted(unknown)[0]!r}, which the {family.model_type} row of models/families.py does not "
                "name (other mixtures of experts are not supported); choose another model"
            )
        parts = family.linears(layer)
        mixture = family.mixture(layer)
        blocks = (block for block in family.prunes if block != "mlp" or mixture is None)
        for roles in map(ROLES.__getitem__, blocks):
            if pruned and not set(roles) & set(parts):
                continue
            for role in roles:
                path = family.projections()[role]
                module = _submodule(layer, path)
                if module is None:
                    raise UserError(f"{where} has no {path}, as that family has; give the original model")
                if not isinstance(module, nn.Linear):
                    raise UserError(
                        f"{where}: {path} is a {type(module).__name__}, and only linear ones can be pruned; give the original model"
                    )
        if "query" in parts:
            _check_head_norms(layer, family, where)
        mlp_fits = _mlp_fits(parts, hidden) if mixture is None else mixture.fits(hidden)
        if not (_attention_fits(layer, family, hidden) and mlp_fits):
            raise UserError(
                f"{where}: the shapes of its projections differ, as after pruning by another tool; give the original model"
            )


def _check_head_norms(layer: nn.Module, family: Family, where: str) -> None:
    head_dim = family.head_dim(layer)
    for norm in family.head_norms:
        size = sum(p.numel() for p in layer.get_submodule(f"{family.attention}.{norm}").parameters())
        if size != head_dim:
            raise UserError(
                f"{where}: {family.attention}.{norm} has {size} parameters, not the {head_dim} of one head, and norms over "
                "several heads cannot be pruned; choose another model"
            )


def _attention_fits(layer: nn.Module, family: Family, hidden: int) -> bool:
    """Say whether q, k, v and o are of whole KV groups on the hidden size; true where the layer has no attention."""
    parts = family.linears(layer)
    if "query" not in parts:
        return True
    head_dim = family.head_dim(layer)
    q, k, v, o = (parts[role] for role in ATTENTION)
    return (
        k.out_features == v.out_features
        and k.out_features % head_dim == 0
        and k.out_features > 0
        and q.out_features % k.out_features == 0
        and o.in_features == q.out_features
        and {q.in_features, k.in_features, v.in_features, o.out_features} == {hidden}
    )


def _mlp_fits(parts: dict[str, nn.Linear], hidden: int) -> bool:
    """Say whether gate, up and down have one width on the hidden size; true where the layer has no MLP."""
    if "gate" not in parts:
        return True
    gate, up, down = (parts[role] for role in MLP)
    return gate.out_features == up.out_features == down.in_features and {
        gate.in_features,
        up.in_features,
        down.out_features,
    } == {hidden}
