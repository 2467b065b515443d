"""Taylor importance against the formula written as plain loops, against numbers worked out by hand, and its promises:
prefixes bit for bit, float32 sums, a model left as it was."""

from __future__ import annotations

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.residencies import in_way
from tune_prune.models.families import FAMILIES, Family
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import GroupScores, PruningPlan, extreme_pruning_layers, pruning_comparison
from tune_prune.pruning.passes import batches
from tune_prune.pruning.passes.batches import batch_size
from tune_prune.pruning.selection import select
from tune_prune.pruning.statistics import taylor as module
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
    for layer in range(4):
        here = f"model.layers.{layer}."

        def rows(name: str, start: int, stop: int, here: str = here) -> float:
            value = salience[here + name + ".weight"][start:stop].sum()
            if here + name + ".bias" in salience:
                value = value + salience[here + name + ".bias"][start:stop].sum()
            return value.item()

        attention.append([])
        for k in range(4):
            score = rows("self_attn.q_proj", 12 * k, 12 * k + 12)
            score += rows("self_attn.k_proj", 6 * k, 6 * k + 6) + rows("self_attn.v_proj", 6 * k, 6 * k + 6)
            score += salience[here + "self_attn.o_proj.weight"][:, 12 * k : 12 * k + 12].sum().item()
            attention[-1].append(score)
        mlp.append([])
        for j in range(40):
            score = rows("mlp.gate_proj", j, j + 1) + rows("mlp.up_proj", j, j + 1)
            mlp[-1].append(score + salience[here + "mlp.down_proj.weight"][:, j].sum().item())
        weights = [name for name in mean if name.startswith(here) and "_proj.weight" in name]
        g = torch.cat([mean[name].flatten() for name in weights])
        statistics.append([g.abs().mean().item(), g.norm().item(), g.std(correction=0).item(), g.abs().max().item()])
    return attention, mlp, statistics


def test_importance_is_the_formula(tiny, variant):
    model, samples = tiny(variant), windows(5)
    found = taylor(model, FAMILIES[model.config.model_type], samples, [5])[5]
    attention, mlp, statistics = by_hand(model, samples)
    np.testing.assert_allclose(found.groups.attention, attention, rtol=1e-10)
    np.testing.assert_allclose(found.groups.mlp, mlp, rtol=1e-10)
    gradients = found.gradients
    np.testing.assert_allclose(
        np.array([gradients.abs_mean, gradients.norm, gradients.std, gradients.abs_max]).T, statistics, rtol=1e-10
    )
    assert min(map(min, attention)) > 0 and min(map(min, mlp)) > 0


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


