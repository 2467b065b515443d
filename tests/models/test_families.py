"""Every row of the family table against a real model of that type, the costs against METHODS' formulas, and refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_random_model import config_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import MIXTURES, SIZES, VARIANTS, attends
from tune_prune.core.errors import UserError
from tune_prune.models import fused, unsupported
from tune_prune.models.families import FAMILIES, Family, check_structure, decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.loading import config_geometry
from tune_prune.models.pruned.configuration_tune_prune import CONFIGS
from tune_prune.models.pruned.modeling_tune_prune import DECODERS, LANGUAGE_MODELS
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.selection import budget
from tune_prune.pruning.surgery import prune

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text and not text.endswith(".") and ". " not in text
    return text


def from_config(model_type: str, **fields: object) -> nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_row_describes_a_real_model_of_its_type(model_type):
    without_experts = {"num_local_experts": 0, "mamba_n_heads": 4} if model_type == "granitemoehybrid" else {}
    model = from_config(model_type, **TINY, **HEADS, head_dim=4, pad_token_id=0, **without_experts)
    family = family_of(model_type)
    fused.take_apart(model, family)
    assert family is FAMILIES[model_type] and model.config.model_type == model_type
    check_structure(model, family)
    for layer in decoder_layers(model, family):
        named = {path for path, _ in layer.named_modules()}
        norms = set(family.layer_norms) | {f"{family.attention}.{norm}" for norm in family.head_norms}
        paths = set(family.projections().values())
        if family.experts:
            paths = {path for path in paths if not path.startswith(f"{family.mlp}.")}
            paths |= {f"{family.mlp}.{family.experts}", f"{family.mlp}.{family.router}"}
        assert paths | norms <= named
        parameters = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        if "attention" not in family.prunes:
            parameters = {name for name in parameters if name.startswith(f"{family.mlp}.")} | norms
        assert parameters == paths | norms  # nothing else has weights


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_tested_with_its_switches_off_their_defaults(model_type):
    """A row that fits the default config alone may be wrong for every real model of the family."""
    usual = AutoConfig.for_model(model_type).to_dict() | SIZES
    usual["num_experts"] = usual.get("num_local_experts")
    usual |= {"global_head_dim": 512, "num_global_key_value_heads": None}  # of Gemma 4, which keeps them for each layer
    every = (VARIANTS | MIXTURES).values()
    switched = [(name, value) for kind, fields in every if kind == model_type for name, value in fields.items()]
    assert switched and all(usual[name] != value for name, value in switched), switched


def test_geometry_from_the_config_alone_is_that_of_the_real_model(tiny, variant):
    model = tiny(variant)
    family, from_meta = config_geometry(model.config)
    assert family is FAMILIES[model.config.model_type]
    assert from_meta == read_geometry(model, family)
    assert from_meta.total_params == sum(p.numel() for p in set(model.parameters()))


def test_costs_follow_the_formulas(tiny, variant):
    model = tiny(variant)
    family = FAMILIES[model.config.model_type]
    geometry, part = read_geometry(model, family), family.linears(model.model.layers[1])
    hidden, d, g = model.config.hidden_size, 6, 2
    channel = 3 * hidden + (2 if part["gate"].bias is not None else 0)
    if not attends(variant):
        assert geometry.hidden_size == hidden and geometry.channel_cost == (channel,) * 4
        assert geometry.kv_heads == geometry.group_cost == geometry.last_group_extra == (0,) * 4
        widths = (40, 40, 80, 80) if variant == "gemma4_text" else (40,) * 4
        assert geometry.mlp_width == widths and geometry.cache_layers == ()
        assert geometry.prunable_params == sum(widths) * channel
        layers = zip(model.model.layers, widths, strict=True)
        beside = [sum(p.numel() for p in layer.parameters()) - width * channel for layer, width in layers]
        down = family.linears(model.model.layers[1])["down"].bias
        assert geometry.whole_attention == tuple(n - (0 if down is None else hidden) for n in beside)
        return
    group = hidden * d * (2 * g + 2)
    if part["query"].bias is not None:
        group += d * (g + 2)  # q, k and v
    assert (geometry.hidden_size, geometry.head_dim, geometry.queries_per_kv, geometry.num_layers) == (hidden, d, g, 4)
    assert geometry.group_cost == (group,) * 4 and geometry.channel_cost == (channel,) * 4
    assert geometry.kv_heads == (4,) * 4 and geometry.mlp_width == (40,) * 4
    assert geometry.last_group_extra == (len(family.head_norms) * d,) * 4
    both_kinds = len(set(getattr(model.config, "layer_types", None) or ())) == 2
    stay = (0, 2) if both_kinds else (0,)  # the first layer of each attention type
    assert geometry.cache_layers == stay
    everything = 4 * (4 * group + 40 * channel + geometry.last_group_extra[0])
    assert geometry.prunable_params == everything - len(stay) * (group + geometry.last_group_extra[0])


@pytest.mark.parametrize(
    ("name", "total", "group", "channel"),
    [
        ("llama-3-8b", 8_030_261_248, 5_242_880, 12_288),
        ("qwen2.5-7b", 7_615_616_512, 7_340_032 + 1_152, 10_752),
        ("mistral-7b", 7_248_023_552, 5_242_880, 12_288),
    ],
)
def test_published_models_have_their_published_sizes(name, total, group, channel):
    _, geometry = config_geometry(config_of(name))
    assert geometry.total_params == total
    assert set(geometry.group_cost) == {group} and set(geometry.channel_cost) == {channel}
    if name == "llama-3-8b":
        assert budget(geometry, 0.2) == 1_606_052_249
        share = budget(geometry, 0.2) / (32 * (8 * group + 14336 * channel))
        assert share == pytest.approx(0.230, abs=5e-4)


def test_gemma_4_e2b_has_its_published_size():
    """2.3 billion parameters beside the embeddings that its layers are given (huggingface.co/google/gemma-4-E2B)."""
    config = AutoConfig.for_model(
        "gemma4_text", hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_key_value_heads=1,
        num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    )  # fmt: skip
    _, geometry = config_geometry(config)
    assert geometry.total_params - 262_144 * 35 * 256 == 2_279_759_104
    assert geometry.mlp_width == (6144,) * 15 + (12_288,) * 20


# What is said of the families that transformers has and the table has not, from meta-device models with two layers.
FITTING = {
    "helium": "Family('helium')",
    "glm": "Family('glm', gate='gate_up_proj.gate_proj', up='gate_up_proj.up_proj')",
}
NOT_FITTING = {  # one of each reason
    "phimoe": "layer 0 of this phimoe model has",
    "falcon": "its MLPs have no gate, and what is pruned is rows of gate and up with columns of down",
    "olmoe": "layer 0 of this olmoe model has 'mlp.",
    "starcoder2": "its MLPs have no gate, and what is pruned is rows of gate and up with columns of down",
    "arcee": "its MLPs have no gate, and what is pruned is rows of gate and up with columns of down",
    "nemotron_h": "its MLPs have no gate, and what is pruned is rows of gate and up with columns of down",
    "mamba": "this mamba model has no model.layers",
}


def refused(model_type: str, **fields: Any) -> str:
    config = AutoConfig.for_model(model_type, **{"num_hidden_layers": 2} | fields)
    with pytest.raises(UserError) as error:
        config_geometry(config)
    return one_sentence(error)


@pytest.mark.parametrize(("model_type", "row"), FITTING.items())
def test_a_family_that_fits_is_refused_with_its_row(model_type, row, monkeypatch):
    """The row is right: pruned by it, a model equals the dense one with the groups' columns at zero."""
    text = refused(model_type)
    assert f"model type {model_type!r} is not supported yet, but its layers fit: add {row} to FAMILIES" in text
    assert str(Path("models") / "families.py") in text and "CONTRIBUTING.md" in text
    monkeypatch.setitem(FAMILIES, model_type, family := eval(row, {"Family": Family}))
    torch.manual_seed(0)
    model = from_config(model_type, **TINY, **HEADS, head_dim=4, pad_token_id=0).double().eval().requires_grad_(False)
    fused.take_apart(model, family)
    geometry = read_geometry(model, family)
    groups, channels = ((0,), (0, 1)), (tuple(range(0, 24, 2)), tuple(range(5)))
    small = prune(model, family, PruningPlan(groups, channels, 0, 0, geometry.total_params))
    for layer, kept, wide in zip(decoder_layers(model, family), groups, channels, strict=True):
        part = family.linears(layer)
        group = part["output"].in_features // 2
        for index in {0, 1} - set(kept):
            part["output"].weight[:, index * group : (index + 1) * group] = 0
        part["down"].weight[:, [index for index in range(24) if index not in wide]] = 0
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(small(tokens).logits, model(tokens).logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("model_type", "says"), NOT_FITTING.items())
def test_a_family_that_does_not_fit_is_refused_with_the_reason(model_type, says):
    text = refused(model_type)
    assert f"model type {model_type!r} is not supported: {says}" in text
    assert "did you mean" not in text
    assert text.endswith(f"; choose a model of a supported family: {', '.join(FAMILIES)}")


