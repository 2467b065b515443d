"""Model names, loading, and what is said of folders and hubs that do not work."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers.configuration_utils import PretrainedConfig

from tests.pruned_checkpoints import change_weights
from tune_prune import embedded
from tune_prune.checkpoint import layers
from tune_prune.core.errors import UserError
from tune_prune.models import hub, loading, weight_files
from tune_prune.models.catalog import HUB_ALIASES, ModelSource, aliases, resolve
from tune_prune.models.families import family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.gguf import files
from tune_prune.models.gguf.files import ALIAS, PACKAGE
from tune_prune.models.loading import load_config, load_model, load_tokenizer, map_model
from tune_prune.pruning import surgery
from tune_prune.pruning.groups import PruningPlan

ABSENT = "no-such-organisation/no-such-model"


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text and not text.endswith(".") and len(text) < 500
    return text


def load(folder: Path) -> loading.LoadedModel:
    return load_model(resolve(str(folder)), torch.float32, "cpu")


# --- names


def test_every_alias_resolves(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "obstacle", lambda repo: "")
    monkeypatch.setattr(files, "package_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(files, "folder_of", lambda file: tmp_path / "folder")
    assert set(embedded.MODEL_NAMES) < set(aliases())
    for name in aliases():
        source = resolve(name)
        assert source.label == (ALIAS if name == PACKAGE else name)
        if name == PACKAGE:
            assert (source.kind, source.location) == ("gguf", str(tmp_path / "folder"))
        elif name in HUB_ALIASES:
            assert (source.kind, source.location) == ("hub", HUB_ALIASES[name])
        else:
            assert (source.kind, source.location) == ("embedded", str(embedded.model_dir(name)))


def test_hub_ids_and_revisions():
    assert resolve("Qwen/Qwen2.5-0.5B", "abc") == ModelSource("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", "hub", "abc")
    assert resolve("llama", "v1").revision == "v1"


def test_folders_become_absolute(folder, monkeypatch):
    expected = ModelSource("my-model", str(folder), "folder")
    assert resolve(str(folder)) == expected
    monkeypatch.chdir(folder.parent)
    assert resolve("my-model") == resolve("./my-model/") == expected
    monkeypatch.chdir(folder)
    assert resolve(".") == expected
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve("~/my-model") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lama", "unknown model 'lama'; did you mean 'llama'"),
        ("Mistral", "did you mean 'mistral'"),
        ("tiny_llama", "did you mean 'tiny-llama'"),
        ("qwen3", "unknown model 'qwen3'"),
        ("./nowhere", "model folder ./nowhere does not exist"),
        ("/no/such/folder", "does not exist"),
        ("models/a/b", "does not exist"),
        ("~/no-such-folder-here", "does not exist"),
    ],
)
def test_names_that_mean_nothing(name, expected):
    with pytest.raises(UserError) as error:
        resolve(name)
    text = one_sentence(error)
    assert expected in text and "tiny-llama" in text  # what is known is listed


def test_paths_that_are_no_model_folder(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json") as error:
        resolve(str(tmp_path))
    one_sentence(error)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"is a file; .* folder") as error:
        resolve(str(tmp_path / "model.safetensors"))
    one_sentence(error)


# --- loading


def test_a_complete_folder_loads_and_is_ready_to_be_shared(complete, tiny):
    loaded = load(complete)
    assert loaded.source.label == "my-model" and loaded.family.model_type == "qwen2" and loaded.max_length == 64
    assert loaded.geometry == read_geometry(loaded.model, loaded.family)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    for (name, p), q in zip(loaded.model.named_parameters(), tiny("qwen2", torch.float32).parameters(), strict=True):
        assert torch.equal(p, q), name
    long = "w1 " * 3000
    assert len(loaded.tokenizer(long)["input_ids"]) >= 0  # cutting into windows is not the tokenizer's business
    assert loaded.tokenizer.model_max_length > 10**9


def test_the_dtype_asked_for_is_the_one_loaded(complete):
    loaded = load_model(resolve(str(complete)), torch.bfloat16, "cpu")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_weights_begin_where_new_tensors_do(name):
    """Else a pruned copy in memory and the checkpoint saved from it give other last bits."""
    model = load_model(resolve(name), torch.float32, "cpu").model
    assert not [name for name, p in model.named_parameters() if p.data_ptr() % 64]
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied


def test_tied_embeddings_are_not_missing(tiny, complete, tmp_path):
    tiny("llama-tied", torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(complete / name, tmp_path)
    loaded = load(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.geometry.total_params == sum(p.numel() for p in tiny("llama-tied").parameters())


def test_tied_embeddings_may_be_stored_under_the_name_of_the_head(tiny, complete, tmp_path):
    model = tiny("llama-tied", torch.float32)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(complete / name, tmp_path)
    change_weights(
        tmp_path, lambda weights: weights.update({"lm_head.weight": weights.pop("model.embed_tokens.weight")})
    )
    weight_files.check_weights(tmp_path, loading.meta_model(load_config(resolve(str(tmp_path)))))
    assert torch.equal(load(tmp_path).model.model.embed_tokens.weight, model.model.embed_tokens.weight)
    change_weights(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"config\.json: model\.embed_tokens\.weight is missing; download"):
        weight_files.check_weights(tmp_path, loading.meta_model(load_config(resolve(str(tmp_path)))))


def test_missing_tensors_are_never_left_random(folder):
    change_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"do not fit its config\.json: .*model\.layers\.2\.mlp\.up_proj") as error:
        load(folder)
    one_sentence(error)


def test_tensors_of_another_shape_are_refused(folder):
    def narrow(weights: dict[str, torch.Tensor]) -> None:
        for name in ("gate_proj", "up_proj"):
            weights[f"model.layers.1.mlp.{name}.weight"] = torch.zeros(8, 32)
        weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 8)

    change_weights(folder, narrow)  # what a structured pruning tool leaves behind
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp") as error:
        load(folder)
    one_sentence(error)


@pytest.mark.parametrize("name", ["model.layers.4.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.bias"])
def test_weights_that_the_config_has_no_place_for_are_not_dropped_silently(folder, name):
    change_weights(folder, lambda weights: weights.__setitem__(name, torch.zeros(40)))
    with pytest.raises(UserError, match="do not fit its config") as error:
        load(folder)
    text = one_sentence(error)
    assert name in text and "more such" not in text


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_weights_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(folder) in one_sentence(error)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_missing_files_are_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(UserError) as error:
        load(folder)
    assert str(folder) in one_sentence(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "model_type"}),
        lambda text: json.dumps(json.loads(text) | {"hidden_size": 33}),
        lambda text: json.dumps(json.loads(text) | {"model_type": "gpt2"}),
        lambda text: json.dumps(json.loads(text) | {"model_type": "no-such-type"}),
    ],
    ids=["cut off", "a list", "no model_type", "another size", "another family", "unknown family"],
)
def test_a_broken_config_is_refused(folder, change):
    path = folder / "config.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError) as error:
        load(folder)
    one_sentence(error)


def test_an_unsupported_family_is_refused_before_any_weight_is_read(folder, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(weight_files, "check_weights", never)
    with pytest.raises(UserError, match="'gpt2' is not supported"):
        load(folder)


# --- what config.json says of how a model is run

RUN_IN_ANOTHER_WAY = [
    {"return_dict": False}, {"output_attentions": True}, {"output_hidden_states": True}, {"use_cache": False},
    {"attn_implementation": "flash_attention_2"}, {"_attn_implementation": "eager"},
    {"output_attentions": True, "attn_implementation": "sdpa"}, {"gradient_checkpointing": True}, {"torchscript": True},
    {"fusion_config": {"mlp": True}},
]  # fmt: skip


@pytest.mark.parametrize("more", RUN_IN_ANOTHER_WAY, ids=lambda more: "+".join(more))
@pytest.mark.parametrize("own_file", [True, False], ids=["generation_config.json", "none"])
def test_how_a_model_is_run_is_not_for_its_config_to_say(more, own_file, folder, tmp_path):
    """The same numbers, and the same files of what is saved, as of the model without those keys."""
    if not own_file:
        (folder / "generation_config.json").unlink()
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))

    def found(name: str) -> tuple[torch.Tensor, list[bytes], str]:
        loaded, mapped = load(folder), map_model(resolve(str(folder)), torch.float32, "cpu")
        assert mapped.model.config.to_dict() == loaded.model.config.to_dict()
        loaded.model.save_pretrained(tmp_path / name)
        files = sorted((tmp_path / name).iterdir())
        assert len(files) == 3
        return (
            loaded.model(tokens).logits,
            [path.read_bytes() for path in files],
            loaded.model.config._attn_implementation,
        )

    logits, saved, attention = found("without")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))
    again = found("with")
    assert torch.equal(again[0], logits) and again[1:] == (saved, attention) == (saved, "sdpa")


# --- adapters


def test_an_adapter_beside_whole_weights_is_named(folder, tmp_path, monkeypatch):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')
    with pytest.raises(
        UserError, match=r"has adapter_config\.json beside .* move that file away where it is merged"
    ) as error:
        load_config(resolve(str(folder)))
    one_sentence(error)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--acme--merged"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, repo / "snapshots" / ("0" * 40))
    with pytest.raises(
        UserError, match=r"acme/merged has adapter_config\.json .*hf download acme/merged --exclude 'adapter_\*'"
    ):
        load_config(resolve("acme/merged"))
    (repo / "snapshots" / ("0" * 40) / "config.json").unlink()
    with pytest.raises(UserError, match=r"acme/merged is an adapter \(adapter_config\.json\) and no model; merge"):
        load_config(resolve("acme/merged"))


def test_the_hub_is_asked_once_for_an_adapter(monkeypatch):
    """What it cannot tell, transformers does not find, either."""
    asked = []

    def answer(url: str) -> None:
        asked.append(url)
        if "merged" not in url:
            raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", answer)
    assert not hub.holds("acme/merged", "adapter_config.json")  # tests are offline
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert hub.holds("acme/merged", "adapter_config.json") and not hub.holds("acme/other", "adapter_config.json")
    assert len(asked) == 2


# --- pruned checkpoints


def pruned(model, variant: str):
    """The model with other widths in every layer, one without attention and one without an MLP, as it is saved."""
    family = family_of(model.config.model_type)
    groups = ((0, 2, 3), (1,), (1,), (0, 1, 2, 3)) if "sliding" in variant else ((0, 2, 3), (1,), (), (0, 1, 2, 3))
    channels = (tuple(range(40)), (), tuple(range(3, 9)), tuple(range(0, 40, 2)))
    small, _ = layers.compact(surgery.cut(model, family, PruningPlan(groups, channels, 0, 0, 1)), family)
    saved = layers.as_saved(small, model, family, read_geometry(model, family), "hf").in_memory()
    return small.in_memory(), saved


def test_a_pruned_checkpoint_of_every_family_loads_as_it_was_saved(tiny, variant, complete, tmp_path):
    small, saved = pruned(tiny(variant, torch.float32), variant)
    saved.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(complete / name, tmp_path)
    source = resolve(str(tmp_path))
    config = load_config(source)
    family, geometry = loading.config_geometry(config)
    weight_files.check_weights(tmp_path, loading.meta_model(config))
    loaded = load(tmp_path)
    assert loaded.family is family is family_of(small.config.model_type) and loaded.geometry == geometry
    assert geometry.kv_heads == (3, 1, 1 if "sliding" in variant else 0, 4) and geometry.mlp_width == (40, 0, 6, 20)
    assert geometry.total_params == sum(p.numel() for p in small.parameters())
    assert (
        loaded.tokenizer("w1 w5 w63")["input_ids"] == load_tokenizer(resolve(str(complete)))("w1 w5 w63")["input_ids"]
    )
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.model(tokens).logits, small(tokens).logits)


def test_sizes_of_its_own_in_an_ordinary_model_are_another_tools(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"per_layer_config": {"1": {"intermediate_size": 8}}}))
    with pytest.raises(
        UserError, match=r"per_layer_config.* not follow in qwen2 models; it was pruned by another tool"
    ) as error:
        load(folder)
    one_sentence(error)


# --- the hub


def test_an_offline_hub_is_said_at_once():
    started = time.monotonic()
    with pytest.raises(UserError) as error:
        load_model(resolve(ABSENT), torch.float32, "cpu")
    assert time.monotonic() - started < 5
    text = one_sentence(error)
    assert ABSENT in text and "HF_HUB_OFFLINE" in text and "hf download" in text and "--model DIR" in text


@pytest.mark.parametrize(
    "message",
    [
        "You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/x/y.\n401 Client Error.",
        "403 Client Error. (Request ID: Root=1-abc)\n\nCannot access gated repo for url https://huggingface.co/x/y/config.json.",
    ],
)
def test_a_gated_model_says_how_to_get_access(monkeypatch, message):
    def gated(*_: object, **__: object) -> None:
        raise OSError(message)

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", gated)
    with pytest.raises(UserError) as error:
        load_config(resolve("llama"))
    text = one_sentence(error)
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
