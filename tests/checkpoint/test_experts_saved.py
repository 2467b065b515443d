"""Checkpoints of pruned mixtures of experts: their files, which hold each expert's matrices, and what they give when loaded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.checkpoints import FLOAT32_TOLERANCE, read_alone
from tests.conftest import build_tiny
from tests.gguf_reading import File, LlamaCpp
from tests.models.conftest import tokenizer
from tests.pruning.test_experts import FAMILY, family_of, masked, plan_of, tokens
from tests.pruning.test_selection import cost_of
from tune_prune.checkpoint import layers, quantisation
from tune_prune.checkpoint.gguf.architecture import check_config, choose_architecture
from tune_prune.checkpoint.gguf.gguf_file import write_gguf
from tune_prune.checkpoint.manifest import Provenance, check_checkpoint
from tune_prune.checkpoint.save import save_checkpoint
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.models.catalog import resolve
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.models.loading import load_config, load_model, map_model
from tune_prune.models.registration import MODEL_FILE
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import cut
from tune_prune.trial.recipe import Recipe

ABOUT = Provenance(config=PruningConfig("random", 16, 8, 0.2))


def alike(geometry: Geometry) -> PruningPlan:
    """Two KV groups and five experts of every layer."""
    groups, experts = ((1, 3), (0, 1), (0, 3), (2, 3)), tuple(tuple(range(start, start + 5)) for start in (0, 1, 2, 1))
    return counted(PruningPlan(groups, experts, 0, 0, geometry.total_params), geometry)


def counted(plan: PruningPlan, geometry: Geometry) -> PruningPlan:
    """The plan with the number of parameters that it removes."""
    removed = cost_of(plan, geometry)
    return PruningPlan(plan.kept_groups, plan.kept_channels, removed, removed, plan.total_params)


@pytest.fixture
def folder(mixture, tmp_path) -> Path:
    """A folder of the mixture as transformers writes it."""
    build_tiny(mixture, torch.float32).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_come_from_the_files_as_transformers_reads_them(folder, mixture):
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    up = {"mixtral": "block_sparse_moe.experts.4.w3"}.get(mixture, "mlp.experts.4.up_proj")
    assert f"model.layers.0.{up}.weight" in load_file(folder / "model.safetensors")
    loaded, mapped = (make(resolve(str(folder)), torch.float32, "cpu") for make in (load_model, map_model))
    for name, weight in build_tiny(mixture, torch.float32).named_parameters():
        assert torch.equal(theirs.get_parameter(name), weight)
        assert torch.equal(loaded.model.get_parameter(name), weight)
        assert torch.equal(mapped.residency.weights[name], weight)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.{up}.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"{re.escape(up)}\.weight is missing"):
        load_model(resolve(str(folder)), torch.float32, "cpu")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("make_plan", [plan_of, alike])
def test_what_is_saved_is_what_transformers_writes_and_gives_the_masked_logits(folder, mixture, make_plan, tmp_path):
    """For weights in memory and for those that stay in their files; in many files, and byte for byte in one."""
    if make_plan is alike and mixture == "qwen3_moe-switched":
        pytest.skip("a plain MLP has no number of experts")
    loaded, mapped = (make(resolve(str(folder)), torch.float32, "cpu") for make in (load_model, map_model))
    plan = counted(make_plan(loaded.geometry), loaded.geometry)
    family = loaded.family
    pruned, dropped = layers.compact(cut(loaded.model, family, plan), family)
    assert not dropped
    saved = layers.as_saved(pruned, loaded.model, family, loaded.geometry, "hf").in_memory()
    for dense, shard_bytes in ((loaded, 9000), (mapped, 10**9)):
        saved.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
        output = tmp_path / f"{shard_bytes}"
        manifest = save_checkpoint(dense, Recipe(plan), ABOUT, output, shard_bytes=shard_bytes)
        if shard_bytes == 10**9:
            ours, theirs = ((path / "model.safetensors").read_bytes() for path in (output, tmp_path / "theirs"))
            assert ours == theirs
        else:  # transformers may deal the experts out to other files
            ours, theirs = (tensors_in(path) for path in (output, tmp_path / "theirs"))
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        shutil.rmtree(tmp_path / "theirs")
        again = AutoModelForCausalLM.from_pretrained(output)
        with torch.no_grad():
            expected = masked(build_tiny(mixture, torch.float32), plan)(input_ids=tokens(), use_cache=False).logits
            assert (again(input_ids=tokens(), use_cache=False).logits - expected).abs().max() <= FLOAT32_TOLERANCE
        assert manifest.params == sum(p.numel() for p in again.parameters()) == plan.total_params - plan.removed_params
        source = resolve(str(output))
        check_checkpoint(output, manifest, load_config(source), source)
        config = json.loads((output / "config.json").read_text())
        if make_plan is alike:
            assert config["model_type"] == family.model_type and config["num_local_experts"] == 5
            assert config.get("num_experts") == (5 if family is FAMILY else None)
        else:
            assert config["model_type"] == f"tune_prune_{family.model_type}" and "model_file" not in config
            own = {"num_attention_heads": 4, "num_key_value_heads": 2}
            assert config["per_layer_config"]["2"] == own | {"num_local_experts": 3}
            assert (output / MODEL_FILE).exists()


def test_multiply_adds_are_those_of_the_experts_that_a_token_takes(tiny):
    model = tiny("qwen3_moe")
    dense, small = layers.sizes(model, FAMILY), cut(model, FAMILY, alike(read_geometry(model, FAMILY))).in_memory()
    attention, expert = 32 * 6 * (8 + 4 + 4 + 8), 3 * 32 * 16
    assert dense.macs_per_token == 4 * (attention + 3 * expert + 7 * 32) + 64 * 32
    assert layers.sizes(small, FAMILY).macs_per_token == 4 * (attention // 2 + 3 * expert + 5 * 32) + 64 * 32


def test_what_cannot_hold_a_mixture_says_so(tiny):
    model = tiny("qwen3_moe", torch.float32)
    geometry = read_geometry(model, FAMILY)
    for fmt in ("hf-padded", "vllm"):
        with pytest.raises(UserError, match=f"format {fmt} is for layers with the same number of experts"):
            layers.as_saved(cut(model, FAMILY, plan_of(geometry)), model, FAMILY, geometry, fmt)
        small = layers.as_saved(cut(model, FAMILY, alike(geometry)), model, FAMILY, geometry, fmt)
        assert type(small.model) is type(model)
    with pytest.raises(UserError, match="norm_topk_prob is false, and its graph divides the weights"):
        check_config(model.config)
    normed = build_tiny("qwen3_moe", norm_topk_prob=True)
    with pytest.raises(
        UserError, match="architecture qwen3moe has one width for all layers; search with --shape uniform"
    ):
        choose_architecture(cut(normed, FAMILY, plan_of(geometry)).in_memory(), FAMILY)


@torch.no_grad()
def test_llama_cpp_predicts_as_the_model(tmp_path):
    """A prompt at once, then token by token, of a model with fewer experts than the dense one in every layer."""
    model = build_tiny("qwen3_moe", torch.float32, vocab_size=272, norm_topk_prob=True)
    small = cut(model, FAMILY, alike(read_geometry(model, FAMILY)))
    words = tokenizer(tmp_path / "words", pre_tokenizers.ByteLevel(add_prefix_space=False))
    write_gguf(small, FAMILY, words, tmp_path / "model.gguf", torch.float32)
    file, experts = File(tmp_path / "model.gguf"), small.in_memory().model.layers[1].mlp.experts
    assert file.architecture == "qwen3moe"
    assert (file.meta["expert_count"], file.meta["expert_used_count"], file.meta["expert_feed_forward_length"]) == (
        5,
        3,
        16,
    )
    up = experts.gate_up_proj[:, 16:]
    assert torch.equal(torch.from_numpy(file.tensors["blk.1.ffn_up_exps.weight"]), up)
    ids, then, times = torch.randint(262, (1, 24), generator=torch.Generator().manual_seed(2)), 5, 4
    whole = torch.cat([ids, torch.full((1, times), then)], dim=1)
    expected = torch.log_softmax(small.model(whole).logits[0, -times - 1 :], dim=-1).numpy()
    found = LlamaCpp(tmp_path / "model.gguf").log_probabilities(ids[0].tolist(), then, times, 272)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.slow
def test_they_load_in_a_process_that_has_nothing_else(tmp_path):
    """With their own class files, or none where a plain config states them; caches, left padding, generation, saved again."""
    cases = {}
    for mixture, name, make_plan in (
        ("qwen3_moe", "uniform", alike),
        ("qwen3_moe", "both of a middle layer", plan_of),
        ("qwen3_moe-switched", "both of a middle layer", plan_of),
        ("mixtral", "uniform", alike),
        ("mixtral", "both of a middle layer", plan_of),
    ):
        model, case = build_tiny(mixture, torch.float32), tmp_path / f"{mixture}-{name}"
        family = family_of(model)
        geometry = read_geometry(model, family)
        plan = make_plan(geometry)
        layers.as_saved(cut(model, family, plan), model, family, geometry, "hf").in_memory().save_pretrained(case)
        truth, ids = masked(model, plan), tokens()
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        with torch.no_grad():
            padded = truth(input_ids=ids, attention_mask=mask, use_cache=False).logits
            expected = {"ids": ids, "logits": truth(input_ids=ids, use_cache=False).logits, "mask": mask}
        save_file(expected | {"masked_logits": padded}, case / "case.safetensors")
        cases[f"{mixture}/{name}"] = Written(case)
    for name, found in read_alone(cases, tmp_path / "modules", "remote").items():  # type: ignore[arg-type]
        measures = ("sdpa", "eager", "left padding", "dynamic cache", "static cache", "decoder", "saved again")
        assert all(found[measure] <= FLOAT32_TOLERANCE for measure in measures), (name, found)
        assert found["keys"] == [] and found["generated"]["dynamic"] == found["generated"]["static"], name


class Written:
    """A checkpoint's folder, as `read_alone` asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def test_experts_are_neither_quantised_nor_filled_up():
    geometry = read_geometry(build_tiny("qwen3_moe"), FAMILY)
    with pytest.raises(UserError, match="--quantize int8 rounds the matrices of single projections, and the experts"):
        quantisation.check("int8", "hf", "free", geometry)
    for fmt in ("vllm", "hf-padded"):
        layers.check_experts(fmt, "uniform", geometry)
        with pytest.raises(UserError, match=f"format {fmt} is for layers with the same number of experts"):
            layers.check_experts(fmt, "free", geometry)
