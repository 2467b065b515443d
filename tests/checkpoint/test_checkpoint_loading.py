"""Checkpoints of pruned models load as any other: with their own class files in a process that has nothing else, or with
`import tune_prune`; and what they give equals the dense model in which the removed columns are zero (test_surgery)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import (
    FLOAT32_TOLERANCE,
    SHAPES,
    STOCK,
    THOROUGH,
    Case,
    as_saved,
    read_alone,
    write_cases,
)
from tests.conftest import build_tiny, rounds_more
from tests.pruning.test_surgery import plan_of, tokens, zeroed
from tune_prune.models.families import FAMILIES
from tune_prune.models.pruned.modeling_tune_prune import DECODERS, LANGUAGE_MODELS, RemovedBlock
from tune_prune.models.registration import MODEL_FILE

HOW = [pytest.param("remote", marks=pytest.mark.slow), "registered"]
NAMES = ("different in every layer", "attention of a middle layer", "both of a middle layer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    return write_cases(folder)


@pytest.fixture(scope="module")
def remote(cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Findings of a process that trusts the checkpoints' code and never imports tune_prune."""
    return read_alone(cases, folder / "modules", "remote")


@pytest.fixture(scope="module")
def registered(cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    """Findings of a process that trusts no code, before `import tune_prune` and after it."""
    return read_alone(cases, folder / "no_modules", "registered")


def tolerance(variant: str) -> float:
    """Of logits in float32."""
    return (5 if rounds_more(variant) else 1) * FLOAT32_TOLERANCE


def of(variant: str, found: dict[str, Any], measure: str) -> Iterator[tuple[str, Any]]:
    """Name and finding of the cases of a variant for which `measure` was taken."""
    chosen = [(name, one[measure]) for name, one in found.items() if name.startswith(f"{variant}/") and measure in one]
    assert len(chosen) >= len(THOROUGH)
    yield from chosen


@pytest.mark.parametrize("how", HOW)
def test_reloaded_logits_are_those_of_the_masked_dense_model(variant, how, request):
    found = request.getfixturevalue(how)
    for measure in ("sdpa", "eager", "left padding", "decoder"):
        for name, error in of(variant, found, measure):
            assert error <= tolerance(variant), f"{name}: {measure}"
    for name, kernels in of(variant, found, "kernels"):
        assert kernels == ["sdpa", "eager"], name


ROTARY = {  # Gemma 3 has two, which its variants scale
    "llama": "yarn",
    "mistral": "dynamic",
    "ministral3": "yarn",
    "qwen2": "linear",
    "qwen3": "llama3",
    "smollm3": "longrope",
    "granite": "yarn",
    "phi3": "longrope",
    "glm4": "linear",
    "hunyuan_v1_dense": "dynamic",
    "cwm": "llama3",
    "ministral": "yarn",
    "exaone4": "llama3",
}


@pytest.mark.parametrize(("family", "kind"), ROTARY.items())
def test_scaled_rotary_frequencies_come_back(family, kind, tmp_path):
    """Each kind reads the config in its own way when a model is loaded; dynamic ones also where a text is longer than the limit."""
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    if family == "ministral3":
        more = {"llama_4_scaling_beta": 0.1}
    if kind == "longrope":
        more = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0]}
    limit = 16
    original = {} if kind in ("dynamic", "linear") else {"original_max_position_embeddings": limit}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **original, **more}
    positions = limit if kind == "dynamic" else 4 * limit
    sizes: dict[str, Any] = {"rope_parameters": rope, "max_position_embeddings": positions}
    if (
        family == "phi3"
    ):  # its config wants the hidden size to be the heads times their size, and the limit beside the rest
        sizes |= {"hidden_size": 48, "original_max_position_embeddings": limit}
    model = build_tiny(family, torch.float32, **sizes)
    plan = plan_of(model, FAMILIES[family], *SHAPES["different in every layer"])
    as_saved(model, plan).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model_type == f"tune_prune_{family}"
    truth = zeroed(model, plan)
    for length in (limit // 2, 2 * limit):
        ids = torch.arange(3, 3 + length)[None] % model.config.vocab_size
        with torch.no_grad():
            found, expected = again(ids, use_cache=False).logits, truth(ids, use_cache=False).logits
        assert (found - expected).abs().max() < FLOAT32_TOLERANCE


def caches(variant: str) -> int:
    """How many kinds of caches the family's own class takes: with a dynamic one also a static one, or not."""
    return 1 + build_tiny(variant)._can_compile_fullgraph


@pytest.mark.parametrize("how", HOW)
def test_decoding_token_by_token_equals_the_whole_forward_pass(variant, how, request):
    for measure in ("dynamic cache", "static cache")[: caches(variant)]:
        for name, error in of(variant, request.getfixturevalue(how), measure):
            assert error <= tolerance(variant), f"{name}: {measure}"


@torch.no_grad()
@pytest.mark.parametrize("how", HOW)
def test_generation_chooses_the_best_tokens_of_the_masked_dense_model(variant, how, cases, request):
    for name, generated in of(variant, request.getfixturevalue(how), "generated"):
        assert [*generated.values()] == [generated["dynamic"]] * caches(variant), name
        for prompt, new, start in zip(tokens(), generated["dynamic"], (4, 0), strict=True):
            ids = torch.cat([prompt[start:], torch.tensor(new)])  # the first row was padded on the left
            logits = cases[name].truth(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, -len(new) - 1 : -1]
            chosen = logits[range(len(new)), new]
            assert len(new) == 5 and (logits.max(1).values - chosen).max() <= tolerance(variant), name


@pytest.mark.slow
def test_no_key_is_missing_and_the_parameters_are_those_of_the_plan(variant, remote, cases):
    for name, keys in of(variant, remote, "keys"):
        assert keys == [], name
        plan = cases[name].plan
        if not cases[name].padded:
            # a plan counts what its groups hold; a layer that is dropped takes its norms along
            config = cases[name].truth.config
            norms = len(FAMILIES[config.model_type].layer_norms) * config.hidden_size
            dropped = norms * (4 - remote[name]["layers"])
            assert remote[name]["params"] == plan.total_params - plan.removed_params - dropped, name


@pytest.mark.slow
def test_saved_again_it_is_the_same_model(variant, remote):
    for name, error in of(variant, remote, "saved again"):
        assert error <= tolerance(variant), name


@pytest.mark.slow
def test_in_bfloat16_the_logits_are_near(variant, remote, cases):
    """They are at most twice as far from float32's as the dense model's are."""
    for name, dtype in of(variant, remote, "dtype"):
        assert dtype == "torch.float32", name
    for name, (dtype, error) in of(variant, remote, "bfloat16"):
        assert dtype == "torch.bfloat16" and 0 < error <= 2 * cases[name].bfloat16_error, name


@pytest.mark.slow
def test_each_way_takes_the_classes_that_it_should(cases, remote, registered, folder):
    for name, case in cases.items():
        stated = name.split("/")[1] in STOCK and "longrope" not in name  # whose config takes no two of four KV heads
        assert case.stock == (stated or case.padded)
        stock = "transformers.models."
        assert remote[name]["module"].startswith(stock if case.stock else "transformers_modules."), name
        if "module" in registered[name]:
            assert registered[name]["module"].startswith(stock if case.stock else "tune_prune.models.pruned."), name
        for file in ("modeling_tune_prune.py", MODEL_FILE):
            assert (case.folder / file).exists() != case.stock
    assert list((folder / "modules").rglob("modeling_tune_prune.py"))
    assert not list((folder / "no_modules").rglob("*tune_prune*"))


def test_without_its_classes_a_checkpoint_fails_to_load(cases, registered):
    for name, case in cases.items():
        found = registered[name]
        if case.stock:
            assert found["nobody knows it"] == found["refused"] == found["stock class"] == "", name
        else:
            for how in ("nobody knows it", "refused"):
                assert found[how].startswith("ValueError") and "trust_remote_code" in found[how], name
            # the family's own class would fill what it misses with random numbers: its shapes or sizes must not fit
            assert found["stock class"].partition(":")[0] in (
                "RuntimeError",
                "AmbiguousGlobalPerLayerAttributeError",
                "StrictDataclassClassValidationError",
            ), name


def test_the_config_says_what_each_layer_is(cases):
    values = json.loads((cases["qwen2-sliding/different in every layer"].folder / "config.json").read_text("utf-8"))
    own = [(4, 2, 14), (2, 1, 1), (6, 3, 20), (2, 1, 40)]
    dense = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}
    assert dense.items() <= values.items() and values["head_dim"] == 6 and values["model_type"] == "tune_prune_qwen2"
    layers = [dense | values["per_layer_config"][str(index)] for index in range(4)]
    assert [tuple(layer[name] for name in dense) for layer in layers] == own
    assert {name: path.rpartition(".")[2] for name, path in values["auto_map"].items()} == {
        "AutoConfig": "PrunedQwen2Config",
        "AutoModel": "PrunedQwen2Model",
        "AutoModelForCausalLM": "PrunedQwen2ForCausalLM",
    }
    dropped = json.loads((cases["qwen2-sliding/both of a middle layer"].folder / "config.json").read_text("utf-8"))
    assert dropped["num_hidden_layers"] == 3
    assert dropped["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    dropped = json.loads((cases["smollm3/both of a middle layer"].folder / "config.json").read_text("utf-8"))
    assert dropped["no_rope_layers"] == [1, 0, 1]


@pytest.mark.parametrize("model", [*DECODERS.values(), *LANGUAGE_MODELS.values()])
def test_vllm_may_check_what_a_model_is_built_of(model):
    """Where it compiles a class, it takes arguments without `self`, and annotations with it (vllm/compilation/decorators.py)."""
    config = model.config_class()
    annotations = [parameter.annotation for parameter in inspect.signature(model.__init__).parameters.values()]
    for argument, annotation in zip((config,), annotations, strict=False):
        assert annotation is inspect.Parameter.empty or isinstance(argument, annotation)


@pytest.mark.parametrize(
    ("family", "shape", "widths"),
    [
        ("qwen2-sliding", "attention of a middle layer", (1, 40)),
        ("qwen3-biases-tied", "attention of a middle layer", (1, 40)),
        ("granite-biases-tied", "MLP of a middle layer", (4, 1)),
        ("llama-biases", "both of a middle layer", (1, 1)),
    ],
)
def test_zeros_in_place_of_lost_blocks_for_vllm_change_no_logit(family, shape, widths, tmp_path):
    model = build_tiny(family, torch.float32)
    plan = plan_of(model, FAMILIES[model.config.model_type], *SHAPES[shape])
    as_saved(model, plan, "vllm").save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    layer = again.model.layers[1]
    assert (layer.self_attn.k_proj.out_features // 6, layer.mlp.down_proj.in_features) == widths
    gone = [block for block, left in zip((layer.self_attn, layer.mlp), widths, strict=True) if left == 1]
    assert gone and not any(
        p.any() for block in gone for name, p in block.named_parameters() if name.endswith("proj.weight")
    )
    with torch.no_grad():
        found, expected = again(tokens()).logits, zeroed(model, plan)(tokens()).logits
    assert (found - expected).abs().max() <= FLOAT32_TOLERANCE


def test_the_scale_of_logits_is_also_said_as_vllm_reads_it(cases):
    """Its class for models that it does not know reads logit_scale alone, and its own Granite class multiplies by both."""
    for name, case in cases.items():
        values = json.loads((case.folder / "config.json").read_text("utf-8"))
        scale = 0.7 if "cohere" in name else None  # by which its own class multiplies
        if not case.stock and "granite" in name:
            scale = 1 / values["logits_scaling"]
        if not case.stock and "falcon_h1" in name:
            scale = values["lm_head_multiplier"]
        assert values.get("logit_scale") == scale != 1, name


def load(case: Case, **how: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(case.folder, **how)


def error(model: torch.nn.Module, case: Case) -> float:
    with torch.no_grad():
        expected = case.truth(input_ids=tokens()).logits
        return (model(input_ids=tokens()).logits - expected).abs().max().item()


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-biases-tied"])
def test_tied_embeddings_stay_tied(cases, name):
    model = load(cases[f"{name}/both of a middle layer"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.resize_token_embeddings(70)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.out_features == 70


def test_a_removed_block_keeps_its_bias_and_nothing_else(cases):
    shape = "both of a middle layer"
    layer = load(cases[f"llama-biases/{shape}"]).model.layers[1]
    for name, block in (("self_attn.o_proj", layer.self_attn), ("mlp.down_proj", layer.mlp)):
        assert isinstance(block, RemovedBlock)
        assert sum(p.numel() for p in block.parameters()) == 32
        bias = cases[f"llama-biases/{shape}"].truth.model.layers[1].get_submodule(name).bias
        assert torch.equal(layer.get_submodule(name).bias, bias) and bias.abs().min() > 0
    assert list(load(cases["llama/attention of a middle layer"]).model.layers[1].self_attn.parameters()) == []


@pytest.mark.parametrize(("name", "shape"), [*zip(["llama", "llama-biases", "qwen3-biases-tied"], NAMES, strict=True)])
def test_a_device_map_spreads_it_over_memory_and_disk(cases, name, shape, tmp_path):
    case = cases[f"{name}/{shape}"]
    assert error(load(case, device_map={"": "cpu"}), case) <= FLOAT32_TOLERANCE

    total = sum(p.numel() * p.element_size() for p in load(case).parameters())
    spread = load(case, device_map="auto", max_memory={"cpu": int(0.7 * total)}, offload_folder=tmp_path)
    places = spread.hf_device_map
    assert set(places.values()) == {"cpu", "disk"}
    assert all(place.count(".") <= 2 for place in places), "a layer was torn apart"
    assert any(p.device.type == "meta" for p in spread.parameters())
    assert error(spread, case) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_can_be_trained(cases, checkpointing):
    model = load(cases["llama-biases/different in every layer"]).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
