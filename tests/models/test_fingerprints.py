"""Fingerprints of models: by content, whatever the size of their files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.pruned_checkpoints import change_weights
from tune_prune.models import fingerprints, loading
from tune_prune.models.catalog import resolve
from tune_prune.models.loading import load_config, model_fingerprint


def mark(folder: Path) -> str:
    source = resolve(str(folder))
    return model_fingerprint(source, load_config(source))


def test_a_model_is_its_content_not_its_place(complete, folder, tmp_path):
    assert mark(folder) == mark(complete)
    (folder / "README.md").write_text("notes do not count")
    assert mark(folder) == mark(complete)
    moved = folder.rename(tmp_path / "elsewhere")
    assert mark(moved) == mark(complete)


def test_one_changed_weight_is_another_model(complete, folder):
    change_weights(folder, lambda weights: weights["model.norm.weight"].__setitem__(0, 9.0))
    assert mark(folder) != mark(complete)


def test_a_changed_tokenizer_or_config_is_another_model(complete, folder):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"w63"', '"x63"'))
    one = mark(folder)
    (folder / "tokenizer.json").write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert len({mark(complete), one, mark(folder)}) == 3


def test_of_large_weight_files_every_tensor_counts(folder, monkeypatch):
    """A change of any tensor, be it of a tenth of its values, is another model; and so is one of the header."""
    sizes = {"first.weight": 10, "second.weight": 40_000, "third.weight": 1_000_000}
    weights = {name: torch.zeros(size) for name, size in sizes.items()}
    save_file(weights, folder / "model.safetensors")
    marks = {mark(folder)}  # all of it
    monkeypatch.setattr(fingerprints, "WHOLE_BYTES", 2**20)
    marks.add(mark(folder))
    for name in sizes:
        for part in weights[name].chunk(10):
            part += 1
            save_file(weights, folder / "model.safetensors")
            marks.add(mark(folder))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert len({*marks, mark(folder)}) == 2 + 3 * 10 + 1


def test_what_is_no_file_does_not_count(complete, folder):
    """An archive may hold links to themselves, and pipes and devices, which have no end."""
    (folder / "a.bin").symlink_to(folder / "a.bin")
    (folder / "b.safetensors").mkdir()
    assert mark(folder) == mark(complete)
    os.mkfifo(folder / "c.bin")
    (folder / "d.safetensors").symlink_to("/dev/zero")
    assert mark(folder) == mark(complete)


def test_what_transformers_takes_in_the_place_of_a_tokenizer_counts(complete, folder):
    """Mistral has a tokenizer file of its own."""
    name = "tekken.json"
    (folder / name).write_text("one")
    assert mark(folder) == mark(complete)
    (folder / "tokenizer.json").unlink()
    before = mark(folder)
    (folder / name).write_text("other")
    assert mark(folder) != before


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_tokens_beside_a_tokenizer_count_where_transformers_reads_them(folder, name):
    source, settings = resolve(str(folder)), json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("bos_token", None)
    marks, read = [], []
    for decoder in ({}, {"added_tokens_decoder": {}}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | decoder))
        for text in ({"bos_token": "w1", "stone sinks": 64}, {"bos_token": "w2", "wood floats": 64}):
            (folder / name).write_text(json.dumps({k: v for k, v in text.items() if (v == 64) == (name[0] == "a")}))
            tokenizer = loading.load_tokenizer(source)
            read.append((tokenizer.bos_token, tuple(tokenizer.get_added_vocab())))
            marks.append(mark(folder))
    assert read[0] != read[1] and marks[0] != marks[1]
    assert read[2] == read[3] and marks[2] == marks[3]


def test_weights_in_a_folder_below_are_of_the_model(complete, folder):
    (folder / "below").mkdir()
    weights = (folder / "model.safetensors").rename(folder / "below" / "part.safetensors")
    with safe_open(weights, framework="pt") as tensors:
        index = {"weight_map": dict.fromkeys(tensors.keys(), "below/part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = mark(folder)
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] = 9.0
    save_file(tensors, weights, {"format": "pt"})
    assert mark(folder) != before
