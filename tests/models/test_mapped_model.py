"""Models whose weights stay in their files: the same numbers as loaded ones, and what is said of files that will not do."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.conftest import whole
from tests.residencies import FEW
from tests.search_folders import in_hub_cache
from tune_prune.core.errors import UserError
from tune_prune.models.catalog import ModelSource, resolve
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.loading import LoadedModel, load_model, map_model, weights_folder
from tune_prune.models.runner.layer_runner import LayerRunner

ALIGNMENT = 64  # bytes: where torch's CPU allocator lets tensors begin
SAMPLES = torch.randint(64, (3, 11), generator=torch.Generator().manual_seed(1))


def saved(model, folder: Path) -> Path:
    """The model in three files and more, so that a layer lies in two."""
    whole(model).save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) // 3)
    assert len([*folder.glob("*.safetensors")]) >= 3
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return saved(tiny("qwen2", torch.float32), tmp_path / "model")


def mapped(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return map_model(resolve(str(folder)), dtype, "cpu")


@torch.inference_mode()
def losses(loaded: LoadedModel) -> torch.Tensor:
    runner = LayerRunner(loaded.model, loaded.family, loaded.residency)
    states = runner.forward({0: SAMPLES})
    with runner.tail() as tail:
        return tail(SAMPLES, states[0])


@pytest.mark.parametrize(
    ("variant", "dtype"), [("llama-tied", torch.float32), ("smollm3", torch.float32), ("phi3", torch.float32), *FEW]
)
def test_it_computes_what_the_loaded_model_computes(tiny, variant, dtype, tmp_path):
    """Stored in float32, opened in either type."""
    folder = saved(tiny(variant, torch.float32), tmp_path / "model")
    loaded, found = load_model(resolve(str(folder)), dtype, "cpu"), mapped(folder, dtype)
    assert torch.equal(losses(found), NextTokenLosses(loaded.model)(SAMPLES))
    assert (found.geometry, found.family, found.device) == (loaded.geometry, loaded.family, loaded.device)
    assert found.model.dtype == dtype and {p.device.type for p in found.model.parameters()} == {"meta"}
    buffers = dict(loaded.model.named_buffers())  # rotary frequencies, which are in no file
    assert buffers and {name for name, _ in found.model.named_buffers()} == buffers.keys()
    assert all(torch.equal(value, buffers[name]) for name, value in found.model.named_buffers())
    assert found.model.generation_config.to_dict() == loaded.model.generation_config.to_dict()


def test_a_file_that_is_too_large_to_be_mapped_is_named(folder):
    """A file of 141 GB is too large on a machine of 24; here the limit is the address space of this process."""
    path = min(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size + 2**34)  # a hole, which takes no space
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**33, limits[1]))
    try:
        with pytest.raises(
            UserError, match=f"{path.name} cannot be mapped .*Cannot allocate memory.*max_shard_size='5GB'"
        ):
            mapped(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_where_a_tensor_begins_in_its_file_changes_nothing(folder):
    """Products add up in another order on memory that begins elsewhere."""
    expected = losses(mapped(folder))
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = content[8 : 8 + length] + b" " * 40
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    loaded = mapped(folder)
    stored = [loaded.residency.weights[name] for name, _ in loaded.model.named_parameters()]
    assert any(tensor.data_ptr() % ALIGNMENT for tensor in stored)
    runner = LayerRunner(loaded.model, loaded.family, loaded.residency)
    assert not any(p.data_ptr() % ALIGNMENT for _, layer in runner.layers() for p in layer.parameters())
    assert torch.equal(losses(loaded), expected)


def test_pickled_weights_cannot_stay_in_their_files(tiny, tmp_path):
    folder = saved(tiny("qwen2", torch.float32), tmp_path / "model")
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save(tiny("qwen2", torch.float32).state_dict(), folder / "pytorch_model.bin")
    assert load_model(resolve(str(folder)), torch.float32, "cpu").geometry.num_layers == 4
    with pytest.raises(UserError, match=r"pickled \(\.bin\).*save_pretrained, which writes safetensors"):
        mapped(folder)


def test_a_model_of_the_hub_is_read_where_it_was_downloaded_to(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = ModelSource("m", "some/model", "hub", None)
    snapshot = in_hub_cache(folder, tmp_path, "some/model")
    assert weights_folder(source) == snapshot
    assert torch.equal(losses(map_model(source, torch.float32, "cpu")), losses(mapped(folder)))
