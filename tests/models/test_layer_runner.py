"""A model run by layers against its own forward pass, bit for bit, wherever its weights and hidden states are; what is in memory
at a time; and what is said when a weight or the room for hidden states is missing."""

from __future__ import annotations

import gc
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

from tests.conftest import build_tiny
from tests.residencies import CASES, FEW, WAYS, Counted, in_way
from tune_prune.models.families import FAMILIES
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner import layer_weights
from tune_prune.models.runner.hidden_states import SpilledStates
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.layer_weights import on_device
from tune_prune.models.runner.residency import Residency

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LENGTH = 11  # longer than the sliding windows of the variants


def batches() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(64, (rows, LENGTH), generator=generator) for name, rows in (("a", 2), ("b", 2), ("c", 1))
    }


def runner_of(model, residency: Residency) -> LayerRunner:
    return LayerRunner(model, FAMILIES[model.config.model_type], residency)


@pytest.mark.parametrize(
    ("variant", "dtype", "way"),
    [(*case, "streamed") for case in CASES] + [(*FEW[0], way) for way in WAYS if way != "streamed"],
)
def test_losses_are_those_of_the_whole_model(tiny, variant, dtype, way):
    model = tiny(variant, dtype)
    whole = NextTokenLosses(model)
    expected = {name: whole(samples) for name, samples in batches().items()}
    runner = runner_of(*in_way(model, way))
    sizes = []
    with torch.inference_mode():
        for block in runner.blocks(batches()):
            sizes.append(len(block))
            states = runner.forward(block)
            with runner.tail() as losses:
                assert losses.separate == whole.separate
                for name, samples in block.items():
                    assert torch.equal(losses(samples, states[name]), expected.pop(name)), name
    assert not expected
    assert sizes == {"resident": [1, 1, 1], "by layer": [1, 1, 1], "streamed in blocks": [1, 2]}.get(way, [3])


def test_every_weight_of_a_block_is_read_once(tiny):
    model = tiny("qwen2")
    empty, residency = in_way(model, "streamed")
    assert residency.weights is not None
    weights = Counted(residency.weights)
    runner = runner_of(empty, Residency(weights, model.device))
    states = runner.forward(batches())
    with runner.tail() as losses:
        losses(batches()["a"], states["a"])
    norm = "model.norm.weight"  # outside the layers, and small: with the embedding and with the head
    assert sorted(weights.asked) == sorted([*weights, norm])
    assert {p.device.type for p in empty.parameters()} == {"meta"}


def test_at_most_two_layers_are_in_memory_at_a_time(tiny, monkeypatch):
    runner = runner_of(*in_way(tiny("llama"), "streamed"))
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def weight(tensor: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
        parameter = on_device(tensor, device)
        made.append(weakref.ref(parameter))
        return parameter

    monkeypatch.setattr(layer_weights, "on_device", weight)
    gc.disable()  # what hangs in a circle would stay
    try:
        for index, layer in runner.layers([3, 2, 1, 0]):
            assert torch.equal(layer.mlp.up_proj.weight, tiny("llama").model.layers[index].mlp.up_proj.weight)
            alive.append(sum(one() is not None for one in made))
    finally:
        gc.enable()
    assert 9 <= min(alive) <= max(alive) <= 18 and len(made) == 4 * 9  # parameters of a layer
    assert not any(one() is not None for one in made)


@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_a_runner_that_nobody_has_is_gone_with_its_model(way):
    """At once: a pruned copy would stay on the device until the garbage is collected."""
    model = build_tiny("qwen2-sliding", torch.float32)
    held, residency = in_way(model, way)
    gc.disable()
    try:
        runner = runner_of(held, residency)
        with torch.inference_mode(), runner.tail() as losses:
            losses(batches()["a"], runner.forward(batches())["a"])
        left = [weakref.ref(one) for one in (runner, held, model)]
        del runner, losses, held, model, residency
        assert [one() for one in left] == [None, None, None]
    finally:
        gc.enable()


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_file_of_hidden_states_has_no_name_and_uses_its_room_again(temporary):
    states = SpilledStates(torch.device("cpu"))
    values = {name: torch.randn(3, 5, 7, dtype=dtype) for name, dtype in zip("abc", DTYPES, strict=True)}
    for _ in range(3):
        for name, value in values.items():
            states[name] = value
    for name, value in values.items():
        assert torch.equal(states[name], value) and states[name].dtype == value.dtype
    assert states._end == sum(value.nbytes for value in values.values())
    assert list(temporary.iterdir()) == [] and set(states) == set(values)
    states["d"] = states.pop("a") + 1
    assert torch.equal(states["d"], values["a"] + 1) and len(states) == 3
    assert states._end == sum(value.nbytes for value in values.values())
    with pytest.raises(KeyError):
        states["a"]
