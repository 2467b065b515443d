"""`fisher` and `gate_fisher` against plain loops: one sample at a time through the whole model, by autograd of what they are of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import near
from tune_prune.models.families import FAMILIES, decoder_layers
from tune_prune.pruning.groups import GroupScores
from tune_prune.pruning.statistics import Need, load_statistic

SEQ_LEN = 9
KV_HEADS = 4  # of the tiny models, whose groups have two query heads of 6


def windows(count: int) -> Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(5))


def collected(name: str, model: nn.Module, samples: Tensor) -> GroupScores:
    statistic, need = load_statistic(name), Need(name, "", len(samples))
    return statistic.value(statistic.collect(model, FAMILIES[model.config.model_type], samples, [need])[need], need)


def loss(model: nn.Module, sample: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=sample[None]).logits[0, :-1], sample[1:])


def gate_information(model: nn.Module, samples: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean over samples of the squared derivatives by factors in front of o's and down's inputs, which are one."""

    def scaled(gates: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (args[0] * gates.repeat_interleave(args[0].shape[-1] // len(gates)),)

    gates, handles = [], []
    family = FAMILIES[model.config.model_type]
    for layer in decoder_layers(model, family):
        for role in ("output", "down"):
            if (linear := family.linears(layer).get(role)) is not None:
                count = KV_HEADS if role == "output" else linear.in_features
                gates.append(torch.ones(count, dtype=torch.float64, requires_grad=True))
                handles.append(linear.register_forward_pre_hook(partial(scaled, gates[-1])))
    squares = [torch.autograd.grad(loss(model, sample), gates) for sample in samples]
    for handle in handles:
        handle.remove()
    means = [torch.stack(one).square().mean(0).numpy() for one in zip(*squares, strict=True)]
    if "attention" not in family.prunes:
        return [(np.empty(0), mean) for mean in means]
    return list(zip(means[::2], means[1::2], strict=True))


def weight_information(model: nn.Module, samples: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sums over the weights of every group of w^2 times the mean over samples of squared gradients."""
    parameters = dict(model.named_parameters())
    gradients = []
    for sample in samples:
        for p in parameters.values():
            p.requires_grad_(True)
        found = torch.autograd.grad(loss(model, sample), list(parameters.values()))
        gradients.append(dict(zip(parameters, found, strict=True)))
    for p in parameters.values():
        p.requires_grad_(False)
    information = {
        name: (p * torch.stack([one[name] for one in gradients])).square().mean(0) for name, p in parameters.items()
    }
    found, family = [], FAMILIES[model.config.model_type]
    paths, kv_heads = family.projections(), KV_HEADS if "attention" in family.prunes else 0
    for index in range(len(decoder_layers(model, family))):
        own = {
            name.split(f"layers.{index}.")[1]: value
            for name, value in information.items()
            if f"layers.{index}." in name
        }
        attention, mlp = np.zeros(kv_heads), np.zeros(len(own[f"{paths['gate']}.weight"]))
        for k in range(kv_heads):
            attention[k] += float(own[f"{paths['output']}.weight"][:, 12 * k : 12 * k + 12].sum())
            for role, width in (("query", 12), ("key", 6), ("value", 6)):
                for kind in ("weight", "bias"):
                    if (value := own.get(f"{paths[role]}.{kind}")) is not None:
                        attention[k] += float(value[width * k : width * k + width].sum())
        for j in range(len(mlp)):
            mlp[j] += float(own[f"{paths['down']}.weight"][:, j].sum())
            for role in ("gate", "up"):
                for kind in ("weight", "bias"):
                    if (value := own.get(f"{paths[role]}.{kind}")) is not None:
                        mlp[j] += float(value[j].sum())
        found.append((attention, mlp))
    return found


@pytest.mark.parametrize(("name", "truth"), [("gate_fisher", gate_information), ("fisher", weight_information)])
def test_it_is_the_formula(tiny, variant: str, name: str, truth: Callable[..., list[tuple[np.ndarray, np.ndarray]]]):
    model, samples = tiny(variant, torch.float64), windows(5)
    found = collected(name, model, samples)
    for index, (attention, mlp) in enumerate(truth(model, samples)):
        np.testing.assert_allclose(found.attention[index], attention, rtol=near(variant, 1e-9), atol=1e-18)
        np.testing.assert_allclose(found.mlp[index], mlp, rtol=near(variant, 1e-9), atol=1e-18)


def test_in_bfloat16_squares_are_summed_in_float64(tiny):
    """One sample alone many times adds as often, which sums in bfloat16 would stop at some hundreds."""
    model, sample = tiny("mistral", torch.bfloat16), windows(1)
    once, often = collected("gate_fisher", model, sample), collected("gate_fisher", model, sample.expand(64, -1))
    for one, other in zip(once.mlp, often.mlp, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05)


def test_the_gate_of_an_only_group_is_behind_the_norm_behind_it(tiny):
    """In front of that norm it would change nothing, and whole attentions would seem to cost nothing."""
    model, samples = tiny("gemma3_text", torch.float64, num_key_value_heads=1), windows(5)
    gates = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in model.model.layers]
    handles = [
        layer.post_attention_layernorm.register_forward_hook(lambda _, __, output, gate=gate: output * gate)
        for layer, gate in zip(model.model.layers, gates, strict=True)
    ]
    squares = torch.tensor([torch.autograd.grad(loss(model, sample), gates) for sample in samples]).square().mean(0)
    for handle in handles:
        handle.remove()
    found = np.concatenate(collected("gate_fisher", model, samples).attention)
    np.testing.assert_allclose(found, squares.numpy(), rtol=near("gemma3_text", 1e-9))
    assert squares.min() > 1e-6
