"""Models that read images: the language model inside is pruned, and the rest comes through."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import tune_prune
from tests.checkpoints import ROOT, SHAPES, alone
from tests.pruned_checkpoints import change_json
from tests.pruning.test_surgery import TOLERANCE, tokens
from tests.wrappers import WRAPPED, build_wrapper, image_inputs, stored, write_wrapper, zeroed_inside
from tune_prune.checkpoint import layers
from tune_prune.checkpoint.save import write_hf
from tune_prune.core.errors import UserError
from tune_prune.models import weight_files
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import LoadedModel, check_weights, config_geometry, load_config, load_model, map_model
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import cut

FREE, UNIFORM = "both of a middle layer", "uniform"


def opened(folder: Path, load=load_model) -> LoadedModel:
    return load(resolve(str(folder)), torch.float64, "cpu")


def write_pruned(dense: LoadedModel, shape: str, folder: Path, fmt: str = "hf") -> PruningPlan:
    groups, channels = SHAPES[shape]
    if "attention" not in dense.family.prunes:
        groups = ((),) * len(groups)
    plan = PruningPlan(groups, channels, 0, 0, dense.geometry.total_params)
    small, _ = layers.compact(cut(dense.model, dense.family, plan, dense.residency.weights), dense.family)
    folder.mkdir()
    saved = layers.as_saved(small, dense.model, dense.family, dense.geometry, fmt)
    write_hf(dense, saved, folder, 10**9)
    return plan


@torch.no_grad()
@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_pruned_is_the_language_model_inside(name, tmp_path):
    """Its logits are the whole's, bit for bit, and everything counts."""
    whole = write_wrapper(tmp_path, name)
    dense, source = opened(tmp_path), resolve(str(tmp_path))
    expected = whole(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(dense.model(input_ids=tokens(), use_cache=False).logits, expected)
    assert dense.geometry.total_params == sum(p.numel() for p in whole.parameters())
    assert dense.geometry.language_params == sum(p.numel() for p in dense.model.parameters())
    assert config_geometry(load_config(source), source) == (dense.family, dense.geometry)
    mapped = opened(tmp_path, map_model)
    assert all(torch.equal(mapped.residency.weights[name], p) for name, p in dense.model.named_parameters())
    check_weights(source, load_config(source))


@torch.no_grad()
@pytest.mark.parametrize("as_named", [False, True])
@pytest.mark.parametrize(("name", "shape"), [*((name, FREE) for name in WRAPPED), ("mistral3-ministral3", UNIFORM)])
def test_an_image_gives_what_it_gives_with_zeros_in_place_of_what_was_removed(name, shape, as_named, tmp_path):
    whole = write_wrapper(tmp_path / "dense", name, as_named=as_named)
    plan = write_pruned(opened(tmp_path / "dense"), shape, tmp_path / "pruned")
    small = AutoModelForImageTextToText.from_pretrained(tmp_path / "pruned").eval()
    assert (type(small) is type(whole)) == (shape == UNIFORM) and isinstance(small, type(whole))
    inputs, truth = image_inputs(name), zeroed_inside(whole, plan)
    with_image = truth(**inputs, use_cache=False).logits
    other = truth(**inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}, use_cache=False).logits
    assert (with_image - other).abs().max() > 1e-3  # the image counts
    assert (small(**inputs, use_cache=False).logits - with_image).abs().max() <= TOLERANCE
    new = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(small.generate(**inputs, **new), truth.generate(**inputs, **new))

    before, after = stored(tmp_path / "dense"), stored(tmp_path / "pruned")
    around = re.compile("vision_tower|projector|visual|embed_vision|vision_embedder|audio")

    def in_class(key: str) -> str:
        """Gemma 4 12B's files name some otherwise than its class does."""
        key = key.removeprefix("model.").replace("vision_embedder.", "embed_vision.")
        return key.replace("embed_vision.embedding", "embed_vision.multimodal_embedder.embedding")

    others, again = ({in_class(k): p for k, p in of.items() if around.search(k)} for of in (before, after))
    assert others and others.keys() == again.keys()
    for key, p in others.items():
        assert again[key].dtype == p.dtype and torch.equal(again[key], p), key
    if shape == UNIFORM:
        assert after.keys() == before.keys()  # named as they came


@torch.no_grad()
@pytest.mark.parametrize(("shape", "fmt"), [(FREE, "hf"), (FREE, "hf-padded"), (UNIFORM, "hf")])
def test_a_pruned_checkpoint_is_opened_again(shape, fmt, tmp_path):
    whole = write_wrapper(tmp_path / "dense", "mistral3-ministral3")
    dense = opened(tmp_path / "dense", map_model)  # a tensor at a time
    plan = write_pruned(dense, shape, tmp_path / "pruned", fmt)
    again = opened(tmp_path / "pruned")
    expected = zeroed_inside(whole, plan)(input_ids=tokens(), use_cache=False).logits
    assert (again.model(input_ids=tokens(), use_cache=False).logits - expected).abs().max() <= TOLERANCE
    assert again.family is dense.family and again.geometry.around_params == dense.geometry.around_params
    padded = AutoModelForImageTextToText.from_pretrained(tmp_path / "pruned")
    assert again.geometry.total_params == sum(p.numel() for p in padded.parameters()) < dense.geometry.total_params
    assert (type(padded) is type(whole)) == (shape == UNIFORM or fmt == "hf-padded")