def test_a_family_whose_mlps_alone_fit_is_refused_with_that_row():
    text = refused("olmo_hybrid")
    assert "layer 0 of this olmo_hybrid model has 'linear_attn" in text
    assert "; its MLPs alone fit: add Family('olmo_hybrid', prunes=('mlp',)) to FAMILIES in " in text


def test_a_gemma_4_with_experts_is_refused():
    mixture = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    text = refused("gemma4_text", **TINY, **mixture)
    assert text.startswith("this gemma4_text model has experts beside its MLPs (enable_moe_block), ")


def test_what_does_not_run_on_torchs_attention_is_refused_though_its_layers_fit():
    text = refused("gemma2")
    assert "model type 'gemma2' is not supported: its attention does not run on torch's kernel (sdpa)" in text
    assert "choose a model of a supported family: llama, " in text


def test_experts_beside_the_mlp_are_refused():
    """Of Granite 4.0 H Tiny the shared MLPs are 3% of the model."""
    text = refused("granitemoehybrid", num_local_experts=4)
    assert "layer 0 of this granitemoehybrid model has experts beside the MLP that can be pruned" in text
    assert text.endswith("; choose a model of the family without (num_local_experts 0 in config.json)")


@pytest.mark.parametrize("variant", [*filter(attends, VARIANTS)])
def test_the_row_of_every_family_is_found_in_its_model(variant, tiny):
    model = tiny(variant)
    row, family = unsupported.likely_row(model), FAMILIES[model.config.model_type]
    assert set(row.layer_norms) == set(family.layer_norms)
    unseen = {"heads_divide_hidden": False, "longrope_by_heads": False, "output_norms": (), "bos": False}
    assert row == replace(family, **unseen, layer_norms=row.layer_norms)
    check_structure(model, row)


