"""Checks of weights before they are loaded, whatever files they are in and wherever those lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.search_folders import in_hub_cache
from tune_prune.core.errors import UserError
from tune_prune.models import loading, weight_files
from tune_prune.models.catalog import ModelSource, resolve
from tune_prune.models.loading import map_model

Weights = dict[str, torch.Tensor]
Place = tuple[ModelSource, Path]
NAME = "model.layers.1.self_attn.o_proj.weight"
MODULE = NAME.removesuffix("weight")


def _pickle(folder: Path, weights: Weights) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def _pickle_in_two(folder: Path, weights: Weights) -> None:
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, own in parts.items():
        torch.save({name: weights[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _save(folder: Path, weights: Weights) -> None:
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


FILES: dict[str, Callable[[Path, Weights], None]] = {
    "safetensors": _save,
    "pickled": _pickle,
    "pickled in two": _pickle_in_two,
}


@pytest.fixture(params=["folder", "hub"])
def place(request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A model that a test may damage, and the folder of its files: its own, or the one in the hub's cache."""
    if request.param == "folder":
        return resolve(str(folder)), folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = in_hub_cache(folder, tmp_path / "hub", "acme/tiny")
    return resolve("acme/tiny"), snapshot


@pytest.mark.parametrize("files", FILES)
def test_whole_weights_are_the_same_model_in_whatever_files(files: str, place: Place, tiny):
    source, folder = place
    FILES[files](folder, load_file(folder / "model.safetensors"))
    loading.check_weights(source, loading.load_config(source))
    loaded = loading.load_model(source, torch.float32, "cpu").model.state_dict()
    expected = tiny("qwen2", torch.float32).state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)


def _in_8_bits(weights: Weights) -> None:
    weights[NAME] = weights[NAME].to(torch.float8_e4m3fn)


def _codes(weights: Weights) -> None:
    """Name codes and scales as GPTQ and AWQ do."""
    rows, columns = weights.pop(NAME).shape
    weights[f"{MODULE}qweight"] = torch.zeros(rows // 8, columns, dtype=torch.int32)
    weights[f"{MODULE}scales"] = torch.ones(1, columns)


def _in_4_bits(weights: Weights) -> None:
    """Store a weight as bitsandbytes does."""
    weights[f"{NAME}.absmax"] = torch.ones(weights[NAME].numel() // 64)
    weights[NAME] = torch.zeros(weights[NAME].numel() // 2, 1, dtype=torch.uint8)


QUANTISED: dict[str, tuple[Callable[[Weights], None], str]] = {
    "8 bits": (_in_8_bits, rf"{NAME} is F8_E4M3"),
    "whole numbers": (lambda weights: weights.update({NAME: weights[NAME].to(torch.int8)}), rf"{NAME} is I8"),
    "4 bits": (_in_4_bits, rf"{NAME} is U8"),
    "codes": (_codes, rf"{MODULE}qweight is a part of one"),
    "a scale beside": (lambda weights: weights.update({f"{NAME}_scale": torch.ones(1)}), rf"{NAME}_scale is a part of one"),
    "scales of blocks": (lambda weights: weights.update({f"{NAME}_scale_inv": torch.ones(1, 1)}), rf"{NAME}_scale_inv is a part"),
    "a scale below": (lambda weights: weights.update({f"{NAME}.absmax": torch.ones(4)}), rf"{NAME}\.absmax is a part of one"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "how"), [("safetensors", how) for how in QUANTISED] + [(files, "codes") for files in FILES][1:]
)
def test_quantised_weights_are_refused_on_every_road(files: str, how: str, place: Place):
    """Without a quantization_config nothing says so but the tensors themselves."""
    change, said = QUANTISED[how]
    source, folder = place
    weights = load_file(folder / "model.safetensors")
    change(weights)
    FILES[files](folder, weights)
    config = loading.load_config(source)
    for of_plans in (True, False):
        with pytest.raises(UserError, match=f"are quantised .{said}.*the model that they were made from") as error:
            loading.check_weights(source, config) if of_plans else loading.load_model(source, torch.float32, "cpu")
        assert f"the weights of {source.location} are" in str(error.value)


def test_what_belongs_to_no_weight_may_be_beside_them(folder: Path):
    """Rotary frequencies of old checkpoints, scales of an 8-bit KV cache."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    _save(folder, weights)
    source = resolve(str(folder))
    assert loading.load_model(source, torch.float32, "cpu").geometry == map_model(source, torch.float32, "cpu").geometry


def test_a_stored_head_that_differs_from_tied_embeddings_is_refused(tiny, folder):
    """transformers would take it for a head of its own, and saving would lose it."""
    tiny("llama-tied", torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    _save(folder, tensors)
    model = loading.load_model(resolve(str(folder)), torch.float32, "cpu").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][0, 0] += 1
    _save(folder, tensors)
    with pytest.raises(UserError, match=r"lm_head\.weight, but its config\.json says that they are one"):
        loading.load_model(resolve(str(folder)), torch.float32, "cpu")


def test_of_a_hub_s_model_that_is_not_wholly_here_nothing_is_said_yet(place: Place):
    source, folder = place
    _pickle_in_two(folder, load_file(folder / "model.safetensors"))
    weight_files.pickled_files(folder)[0].unlink()
    config = loading.load_config(source)
    if source.kind == "hub":
        loading.check_weights(source, config)
    else:
        with pytest.raises(UserError, match=r"lacks 1 of 2 weight files, e\.g\. pytorch_model-00001"):
            loading.check_weights(source, config)


@pytest.mark.parametrize("files", FILES)
def test_a_config_without_a_data_type_leaves_it_to_the_files(files: str, place: Place) -> None:
    """Most of the numbers count: norms are often kept in float32."""
    source, folder = place
    about = json.loads((folder / "config.json").read_text())
    about = {name: value for name, value in about.items() if "dtype" not in name}
    weights = load_file(folder / "model.safetensors")
    narrow = {name: w if w.dim() == 1 else w.to(torch.bfloat16) for name, w in weights.items()}
    for stored, dtype in ((weights, "float32"), (narrow, "bfloat16")):
        if not (folder / "model.safetensors").exists():
            (folder / "model.safetensors").touch()
        FILES[files](folder, stored)
        (folder / "config.json").write_text(json.dumps(about))
        assert loading.stored_as(source, loading.load_config(source)) == dtype
    (folder / "config.json").write_text(json.dumps(about | {"dtype": "float16"}))
    assert loading.stored_as(source, loading.load_config(source)) == "float16"


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"<html>Not found</html>", "is no file of weights"), ([1, 2], "it holds no tensors by name"), (None, "bytes")],
    ids=["a page", "a list", "cut off"],
)
def test_what_is_no_weights_in_a_pickled_file_is_said(content: object, says: str, folder: Path) -> None:
    _pickle(folder, load_file(folder / "model.safetensors"))
    path = folder / "pytorch_model.bin"
    if isinstance(content, list):
        torch.save(content, path)
    else:
        path.write_bytes(content or path.read_bytes()[:-1000])
    source = resolve(str(folder))
    with pytest.raises(UserError, match=f"is damaged or cut off .*{says}"):
        loading.check_weights(source, loading.load_config(source))
