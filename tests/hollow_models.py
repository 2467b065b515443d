"""Models of real sizes whose weights take no room, for plans of searches on them, and a machine to plan for."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from make_random_model import _parts, config_of
from transformers import PretrainedConfig

from tests.search_folders import model_folder
from tune_prune.core import machine
from tune_prune.core.machine import Memory
from tune_prune.models.families import family_of
from tune_prune.tuning import plan_cost
from tune_prune.tuning.cost import Speed

GIB = 2**30
SPEED = Speed(1e12)  # no layer of that size is run for it


def hollow_model(folder: Path, shape: str, free: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`folder` with a model of that shape (a name of make_random_model), on a machine with `free` GiB of memory and room on its
    disk for what does not fit there."""
    monkeypatch.setattr(machine, "memory", lambda: Memory((free + 1) * GIB, free * GIB))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000 * GIB))
    monkeypatch.setattr(machine, "in_memory", lambda _: False)
    monkeypatch.setattr(plan_cost, "measure", lambda _: SPEED)
    model_folder(folder)
    (folder / "model.safetensors").unlink()
    _write_hollow(folder, config_of(shape))
    return folder


def _write_hollow(folder: Path, config: PretrainedConfig) -> None:
    """Weights of that config that take no room: headers say where each tensor is, and the rest of the files are holes."""
    places = {}
    for number, part in enumerate(_parts(config, family_of(config.model_type))):
        header, end = {}, 0
        for name, shape in part.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config.save_pretrained(folder)


def in_gib(text: str) -> float:
    count, unit = text.split()
    return float(count) * {"MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}[unit]