STRANGER = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor
folder, case = sys.argv[1], load_file(sys.argv[2])
expected = case.pop("logits")
model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True)
print((model(**case, use_cache=False).logits - expected).abs().max().item() <= 1e-10, type(model).__module__)
model.save_pretrained(folder + ".again")
again = AutoModelForImageTextToText.from_pretrained(folder + ".again", trust_remote_code=True)
print(torch.equal(again(**case, use_cache=False).logits, model(**case, use_cache=False).logits))
print(type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__, "tune_prune" in sys.modules)
"""


@torch.no_grad()
@pytest.mark.slow
def test_programs_that_have_seen_none_of_its_classes_load_it(tmp_path):
    whole = write_wrapper(tmp_path / "dense", "mistral3-ministral3")
    plan = write_pruned(opened(tmp_path / "dense"), FREE, tmp_path / "pruned")
    inputs = image_inputs("mistral3")
    logits = zeroed_inside(whole, plan)(**inputs, use_cache=False).logits
    save_file(inputs | {"logits": logits}, tmp_path / "case.safetensors")
    command = [sys.executable, "-P", "-c", STRANGER, str(tmp_path / "pruned"), str(tmp_path / "case.safetensors")]
    environment = alone(tmp_path / "modules")
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("True transformers_modules.") and second == "True" and third == "PrunedMistral3Model False"
    code = (
        "import sys; from tune_prune.models import catalog, loading; "
        "print(loading.load_config(catalog.resolve(sys.argv[1])).model_type)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "pruned")]
    here = environment | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=here, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "tune_prune_ministral3\n", done.stderr


def test_it_is_opened_pruned_and_saved_with_what_makes_its_inputs(tmp_path):
    whole = write_wrapper(tmp_path / "dense", "mistral3-ministral3", torch.float32)
    for file in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        (tmp_path / "dense" / file).write_text(json.dumps({"file": file}))
    model = tune_prune.open(str(tmp_path / "dense"), device="cpu")
    assert model.params == sum(p.numel() for p in whole.parameters())
    pruned = model.prune("magnitude", 0.1)
    assert (
        0 <= 0.1 * model.params - pruned.plan.removed_params < 3 * 32
    )  # of all of it, also of what stays; less than a channel
    about = pruned.save(tmp_path / "out")
    again = tune_prune.open(str(tmp_path / "out"), device="cpu")  # which checks its files
    assert again.params == about.params == pruned.params and about.sizes["dense"].params == model.params
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", trust_remote_code=True)' in card
    for file in ("preprocessor_config.json", "processor_config.json", "chat_template.json"):
        assert json.loads((tmp_path / "out" / file).read_text()) == {"file": file}
    with pytest.raises(UserError, match="--quantize int8 is for models of text alone"):
        pruned.save(tmp_path / "small", quantize="int8")


def test_an_output_head_that_config_json_does_not_tie_is_the_language_models_to_tie(tmp_path):
    """transformers takes them for tied where that is not said for the whole, and finds two of them: Mistral-Small-3.1 is so."""
    whole = write_wrapper(tmp_path, "mistral3")
    change_json(tmp_path / "config.json", lambda values: values.pop("tie_word_embeddings"))
    assert AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    head = opened(tmp_path).model.lm_head.weight
    assert torch.equal(head, whole.lm_head.weight) and not torch.equal(head, whole.get_input_embeddings().weight)


def test_a_tensor_without_a_place_is_refused_and_one_that_transformers_leaves_unread_is_not(tmp_path):
    write_wrapper(tmp_path, "mistral3")
    save_file(
        stored(tmp_path) | {"vision_tower.extra.weight": torch.zeros(2)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(UserError, match=r"vision_tower\.extra\.weight is not used"):
        opened(tmp_path)
    model = build_wrapper("mistral3")
    model._keys_to_ignore_on_load_unexpected = [r"^vision_tower\.extra"]
    assert weight_files.check_weights(tmp_path, model).keys() == dict(model.named_parameters()).keys()


@torch.no_grad()
def test_keys_and_values_that_no_layer_computes_are_left_in_their_files(tmp_path):
    """Files of Gemma 4 have some of the layers that attend to others', too."""
    whole = write_wrapper(tmp_path, "gemma4")
    unused = {f"model.language_model.layers.2.self_attn.{name}.weight": torch.ones(2) for name in ("k_proj", "k_norm")}
    save_file(stored(tmp_path) | unused, tmp_path / "model.safetensors", {"format": "pt"})
    expected = whole(input_ids=tokens(), use_cache=False).logits
    assert torch.equal(opened(tmp_path).model(input_ids=tokens(), use_cache=False).logits, expected)


def test_what_config_json_says_of_the_language_model_is_checked(tmp_path):
    write_wrapper(tmp_path, "mistral3-ministral3")

    def refused(**fields: object) -> str:
        before = (tmp_path / "config.json").read_text()
        change_json(tmp_path / "config.json", lambda values: values["text_config"].update(fields))
        with pytest.raises(UserError) as error:
            load_config(resolve(str(tmp_path)))
        (tmp_path / "config.json").write_text(before)
        return str(error.value)

    assert "num_hidden_layers 0" in refused(num_hidden_layers=0)
    assert "num_hidden_layers 5e+03" in refused(num_hidden_layers=5000)
    assert "pruned by another tool" in refused(per_layer_config={"0": {}})
    assert "quantised (fp8" in refused(quantization_config={"quant_method": "fp8"})


def test_ministral_3_has_its_published_size(tmp_path):
    """3.4 billion parameters in the language model and 0.4 around it (huggingface.co/mistralai/Ministral-3-3B-Base-2512)."""
    text = {
        "model_type": "ministral3", "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131_072,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    source = resolve(str(tmp_path))
    _, geometry = config_geometry(load_config(source), source)
    assert (geometry.language_params, geometry.around_params) == (3_429_006_336, 420_083_712)
