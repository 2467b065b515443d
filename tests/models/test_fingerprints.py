"""Fingerprints of models: by content, whatever the size of their files, and of older versions."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.pruned_checkpoints import change_weights
from tune_prune.checkpoint import manifest
from tune_prune.models import loading, weight_files
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


def test_large_pickles_are_hashed_from_first_to_last_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "WHOLE_HASH_BYTES", 2**20)
    path = tmp_path / "large.bin"
    raw = bytearray(3 * 2**20 + 5)
    path.write_bytes(raw)
    marks = {weight_files.content_hash(path)}
    for position in (0, 3 * 2**19, len(raw) - 1):
        changed = bytearray(raw)
        changed[position] = 1
        path.write_bytes(changed)
        marks.add(weight_files.content_hash(path))
    path.write_bytes(raw + b"\0")
    marks.add(weight_files.content_hash(path))
    assert len(marks) == 5


@pytest.mark.parametrize("digest", [weight_files.content_hash, weight_files.pieces_hash, manifest.weight_file])
def test_to_hash_a_file_takes_no_memory_of_its_size(digest, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, 2**20)}, path)
    tracemalloc.start()
    try:
        digest(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4


def test_of_large_weight_files_every_tensor_counts(folder, monkeypatch):
    """A change of any tensor, be it of a tenth of its values, is another model; and so is one of the header."""
    sizes = {"first.weight": 10, "second.weight": 40_000, "third.weight": 1_000_000}
    weights = {name: torch.zeros(size) for name, size in sizes.items()}
    save_file(weights, folder / "model.safetensors")
    marks = {mark(folder)}  # all of it
    monkeypatch.setattr(weight_files, "WHOLE_HASH_BYTES", 2**20)
    marks.add(mark(folder))
    for name in sizes:
        for part in weights[name].chunk(10):
            part += 1
            save_file(weights, folder / "model.safetensors")
            marks.add(mark(folder))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert len({*marks, mark(folder)}) == 2 + 3 * 10 + 1


def test_a_model_is_found_again_by_the_fingerprint_of_older_versions(folder, complete, monkeypatch):
    """It read 64 MiB of a large file, so that what was recorded says less, but it is still what was recorded."""
    monkeypatch.setattr(weight_files, "WHOLE_HASH_BYTES", 2**20)
    weights = {"first.weight": torch.zeros(500_000)}
    save_file(weights, folder / "model.safetensors")
    source = resolve(str(folder))
    config = load_config(source)
    older = loading._folder_fingerprint(folder, weight_files.pieces_hash)
    assert older != mark(folder)
    assert loading.is_model_of(older, source, config) and loading.is_model_of(mark(folder), source, config)
    weights["first.weight"][0] = 1
    save_file(weights, folder / "model.safetensors")
    assert not loading.is_model_of(older, source, config)


def test_what_is_no_file_does_not_count(complete, folder):
    """Of what an archive may hold: links to themselves, and pipes and devices, which have no end."""
    (folder / "a.bin").symlink_to(folder / "a.bin")
    (folder / "b.safetensors").mkdir()
    assert mark(folder) == mark(complete)
    os.mkfifo(folder / "c.bin")
    (folder / "d.safetensors").symlink_to("/dev/zero")
    assert mark(folder) == mark(complete)
