"""`block_influence` against ShortGPT's formula in a plain loop over hidden states; and models that lose whole layers."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tune_prune
from tune_prune.core.errors import UserError
from tune_prune.models.families import FAMILIES
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.methods import Dense, load_method
from tune_prune.pruning.passes import batches
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics import Need, load_statistic

SEQ_LEN = 9


@pytest.fixture(autouse=True)
def _batches_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * SEQ_LEN})


def windows(count: int) -> torch.Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(6))


def collected(model: nn.Module, samples: torch.Tensor) -> np.ndarray:
    statistic, need = load_statistic("block_influence"), Need("block_influence", "", len(samples))
    return statistic.value(statistic.collect(model, FAMILIES[model.config.model_type], samples, [need])[need], need)


def influence_by_loop(model: nn.Module, samples: torch.Tensor) -> list[float]:
    """Sample by sample and token by token, of the hidden states that transformers gives."""
    plain = copy.deepcopy(model)
    (norm,) = (name for name, _ in plain.model.named_children() if "norm" in name and "per_layer" not in name)
    setattr(plain.model, norm, nn.Identity())  # the last hidden state is the one behind it
    cosines: list[list[float]] = [[] for _ in model.model.layers]
    for sample in samples:
        states = plain(input_ids=sample[None], output_hidden_states=True).hidden_states
        for found, before, after in zip(cosines, states[:-1], states[1:], strict=True):
            for x, y in zip(before[0].tolist(), after[0].tolist(), strict=True):
                found.append(math.fsum(map(mul, x, y)) / math.hypot(*x) / math.hypot(*y))
    return [1 - math.fsum(found) / len(found) for found in cosines]


def scores_of(model: nn.Module, influence: list[float]) -> GroupScores:
    family = FAMILIES[model.config.model_type]
    dense = Dense(model, family, read_geometry(model, family), 0, {"block_influence": np.array(influence)})
    return load_method("block_influence").scores(dense)


def test_it_is_the_formula(tiny, variant):
    model, samples = tiny(variant), windows(6)
    found = collected(model, samples)
    assert found.dtype == np.float64 and (found > 0.001).all()
    np.testing.assert_allclose(found, influence_by_loop(model, samples), rtol=1e-5)


@pytest.mark.parametrize(
    "influence",
    [[0.4, 0.02, 0.3, 0.1], [0.0, 0.0, 0.0, 0.0], [0.5, 0.25 + 3e-16, 0.25, 0.25 - 3e-16], [1e-12, 2.0, 0.0, 2.0]],
)
def test_order_within_a_layer_never_changes_that_of_layers(tiny, influence):
    model = tiny("llama")
    scores, weights = scores_of(model, influence), load_method("magnitude").scores
    by_weight = weights(Dense(model, FAMILIES["llama"], read_geometry(model, FAMILIES["llama"]), 0, {}))
    layers = [np.concatenate(pair) for pair in zip(scores.attention, scores.mlp, strict=True)]
    order = sorted(range(4), key=lambda layer: (influence[layer], layer))
    for lower, higher in pairwise(order):
        assert layers[lower].max() < layers[higher].min()
    for layer, found in enumerate(layers):
        np.testing.assert_allclose(found, influence[layer], atol=1e-8)
        assert len(set(found)) == len(found)
        np.testing.assert_array_equal(
            np.argsort(found), np.argsort(np.concatenate([by_weight.attention[layer], by_weight.mlp[layer]]))
        )


def test_the_lowest_layers_go_as_a_whole_and_the_next_by_magnitude(tiny):
    model, influence = tiny("llama"), [0.4, 0.02, 0.3, 0.1]
    family = FAMILIES["llama"]
    geometry = read_geometry(model, family)
    layer = 4 * geometry.group_cost[1] + 40 * geometry.channel_cost[1]
    target = 2 * layer + geometry.group_cost[2] + 5 * geometry.channel_cost[2]
    plan = select(scores_of(model, influence), geometry, (target + 0.5) / geometry.total_params)
    assert plan.kept_groups[1] == plan.kept_channels[1] == plan.kept_groups[3] == plan.kept_channels[3] == ()
    assert plan.kept_groups[0] == tuple(range(4)) and plan.kept_channels[0] == tuple(range(40))
    weights = load_method("magnitude").scores(Dense(model, family, geometry, 0, {}))
    left, gone = target - 2 * layer, ([], [])
    for _, kind, index in sorted(
        (score, kind, index)
        for kind, of in enumerate((weights.attention[2], weights.mlp[2]))
        for index, score in enumerate(of)
    ):
        cost = geometry.channel_cost[2] if kind else geometry.group_cost[2]
        if cost <= left:
            gone[kind].append(index)
            left -= cost
    assert plan.kept_groups[2] == tuple(k for k in range(4) if k not in gone[0])
    assert plan.kept_channels[2] == tuple(j for j in range(40) if j not in gone[1])


def test_a_shape_that_keeps_the_same_of_every_layer_is_refused():
    with pytest.raises(UserError, match=r"chooses among layers, and shape uniform .*; use shape free or aligned, or"):
        tune_prune.open("tiny-llama", device="cpu").prune("block_influence", seq_len=16, num_samples=4, shape="uniform")


@pytest.mark.parametrize(
    "more", [{"steps": 2}, {"compensation": "least_squares", "recovery": "lora", "recovery_steps": 2}]
)
def test_a_model_that_lost_layers_is_saved_loaded_and_generates(tmp_path: Path, more: dict[str, object]):
    dense = tune_prune.open("tiny-llama", device="cpu")
    pruned = dense.prune("block_influence", ratio=0.4, seq_len=16, num_samples=8, **more)
    plan, geometry = pruned.plan, dense.geometry
    gone = sum(not a and not b for a, b in zip(plan.kept_groups, plan.kept_channels, strict=True))
    assert gone and 0 <= plan.target_params - plan.removed_params < geometry.channel_cost[0]
    pruned.save(tmp_path / "smaller")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
    assert loaded.config.num_hidden_layers == geometry.num_layers - gone
    norms = 2 * geometry.hidden_size * gone  # they go with such a layer
    assert sum(p.numel() for p in loaded.parameters()) == geometry.total_params - plan.removed_params - norms
    ids = torch.tensor([[5, 9, 11]])
    torch.testing.assert_close(loaded(ids).logits, pruned.model(ids).logits, rtol=0, atol=0)
    cached = loaded.generate(ids, max_new_tokens=6, do_sample=False)
    assert cached.tolist() == loaded.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False).tolist()
