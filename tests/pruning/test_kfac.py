"""`kfac` against plain loops over tokens, and against the least that other weights cost by the whole curvature, written out."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import attends, near
from tune_prune.models.families import FAMILIES, decoder_layers
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.pruning.statistics import kfac as module

SEQ_LEN = 9
GROUPS = {
    "output": 4,
    "down": None,
}  # of the tiny models: KV groups, of two query heads of 6; channels, as many as inputs


def windows(count: int) -> Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(7))


def collected(model: nn.Module, samples: Tensor) -> GroupScores:
    statistic, need = load_statistic("kfac"), Need("kfac", "", len(samples))
    return statistic.value(statistic.collect(model, FAMILIES[model.config.model_type], samples, [need])[need], need)


def factors(model: nn.Module, samples: Tensor) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A with its damping, G and W of o of the first layer, down of the first layer, o of the second, ..., by sums over tokens."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watch(place: int, _: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.detach().requires_grad_() if not output.requires_grad else output
        output.retain_grad()
        seen[place] = args[0].detach()[0], output
        return output

    family = FAMILIES[model.config.model_type]
    linears = [
        part
        for layer in decoder_layers(model, family)
        for role, part in family.linears(layer).items()
        if role in GROUPS
    ]
    handles = [linear.register_forward_hook(partial(watch, place)) for place, linear in enumerate(linears)]
    sums = [[np.zeros((n, n)) for n in (linear.in_features, linear.out_features)] for linear in linears]
    for sample in samples:
        F.cross_entropy(model(input_ids=sample[None]).logits[0, :-1], sample[1:]).backward()
        for place, (inputs, output) in seen.items():
            for a, g in zip(inputs.numpy(), output.grad[0].numpy(), strict=True):
                sums[place][0] += np.outer(a, a)
                sums[place][1] += np.outer(g, g)
    for handle in handles:
        handle.remove()
    found = []
    for linear, pair in zip(linears, sums, strict=True):
        a, g = (total / samples.numel() for total in pair)
        a += 0.01 * np.mean(np.diag(a)) * np.eye(len(a))
        found.append((a, g, linear.weight.numpy()))
    return found


def losses_by_loop(a: np.ndarray, g: np.ndarray, weight: np.ndarray, groups: int) -> list[float]:
    inverse, size = np.linalg.inv(a), len(a) // groups
    found = []
    for start in range(0, len(a), size):
        columns = range(start, start + size)
        part = weight[:, columns]
        found.append(np.trace(part.T @ g @ part @ np.linalg.inv(inverse[np.ix_(columns, columns)])))
    return found


def least_cost(a: np.ndarray, g: np.ndarray, weight: np.ndarray, columns: range) -> float:
    """The least of d^T F d, F the Kronecker product of both, among changes d of all weights that make those columns zero."""
    curvature = np.kron(g, a)
    change = np.zeros_like(weight)
    change[:, columns] = -weight[:, columns]
    gone = np.zeros(weight.shape, dtype=bool)
    gone[:, columns] = True
    change, gone = change.ravel(), gone.ravel()
    right = -curvature[np.ix_(~gone, gone)] @ change[gone]
    change[~gone] = np.linalg.solve(curvature[np.ix_(~gone, ~gone)], right)
    return change @ curvature @ change


def test_it_is_the_formula(tiny, variant: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "AT_ONCE", 30)  # two KV groups at a time; 30 channels, and 10
    model, samples = tiny(variant, torch.float64), windows(6)
    found = collected(model, samples)
    by_place = [part for layer in zip(found.attention, found.mlp, strict=True) for part in layer if len(part)]
    groups = [*GROUPS.values()][0 if attends(variant) else 1 :] * 4
    for losses, (a, g, weight), count in zip(by_place, factors(model, samples), groups, strict=True):
        assert losses.dtype == np.float64 and (losses > 0).all()
        np.testing.assert_allclose(losses, losses_by_loop(a, g, weight, count or len(a)), rtol=near(variant, 1e-9))


def test_no_weights_that_make_up_for_a_group_cost_less(tiny):
    model, samples = tiny("llama", torch.float64), windows(6)
    found, by_place = collected(model, samples), factors(model, samples)
    for layer in (0, 2):
        for group in (0, 3):
            cost = least_cost(*by_place[2 * layer], range(12 * group, 12 * group + 12))
            assert found.attention[layer][group] == pytest.approx(cost, rel=1e-6)
        for channel in (0, 17):
            cost = least_cost(*by_place[2 * layer + 1], range(channel, channel + 1))
            assert found.mlp[layer][channel] == pytest.approx(cost, rel=1e-6)


def test_in_bfloat16_sums_are_in_float32(tiny):
    """One sample alone many times adds as often, which sums in bfloat16 would stop at some hundreds."""
    model, sample = tiny("mistral", torch.bfloat16), windows(1)
    once, often = collected(model, sample), collected(model, sample.expand(64, -1))
    for one, other in zip((*once.mlp, *once.attention), (*often.mlp, *often.attention), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05)