class _LinearToy(nn.Module):
    """logits [s, 0] with s the sum of all weights: with s = 0 every weight's gradient is -1/2 for token 0 and 1/2 for
    token 1. One layer, hidden size 2, two heads of width 1, two MLP channels."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=2, hidden_size=2)
        self.get_output_embeddings = lambda: None
        self.model = nn.Module()
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.self_attn.head_dim = 1
        self.model.layers = nn.ModuleList([layer])
        weights = {
            "self_attn.q_proj": [[1, -1], [2, -2]],
            "self_attn.k_proj": [[1, -1], [2, -2]],
            "self_attn.v_proj": [[1, -1], [2, -2]],
            "self_attn.o_proj": [[1, 3], [-1, -3]],
            "mlp.gate_proj": [[1, -1], [0, 0]],
            "mlp.up_proj": [[2, -2], [1, -1]],
            "mlp.down_proj": [[1, 5], [-1, -5]],
        }
        for path, values in weights.items():
            block, name = path.split(".")
            linear = nn.Linear(2, 2, bias=False)
            linear.weight.data = torch.tensor(values, dtype=torch.float32)
            setattr(getattr(layer, block), name, linear)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        s = sum(p.sum() for p in self.parameters())
        return SimpleNamespace(logits=torch.stack([s, 0 * s]).expand(*input_ids.shape, 2))


def test_numbers_worked_out_by_hand():
    zeros, ones = [0, 0, 0], [1, 1, 1]
    result = taylor(_LinearToy(), Family("toy"), torch.tensor([zeros, ones, zeros]), [1, 2, 3])
    # |w * G| with |G| = 1/2: rows 2 + 2 + 2 and column 2 of the first group, 4 + 4 + 4 and 6 of the second, halved
    np.testing.assert_allclose(result[1].groups.attention, [[4, 9]], rtol=1e-6)
    np.testing.assert_allclose(result[1].groups.mlp, [[4, 6]], rtol=1e-6)
    np.testing.assert_allclose(result[1].gradients.abs_mean, [0.5], rtol=1e-6)
    np.testing.assert_allclose(result[1].gradients.norm, [math.sqrt(7)], rtol=1e-6)  # 28 weights of (1/2)^2
    np.testing.assert_allclose(result[1].gradients.std, [0], atol=1e-6)
    np.testing.assert_allclose(result[1].gradients.abs_max, [0.5], rtol=1e-6)
    # signed sums: the second sample cancels the first, the third leaves a third of one
    np.testing.assert_allclose(result[2].groups.attention, [[0, 0]], atol=1e-7)
    np.testing.assert_allclose(result[3].groups.attention, [[4 / 3, 3]], rtol=1e-6)
    np.testing.assert_allclose(result[3].groups.mlp, [[4 / 3, 2]], rtol=1e-6)


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-biases-tied"])
def test_a_dead_channel_and_a_dead_head_go_first(tiny, variant):
    model = tiny(variant)
    model.model.layers[1].mlp.down_proj.weight[:, 7] = 0
    model.model.layers[2].self_attn.o_proj.weight[:, 12 * 3 : 12 * 4] = 0
    family = FAMILIES[model.config.model_type]
    geometry = read_geometry(model, family)
    scores = taylor(model, family, windows(4), [4])[4].groups.per_parameter(geometry)
    dead = geometry.group_cost[2] + geometry.channel_cost[1]
    plan = select(scores, geometry, (dead + 0.5) / geometry.total_params)
    assert plan.removed_params == dead
    assert set(range(40)) - set(plan.kept_channels[1]) == {7} and set(range(4)) - set(plan.kept_groups[2]) == {3}


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-biases-tied"])
def test_shuffled_channels_and_heads_have_shuffled_scores(tiny, variant):
    model, family = tiny(variant), FAMILIES[tiny(variant).config.model_type]
    before = taylor(model, family, windows(4), [4])[4].groups
    generator = torch.Generator().manual_seed(5)
    channels, groups = torch.randperm(40, generator=generator), torch.tensor([2, 0, 3, 1])
    layer = model.model.layers[1]

    def permute(linear: nn.Linear, order: torch.Tensor, columns: bool = False) -> None:
        linear.weight.data = linear.weight.data[:, order] if columns else linear.weight.data[order]
        if linear.bias is not None and not columns:
            linear.bias.data = linear.bias.data[order]

    permute(layer.mlp.gate_proj, channels)
    permute(layer.mlp.up_proj, channels)
    permute(layer.mlp.down_proj, channels, columns=True)
    of_queries, of_keys = (torch.cat([torch.arange(w * k, w * k + w) for k in groups.tolist()]) for w in (12, 6))
    permute(layer.self_attn.q_proj, of_queries)
    permute(layer.self_attn.k_proj, of_keys)
    permute(layer.self_attn.v_proj, of_keys)
    permute(layer.self_attn.o_proj, of_queries, columns=True)

    after = taylor(model, family, windows(4), [4])[4].groups
    for index in range(4):
        shuffled = (groups.numpy(), channels.numpy()) if index == 1 else (slice(None), slice(None))
        np.testing.assert_allclose(after.attention[index], before.attention[index][shuffled[0]], rtol=1e-10)
        np.testing.assert_allclose(after.mlp[index], before.mlp[index][shuffled[1]], rtol=1e-10)


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


def test_the_sums_of_one_layer_are_there_at_a_time(tiny, monkeypatch):
    """With the garbage collector off: what hooks hold in a circle would stay."""
    made: dict[int, weakref.ref[torch.Tensor]] = {}
    seen = []
    original = module._Accumulator.results

    def results(sums: module._Accumulator, num_samples: int):
        made.update({id(one): weakref.ref(one) for one in sums.sums.values()})
        seen.append(sum(one() is not None for one in made.values()))
        return original(sums, num_samples)

    monkeypatch.setattr(module._Accumulator, "results", results)
    held, residency = in_way(tiny("llama"), "by layer")
    gc.disable()
    try:
        taylor(held, FAMILIES["llama"], windows(4), [3, 4], residency)
    finally:
        gc.enable()
    assert seen == 4 * 2 * [7]  # layers, snapshots, projections
