"""Model names, loading, and what is said of folders and hubs that do not work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.configuration_utils import PretrainedConfig

from tests.pruned_checkpoints import change_weights
from tune_prune import embedded
from tune_prune.checkpoint import layers
from tune_prune.core.errors import UserError
from tune_prune.models import loading, weight_files
from tune_prune.models.catalog import HUB_ALIASES, ModelSource, aliases, resolve
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.loading import load_config, load_model, load_tokenizer, map_model
from tune_prune.pruning import surgery
from tune_prune.pruning.groups import PruningPlan


def load(folder: Path) -> loading.LoadedModel:
    return load_model(resolve(str(folder)), torch.float32, "cpu")


def refused(call: Callable[[], object]) -> str:
    """The one sentence with which a call refuses."""
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text and not text.endswith(".") and len(text) < 500
    return text


# --- names


def test_names_of_models(folder, monkeypatch):
    assert set(embedded.MODEL_NAMES) < set(aliases())
    assert resolve("tiny-llama").location == str(embedded.model_dir("tiny-llama"))
    assert resolve("llama", "v1") == ModelSource("llama", HUB_ALIASES["llama"], "hub", "v1")
    assert resolve("Qwen/Qwen2.5-0.5B", "abc") == ModelSource("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", "hub", "abc")
    expected = ModelSource("my-model", str(folder), "folder")
    assert resolve(str(folder)) == expected
    monkeypatch.chdir(folder.parent)
    assert resolve("my-model") == resolve("./my-model/") == expected
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/my-model") == expected


# --- loading


def test_a_complete_folder_loads_and_is_ready_to_be_shared(complete, tiny):
    loaded = load(complete)
    assert loaded.source.label == "my-model" and loaded.family.model_type == "qwen2" and loaded.max_length == 64
    assert loaded.geometry == read_geometry(loaded.model, loaded.family)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    for (name, p), q in zip(loaded.model.named_parameters(), tiny("qwen2", torch.float32).parameters(), strict=True):
        assert torch.equal(p, q), name
    assert loaded.tokenizer.model_max_length > 10**9  # cutting into windows is not the tokenizer's business


def test_weights_begin_where_new_tensors_do():
    """Else a pruned copy in memory and the checkpoint saved from it give other last bits."""
    model = load_model(resolve("tiny-llama"), torch.float32, "cpu").model
    assert not [name for name, p in model.named_parameters() if p.data_ptr() % 64]
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied


def test_tied_embeddings_may_be_stored_under_the_name_of_the_head(tiny, folder):
    model = tiny("llama-tied", torch.float32)
    model.save_pretrained(folder)
    renamed = {"lm_head.weight": "model.embed_tokens.weight"}
    change_weights(folder, lambda weights: weights.update({new: weights.pop(old) for new, old in renamed.items()}))
    assert torch.equal(load(folder).model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    assert "config.json: model.embed_tokens.weight is missing; download" in refused(lambda: load(folder))


def _narrow(weights: dict[str, torch.Tensor]) -> None:
    """Narrow an MLP as another structured pruning tool does."""
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.1.mlp.{name}.weight"] = torch.zeros(8, 32)
    weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 8)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"), "model.layers.2.mlp.up_proj"),
        (_narrow, "model.layers.1.mlp"),
        (
            lambda w: w.update({"model.layers.4.mlp.up_proj.weight": torch.zeros(40)}),
            "model.layers.4.mlp.up_proj.weight",
        ),
        (lambda w: w.update({"model.layers.3.mlp.up_proj.bias": torch.zeros(40)}), "model.layers.3.mlp.up_proj.bias"),
    ],
    ids=["missing", "another shape", "a layer more", "a bias more"],
)
def test_weights_that_do_not_fit_the_config_are_refused(folder, change, name):
    """A missing tensor would be left random, one that has no place be dropped."""
    change_weights(folder, change)
    text = refused(lambda: load(folder))
    assert "do not fit its config" in text and name in text and "0 more such" not in text


RUN_IN_ANOTHER_WAY = [
    {"return_dict": False}, {"output_attentions": True, "attn_implementation": "sdpa"}, {"output_hidden_states": True},
    {"use_cache": False}, {"attn_implementation": "flash_attention_2"}, {"_attn_implementation": "eager"},
    {"gradient_checkpointing": True}, {"torchscript": True}, {"fusion_config": {"mlp": True}},
]  # fmt: skip


@pytest.mark.parametrize("own_file", [True, False], ids=["generation_config.json", "none"])
def test_how_a_model_is_run_is_not_for_its_config_to_say(own_file, folder, tmp_path):
    """Numbers and saved files are those of the model without these keys."""
    if not own_file:
        (folder / "generation_config.json").unlink()
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))

    def read(name: str) -> tuple[list[float], list[bytes], str]:
        loaded, mapped = load(folder), map_model(resolve(str(folder)), torch.float32, "cpu")
        assert mapped.model.config.to_dict() == loaded.model.config.to_dict()
        loaded.model.save_pretrained(tmp_path / name)
        saved = [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]
        assert len(saved) == 3
        return loaded.model(tokens).logits.tolist(), saved, loaded.model.config._attn_implementation

    expected, config = read("without"), json.loads((folder / "config.json").read_text())
    assert expected[2] == "sdpa"
    for number, more in enumerate(RUN_IN_ANOTHER_WAY):
        (folder / "config.json").write_text(json.dumps(config | more))
        assert read(f"with {number}") == expected, more


# --- pruned checkpoints


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2-sliding", "granite-biases-tied"])
def test_a_pruned_checkpoint_loads_as_it_was_saved(tiny, variant, complete, tmp_path):
    """Other widths in every layer, one without attention and one without an MLP."""
    model = tiny(variant, torch.float32)
    family = family_of(model.config.model_type)
    third = (1,) if "sliding" in variant else ()
    groups = ((0, 2, 3), (1,), third, (0, 1, 2, 3))
    channels = (tuple(range(40)), (), tuple(range(3, 9)), tuple(range(0, 40, 2)))
    sketch, _ = layers.compact(surgery.cut(model, family, PruningPlan(groups, channels, 0, 0, 1)), family)
    layers.as_saved(sketch, model, family, read_geometry(model, family), "hf").in_memory().save_pretrained(tmp_path)
    small = sketch.in_memory()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(complete / name, tmp_path)
    config = load_config(resolve(str(tmp_path)))
    weight_files.check_weights(tmp_path, loading.meta_model(config))
    loaded = load(tmp_path)
    assert (loaded.family, loaded.geometry) == loading.config_geometry(config) and loaded.family is family
    assert loaded.geometry.kv_heads == (3, 1, len(third), 4) and loaded.geometry.mlp_width == (40, 0, 6, 20)
    assert loaded.geometry.total_params == sum(p.numel() for p in small.parameters())
    own = load_tokenizer(resolve(str(complete)))("w1 w5 w63")["input_ids"]
    assert loaded.tokenizer("w1 w5 w63")["input_ids"] == own
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.model(tokens).logits, small(tokens).logits)


def test_sizes_of_its_own_in_an_ordinary_model_are_another_tools(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"per_layer_config": {"1": {"intermediate_size": 8}}}))
    text = refused(lambda: load(folder))
    assert "per_layer_config" in text and " not follow in qwen2 models; it was pruned by another tool" in text


# --- the hub


def test_a_gated_model_says_how_to_get_access(monkeypatch):
    def gated(*_: object, **__: object) -> None:
        raise OSError(
            "You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/x/y."
        )

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", gated)
    text = refused(lambda: load_config(resolve("llama")))
    assert "accept its licence at https://huggingface.co/meta-llama/Meta-Llama-3-8B" in text and "hf auth login" in text


def test_a_folder_keeps_its_own_tokenizer_whatever_its_family(tmp_path):
    """AutoTokenizer would put Qwen2's BPE in the place of a word-level tokenizer."""
    own = tmp_path / "mine"
    shutil.copytree(embedded.model_dir("tiny-qwen2"), own)
    settings = json.loads((own / "tokenizer_config.json").read_text())
    del settings["auto_map"]
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    words = "the log floats on the lake ."
    expected = load_tokenizer(resolve("tiny-llama"))(words)["input_ids"]
    assert len(set(expected)) > 5
    assert load_tokenizer(resolve(str(own)))(words)["input_ids"] == expected
