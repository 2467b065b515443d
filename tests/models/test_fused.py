"""Fused projections: apart in memory, together in files, and the same model in both."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import VARIANTS, attends, build_tiny, whole
from tests.pruning.test_surgery import KEEP_SETS, plan_of, tokens
from tune_prune.checkpoint import save
from tune_prune.models import fused
from tune_prune.models.families import FAMILIES
from tune_prune.models.runner.layer_weights import LazyWeights
from tune_prune.pruning.surgery import prune

FUSED = [variant for variant, (model_type, _) in VARIANTS.items() if FAMILIES[model_type].fused()]


@torch.no_grad()
@pytest.mark.parametrize("variant", FUSED)
def test_the_model_with_its_projections_apart_is_that_of_transformers(variant):
    apart = build_tiny(variant)
    stock = AutoModelForCausalLM.from_config(apart.config, dtype=torch.float64).eval()
    stock.load_state_dict(whole(apart).state_dict(), strict=True)
    expected = stock(tokens()).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(apart(tokens()).logits, expected, rtol=0, atol=1e-12)
    layer = stock.model.layers[2]
    family = FAMILIES[apart.config.model_type]
    matrix = f"{family.mlp}.{family.gate.partition('.')[0]}"
    gate, up = layer.get_submodule(matrix).weight.chunk(2)
    mlp = apart.model.layers[2].get_submodule(matrix)
    assert torch.equal(mlp.gate_proj.weight, gate) and torch.equal(mlp.up_proj.weight, up)
    if family.query != "q_proj":
        qkv = apart.model.layers[2].self_attn.qkv_proj
        for part, rows in zip((qkv.q_proj, qkv.k_proj, qkv.v_proj), (48, 24, 24), strict=True):
            assert part.weight.shape[0] == part.out_features == rows
        assert torch.equal(torch.cat([part.weight for part in qkv.children()]), layer.self_attn.qkv_proj.weight)


@pytest.mark.parametrize("variant", FUSED)
def test_parts_are_rows_of_the_weights_in_files_and_keep_none_of_the_others_in_memory(variant):
    apart = build_tiny(variant)
    stock = whole(apart)
    family, stored = FAMILIES[stock.config.model_type], dict(stock.named_parameters(remove_duplicate=False))
    found = fused.parts(LazyWeights(stored, stored.__getitem__), stock, fused.take_apart(stock, family))
    expected = dict(apart.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], p) for name, p in expected.items())
    parts = [name for name in found if any(f"{matrix}." in name for matrix in family.fused())]
    assert len(parts) == 4 * sum(map(len, family.fused().values()))
    assert all(found[name].untyped_storage().nbytes() == found[name].nbytes for name in parts)
    assert fused.take_apart(stock, family) == {}  # it is apart


@torch.no_grad()
@pytest.mark.parametrize("variant", [variant for variant in FUSED if variant.startswith("phi3")])
def test_the_choice_of_the_attention_kernel_reaches_layers_of_other_sizes(variant):
    model = build_tiny(variant)
    pruned = prune(model, FAMILIES["phi3"], plan_of(model, FAMILIES["phi3"], *KEEP_SETS["different in every layer"]))
    by_torch = pruned(tokens()).logits
    heads = [layer.self_attn.config.num_attention_heads for layer in pruned.model.layers]
    assert heads == [4, 2, 6, 2] and model.model.layers[1].self_attn.config is model.config
    pruned.set_attn_implementation("eager")
    assert {layer.self_attn.config._attn_implementation for layer in pruned.model.layers} == {"eager"}
    # eager attention takes its softmax in float32
    torch.testing.assert_close(pruned(tokens()).logits, by_torch, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("variant", [*filter(attends, FUSED)])
def test_a_plain_config_says_in_the_names_of_transformers_4_which_part_of_a_head_is_rotated(variant, tmp_path):
    model = whole(build_tiny(variant))
    model.save_pretrained(tmp_path)
    save._add_older_names(tmp_path / "config.json")
    rope = model.config.rope_parameters
    older = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert older["partial_rotary_factor"] == rope["partial_rotary_factor"] and older["rope_theta"] == rope["rope_theta"]
    assert (older["rope_scaling"] or {}).get("short_factor") == rope.get("short_factor")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits, rtol=0, atol=1e-12)