def test_head_norms_that_the_row_does_not_name_are_refused(tiny):
    with pytest.raises(UserError, match=r"has 'self_attn\.[qk]_norm'"):
        check_structure(tiny("qwen3"), replace(FAMILIES["qwen3"], head_norms=()))


def part_of_a_head(layer: nn.Module) -> None:
    layer.self_attn.k_proj = nn.Linear(32, 16, bias=False)  # 2 2/3 heads of 6, and still a divisor of the queries' 48
    layer.self_attn.v_proj = nn.Linear(32, 16, bias=False)


def narrow_up(layer: nn.Module) -> None:
    layer.mlp.up_proj = nn.Linear(32, 39, bias=False)


@pytest.mark.parametrize("damage", [part_of_a_head, narrow_up])
def test_a_layer_whose_shapes_do_not_belong_together_is_refused(tiny, damage):
    model = tiny("llama")
    damage(model.model.layers[2])
    with pytest.raises(UserError, match="layer 2 of this llama model: the shapes") as error:
        check_structure(model, FAMILIES["llama"])
    one_sentence(error)


def test_a_projection_that_is_missing_or_no_plain_linear_layer_is_refused(tiny):
    model = tiny("llama")
    model.model.layers[1].mlp.down_proj = nn.Bilinear(40, 1, 32, bias=False)
    with pytest.raises(UserError, match=r"layer 1 .*mlp\.down_proj is a Bilinear") as error:
        check_structure(model, FAMILIES["llama"])
    one_sentence(error)
    model = tiny("llama")
    del model.model.layers[3].mlp.up_proj
    with pytest.raises(UserError, match=r"layer 3 .* has no mlp\.up_proj"):
        check_structure(model, FAMILIES["llama"])


