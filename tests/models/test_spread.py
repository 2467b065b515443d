"""A model whose layers are on several devices: where each module is, and that numbers are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils import check_device_map

from tune_prune.models.families import family_of
from tune_prune.models.runner import spread

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("devices", [1, 2, 3, 7])
def test_layers_are_whole_and_in_turn(tiny, variant, devices):
    model = tiny(variant)
    family = family_of(model.config.model_type)
    places = spread.device_map(model, family, range(devices))
    check_device_map(model, places)
    layers = [places[f"model.layers.{index}"] for index in range(4)]
    assert layers == {1: [0] * 4, 2: [0, 0, 1, 1], 3: [0, 0, 1, 1]}.get(devices, [0, 1, 2, 3])
    assert max(map(layers.count, layers)) == spread.layers_on(4, devices)
    assert (places["model.embed_tokens"], places["model.rotary_emb"]) == (0, 0)
    assert places["model.norm"] == devices - 1
    assert places["lm_head"] == (0 if model.config.tie_word_embeddings else devices - 1)


@pytest.mark.slow
def test_numbers_are_those_of_one_device():
    """The second device, once made, is there for good, hence a process of its own."""
    variants = ("qwen2-sliding", "qwen3-biases-tied", "granite", "gemma4_text")
    run = subprocess.run(
        [sys.executable, "-m", "tests.two_devices", *variants],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for variant, line in zip(variants, run.stdout.splitlines(), strict=True):
        found = json.loads(line)
        gradients = {name: found.pop(name) for name in [*found] if name.startswith("gradients")}
        # In float64; sums of gradients in another order.
        assert len(gradients) == 4 and max(gradients.values()) < 1e-13, variant
        assert len(found) == 11 and set(found.values()) == {0.0}, variant
