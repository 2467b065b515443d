"""Taylor importance against the formula written as plain loops, against numbers worked out by hand, and its promises:
prefixes bit for bit, float32 sums, a model left as it was."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import near
from tune_prune.models.families import FAMILIES
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import GroupScores, PruningPlan, extreme_pruning_layers, pruning_comparison
from tune_prune.pruning.passes import batches
from tune_prune.pruning.passes.batches import batch_size
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics.taylor import LayerGradients, gradient_metrics, taylor

SEQ_LEN = 9


def windows(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def by_hand(model: nn.Module, samples: torch.Tensor) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """I of every group and the statistics of G, sample by sample and group by group, from the definition."""
    total: dict[str, torch.Tensor] = {}
    parameters = {n: p.detach().clone().requires_grad_(True) for n, p in model.named_parameters()}
    for sample in samples:
        logits = torch.func.functional_call(
            model, parameters, kwargs={"input_ids": sample[None], "use_cache": False}
        ).logits[0]
        loss = sum(-torch.log_softmax(logits[t], 0)[sample[t + 1]] for t in range(len(sample) - 1)) / (len(sample) - 1)
        grads = torch.autograd.grad(loss, list(parameters.values()))
        for name, grad in zip(parameters, grads, strict=True):
            total[name] = total.get(name, 0) + grad
    mean = {name: grad / len(samples) for name, grad in total.items()}
    salience = {name: (parameters[name] * mean[name]).abs().detach() for name in mean}
    attention, mlp, statistics = [], [], []
    family = FAMILIES[model.config.model_type]
    paths = family.projections()
    for layer in range(4):
        here = f"model.layers.{layer}."

        def rows(role: str, start: int, stop: int, here: str = here) -> float:
            value = salience[here + paths[role] + ".weight"][start:stop].sum()
            if here + paths[role] + ".bias" in salience:
                value = value + salience[here + paths[role] + ".bias"][start:stop].sum()
            return value.item()

        attention.append([])
        for k in range(4) if "attention" in family.prunes else ():
            score = rows("query", 12 * k, 12 * k + 12)
            score += rows("key", 6 * k, 6 * k + 6) + rows("value", 6 * k, 6 * k + 6)
            score += salience[here + "self_attn.o_proj.weight"][:, 12 * k : 12 * k + 12].sum().item()
            attention[-1].append(score)
        mlp.append([])
        for j in range(len(salience[f"{here}{paths['gate']}.weight"])):
            score = rows("gate", j, j + 1) + rows("up", j, j + 1)
            mlp[-1].append(score + salience[here + paths["down"] + ".weight"][:, j].sum().item())
        g = torch.cat([mean[f"{here}{path}.weight"].flatten() for path in paths.values()])
        statistics.append([g.abs().mean().item(), g.norm().item(), g.std(correction=0).item(), g.abs().max().item()])
    return attention, mlp, statistics


def test_importance_is_the_formula(tiny, variant):
    model, samples = tiny(variant), windows(5)
    found = taylor(model, FAMILIES[model.config.model_type], samples, [5])[5]
    attention, mlp, statistics = by_hand(model, samples)
    np.testing.assert_allclose(found.groups.attention, attention, rtol=near(variant, 1e-10))
    for own, expected in zip(found.groups.mlp, mlp, strict=True):
        np.testing.assert_allclose(own, expected, rtol=near(variant, 1e-10))
    gradients = found.gradients
    np.testing.assert_allclose(
        np.array([gradients.abs_mean, gradients.norm, gradients.std, gradients.abs_max]).T,
        statistics,
        rtol=near(variant, 1e-10),
    )
    assert all(score > 0 for layer in (*attention, *mlp) for score in layer)


def test_batching_does_not_matter(tiny, monkeypatch):
    model, samples = tiny("qwen2"), windows(7)
    whole = taylor(model, FAMILIES["qwen2"], samples, [7])[7].arrays()
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 2 * SEQ_LEN})
    batched = taylor(model, FAMILIES["qwen2"], samples, [7])[7].arrays()
    for name in whole:
        np.testing.assert_allclose(batched[name], whole[name], rtol=1e-11, atol=1e-17, err_msg=name)


def test_batches_depend_on_lengths_alone():
    assert [batch_size(s, "cpu") for s in (16, 17, 256, 1024, 100_000)] == [64, 32, 4, 1, 1]
    assert [batch_size(s, "cuda") for s in (16, 17, 256, 1024, 100_000)] == [128, 64, 8, 2, 1]


def test_bfloat16_gradients_are_summed_in_float32(tiny, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": SEQ_LEN})  # one sample a batch
    model, samples = tiny("mistral", torch.bfloat16), windows(24)
    found = taylor(model, FAMILIES["mistral"], samples, [24])[24].groups.mlp[1]

    mlp = model.model.layers[1].mlp.requires_grad_(True)
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    sums = {
        dtype: [torch.zeros_like(x.weight, dtype=dtype) for x in linears] for dtype in (torch.float32, torch.bfloat16)
    }
    for sample in samples:
        loss = F.cross_entropy(model(input_ids=sample[None], use_cache=False).logits[0, :-1].float(), sample[1:])
        for total, grads in (
            (sums[dtype], torch.autograd.grad(loss, [x.weight for x in linears], retain_graph=True)) for dtype in sums
        ):
            for one, grad in zip(total, grads, strict=True):
                one += grad
    score = {}
    for dtype, total in sums.items():
        gate, up, down = ((x.weight * (g / 24)).abs() for x, g in zip(linears, total, strict=True))
        score[dtype] = (gate.sum(1) + up.sum(1) + down.sum(0)).double().detach().numpy()
    np.testing.assert_array_equal(found, score[torch.float32])
    assert np.abs(found / score[torch.bfloat16] - 1).max() > 1e-3  # sums in bfloat16 would show


def test_ratios_of_hand_made_gradients():
    of_layers = LayerGradients(*map(np.array, ([1.0, 4.0], [3.0, 2.0], [0.5, 5.0], [0.0, 1.0])))
    ratios = {"grad_mean_ratio": 4.0, "grad_norm_ratio": 1.5, "grad_std_ratio": 10.0, "grad_max_ratio": math.inf}
    assert gradient_metrics(of_layers) == ratios | {"grad_mean_range": 3.0, "grad_norm_range": 1.0}


def test_what_each_layer_lost_adds_up_to_the_plan(tiny):
    geometry = read_geometry(tiny("qwen3"), FAMILIES["qwen3"])
    generator = np.random.default_rng(0)
    scores = GroupScores(tuple(generator.random(4) for _ in range(4)), tuple(generator.random(40) for _ in range(4)))
    plan = select(scores, geometry, 0.5)
    comparison = pruning_comparison(plan, geometry)
    assert sum(layer["params_before"] - layer["params_kept"] for layer in comparison["layers"]) == plan.removed_params
    more_than_half = sum(len(kept) < 20 for kept in plan.kept_channels)
    assert comparison["extreme_pruning_layers"] == extreme_pruning_layers(plan, geometry) == more_than_half
    half = PruningPlan(plan.kept_groups, (tuple(range(20)), tuple(range(19)), (), tuple(range(40))), 0, 0, 1)
    assert extreme_pruning_layers(half, geometry) == 2  # exactly half does not count