class BiasOnly(nn.Module):
    """The bias that a pruned checkpoint keeps of a projection whose inputs are all gone."""

    def __init__(self, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("bias", bias)


def without(layer: nn.Module, block: str, projection: str) -> None:
    """Leave of a block no more than the bias that it adds, as pruned checkpoints do."""
    old, rest = layer.get_submodule(block), nn.Module()
    rest.register_module(projection, BiasOnly(old.get_submodule(projection).bias))
    setattr(layer, block, rest)


def pruned(model: nn.Module) -> nn.Module:
    """`model` as a pruned checkpoint: layer 1 without attention, layer 2 without MLP, layer 3 with neither."""
    layers = model.model.layers
    for index, block, projection in (
        (1, "self_attn", "o_proj"),
        (2, "mlp", "down_proj"),
        (3, "self_attn", "o_proj"),
        (3, "mlp", "down_proj"),
    ):
        without(layers[index], block, projection)
    return model


@pytest.mark.parametrize("variant", [*filter(attends, VARIANTS)])
def test_a_pruned_checkpoint_may_have_layers_without_attention_or_mlp(tiny, variant):
    family = FAMILIES[tiny(variant).config.model_type]
    dense, model = read_geometry(tiny(variant), family), pruned(tiny(variant))
    with pytest.raises(UserError, match=r"layer 1 of this .* model has no self_attn\.[\w.]*q_proj"):
        read_geometry(model, family)  # a dense model has all of its parts
    model.config.model_type = f"tune_prune_{family.model_type}"
    assert family_of(model.config.model_type) is family
    geometry = read_geometry(model, family)
    assert geometry.total_params == sum(p.numel() for p in model.parameters())
    assert geometry.kv_heads == (4, 0, 4, 0) and geometry.mlp_width == (40, 40, 0, 0)
    group, channel = dense.group_cost[0], dense.channel_cost[0]
    assert geometry.group_cost == (group, 0, group, 0) and geometry.channel_cost == (channel, channel, 0, 0)
    extra = dense.last_group_extra[0]
    assert geometry.last_group_extra == (extra, 0, extra, 0)
    assert (geometry.head_dim, geometry.queries_per_kv, geometry.uniform_kv_heads) == (6, 2, ())
    stays = sum(group + extra for layer in geometry.cache_layers if geometry.kv_heads[layer])
    assert geometry.prunable_params == 2 * (4 * group + extra) + 80 * channel - stays
    gone = 2 * (4 * group + extra) + 80 * channel  # what the dense model has more
    assert dense.total_params - geometry.total_params == gone


def test_a_pruned_checkpoint_with_half_an_attention_is_refused(tiny):
    model = pruned(tiny("llama"))
    model.config.model_type = "tune_prune_llama"
    del model.model.layers[0].self_attn.k_proj
    with pytest.raises(UserError, match=r"layer 0 of this llama model has no self_attn\.k_proj"):
        check_structure(model, FAMILIES["llama"])


def test_the_pruned_models_of_every_family_have_classes():
    """By a name of their own, by which a checkpoint's config.json asks for them."""
    assert set(CONFIGS) == set(FAMILIES)
    for classes in (CONFIGS, DECODERS, LANGUAGE_MODELS):
        assert all(getattr(sys.modules[own.__module__], own.__name__) is own for own in classes.values())
