"""Mixtures of experts: whole experts taken out, against the dense model whose router never takes them; and what scores them."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, StaticCache

from tests.conftest import MOE
from tests.residencies import WAYS, in_way
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import Infeasible, UserError
from tune_prune.models.families import FAMILIES, Family, decoder_layers
from tune_prune.models.geometry import Geometry, read_geometry
from tune_prune.pruning import shapes
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.methods import Dense, load_method, method_names
from tune_prune.pruning.selection import budget, in_two, select
from tune_prune.pruning.statistics import Need, load_statistic
from tune_prune.pruning.surgery import prune

FAMILY = FAMILIES["qwen3_moe"]
EXPERTS, TOP_K, WIDTH = MOE["num_experts"], MOE["num_experts_per_tok"], MOE["moe_intermediate_size"]
HIDDEN, GROUPS, GROUP_ROWS = 32, 4, 12  # rows of queries in a KV group
GATES_FISHER = ("gate_fisher", "fisher", "taylor")


def family_of(model: PreTrainedModel) -> Family:
    return FAMILIES[model.config.model_type]


def tokens(rows: int = 2, length: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def plan_of(geometry: Geometry) -> PruningPlan:
    """Another number of experts in every layer, one layer with no more than a token takes, and one without attention."""
    groups = ((0, 1, 2, 3), (), (1, 3), (0,))
    experts = ((0, 2, 3, 6), tuple(range(1, 7)), (1, 4, 5), tuple(range(7)))
    channels = tuple(
        kept if mixture else tuple(range(0, 40, 3)) for kept, mixture in zip(experts, geometry.mixtures, strict=True)
    )
    return PruningPlan(groups, channels, 0, 0, geometry.total_params)


def masked(model: PreTrainedModel, plan: PruningPlan) -> PreTrainedModel:
    """The dense model with zeros in place of what is removed, and minus infinity in place of a removed expert's logit."""
    reference = copy.deepcopy(model)
    for layer, groups, channels in zip(reference.model.layers, plan.kept_groups, plan.kept_channels, strict=True):
        for group in set(range(GROUPS)) - set(groups):
            layer.self_attn.o_proj.weight[:, group * GROUP_ROWS : (group + 1) * GROUP_ROWS] = 0
        mixture = family_of(model).mixture(layer)
        gone = sorted(set(range(mixture.count if mixture else 40)) - set(channels))
        if mixture is None:
            layer.mlp.down_proj.weight[:, gone] = 0
            continue

        def route(x: torch.Tensor, router: nn.Module = layer.mlp.gate, gone: list[int] = gone) -> tuple:
            logits = F.linear(x, router.weight)
            logits[:, gone] = -torch.inf
            weights, taken = logits.softmax(-1).topk(TOP_K)
            normed = getattr(router, "norm_topk_prob", True)  # Mixtral always divides by the sum of the chosen
            return logits, weights / weights.sum(-1, keepdim=True) if normed else weights, taken

        layer.mlp.gate.forward = route
    return reference


def route_in_float64(patch: pytest.MonkeyPatch) -> None:
    softmax, single = F.softmax, torch.Tensor.float
    patch.setattr(F, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim=dim))
    patch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))  # of Mixtral's


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's softmax as wide as the model, which takes it in float32 otherwise."""
    route_in_float64(monkeypatch)


@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_pruned_equals_dense_whose_router_never_takes_the_removed_experts(tiny, mixture):
    model = tiny(mixture)
    plan, ids = plan_of(read_geometry(model, family_of(model))), tokens()
    pruned, reference = prune(model, family_of(model), plan), masked(model, plan)
    expected = reference(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.1
    assert (expected - model(input_ids=ids, use_cache=False).logits).abs().max() > 0.1
    assert (pruned(input_ids=ids, use_cache=False).logits - expected).abs().max() <= 1e-10
    for static in (False, True):
        cache = StaticCache(config=pruned.config, max_cache_len=16) if static else None
        for start, stop in ((0, 6), (6, 10), (10, 11)):
            out = pruned(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert (out.logits - expected[:, start:stop]).abs().max() <= 1e-10
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    assert (pruned(**padded).logits - reference(**padded).logits)[mask.bool()].abs().max() <= 1e-10
    assert [len(layer.mlp.gate.weight) for layer in pruned.model.layers if family_of(model).mixture(layer)] == [
        len(kept)
        for layer, kept in zip(model.model.layers, plan.kept_channels, strict=True)
        if family_of(model).mixture(layer)
    ]


def test_costs_are_what_surgery_takes_out(tiny, mixture):
    model = tiny(mixture)
    geometry = read_geometry(model, family_of(model))
    expert = 3 * HIDDEN * WIDTH + HIDDEN
    assert [cost for cost, of in zip(geometry.channel_cost, geometry.mixtures, strict=True) if of] == [expert] * sum(
        geometry.mixtures
    )
    draw = np.random.default_rng(2)
    scores = GroupScores.of_layers([(draw.random(GROUPS), draw.random(width)) for width in geometry.mlp_width])
    for ratio in (0.1, 0.4):
        plan = select(scores, geometry, ratio)
        left = sum(p.numel() for p in prune(model, family_of(model), plan).parameters())
        assert geometry.total_params - left == plan.removed_params
        assert 0 <= int(ratio * geometry.total_params) - plan.removed_params < expert
        assert all(len(kept) >= TOP_K for kept, of in zip(plan.kept_channels, geometry.mixtures, strict=True) if of)


def test_a_layer_keeps_as_many_experts_as_a_token_takes(tiny):
    geometry = read_geometry(tiny("qwen3_moe"), FAMILY)
    most = shapes.removal_bounds(geometry, "free").most
    assert most == geometry.prunable_params
    with pytest.raises(Infeasible, match="3 experts of each mixture, as many as its router takes, embeddings"):
        budget(geometry, (most + 1) / geometry.total_params)
    scores = GroupScores.of_layers([(np.ones(GROUPS), np.zeros(EXPERTS))] * 4)
    plan = select(scores, geometry, most / geometry.total_params)
    assert set(map(len, plan.kept_channels)) == {TOP_K}


def test_uniform_leaves_one_number_of_experts_in_every_layer(tiny):
    model = tiny("qwen3_moe")
    geometry, draw = read_geometry(model, family_of(model)), np.random.default_rng(3)
    scores = GroupScores.of_layers([(draw.random(GROUPS), draw.random(EXPERTS)) for _ in range(4)])
    plan = select(scores, geometry, 0.3, "uniform")
    assert (
        len({(len(groups), len(kept)) for groups, kept in zip(plan.kept_groups, plan.kept_channels, strict=True)}) == 1
    )
    both = read_geometry(tiny("qwen3_moe-switched"), FAMILY)
    with pytest.raises(Infeasible, match="layer 1 has a plain MLP and layer 0 experts"):
        select(scores, both, 0.3, "uniform")


def test_a_mixture_has_shapes_of_its_own():
    mixtures = (True, True)
    assert shapes.resolve(shapes.BY_SIZE, None, 10**8, mixtures) == "free"
    assert shapes.resolve(shapes.BY_SIZE, None, 10**9, mixtures) == "uniform"
    assert shapes.resolve("uniform", None, 10**9, mixtures) == "uniform"
    assert shapes.resolve(shapes.BY_SIZE, None, 10**9, (True, False)) == "free"
    for shape in ("aligned", "aligned-64", "uniform-8"):
        with pytest.raises(UserError, match="counts MLP channels, and layers of this model have experts"):
            shapes.resolve(shape, None, 10**8, mixtures)


def routed(
    model: PreTrainedModel, windows: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]:
    """By layer: inputs [tokens, H], experts and weights [tokens, k] of its mixture; None of a plain MLP."""
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] = []
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: given.append(args))
        if family_of(model).mixture(layer)
        else layer.mlp.register_forward_pre_hook(lambda _, args: given.append(None))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=windows, use_cache=False)
    for handle in handles:
        handle.remove()
    return given


def statistic(name: str, model: PreTrainedModel, windows: torch.Tensor, kind: str = ""):
    need = Need(name, kind, len(windows))
    found = load_statistic(name)
    return found.value(found.collect(model, family_of(model), windows, [need])[need], need)


def test_reap_is_the_mean_of_what_an_expert_adds_where_it_is_taken(tiny, mixture):
    model, windows = tiny(mixture), tokens(5, 9)
    given = routed(model, windows)
    values = statistic("expert_outputs", model, windows)
    assert sorted(values) == [i for i, one in enumerate(given) if one is not None]
    for index, found in values.items():
        experts, sums, counts = model.model.layers[index].mlp.experts, np.zeros(EXPERTS), np.zeros(EXPERTS)
        for x, taken, weights in zip(*given[index], strict=True):
            for expert, weight in zip(taken.tolist(), weights, strict=True):
                gate, up = experts.gate_up_proj[expert] @ x[:, None], None
                up = gate[WIDTH:, 0]
                out = experts.down_proj[expert] @ (F.silu(gate[:WIDTH, 0]) * up)
                sums[expert] += (weight * out.square().sum().sqrt()).item()
                counts[expert] += 1
        assert np.allclose(found, sums / np.maximum(counts, 1), rtol=1e-10, atol=0)
    scores = load_method("reap").scores(
        Dense(model, family_of(model), read_geometry(model, family_of(model)), 0, {"expert_outputs": values})
    )
    least = min(part.min() for i, part in enumerate((*scores.attention, *scores.mlp)) if i - GROUPS not in values)
    assert least >= 1000 * max(part.max() for part in values.values())


def test_an_expert_that_no_token_takes_scores_0(tiny):
    model = tiny("qwen3_moe")
    model.model.layers[2].mlp.gate.weight[4] = 0
    model.model.layers[2].mlp.gate.weight[:4] += (
        100 * torch.randn(32, generator=torch.Generator().manual_seed(5)).double()
    )
    windows = tokens(1, 4)
    _, taken, _ = routed(model, windows)[2]
    absent = sorted(set(range(EXPERTS)) - set(taken.flatten().tolist()))
    assert absent
    assert (statistic("expert_outputs", model, windows)[2][absent] == 0).all()


@pytest.mark.parametrize("name", GATES_FISHER)
@pytest.mark.usefixtures("in_float64")
def test_scores_of_gradients_are_their_formulas(tiny, mixture, name):
    model, windows = tiny(mixture), tokens(3, 9)
    count = len(windows)
    summed = {p: torch.zeros_like(p) for layer in model.model.layers for p in family_of(model).group_weights(layer)}
    squares, gates = {p: torch.zeros_like(p) for p in summed}, [np.zeros(EXPERTS) for _ in model.model.layers]
    for sample in windows:
        watched: dict[int, torch.Tensor] = {}
        handles = []
        for index, layer in enumerate(model.model.layers):
            if family_of(model).mixture(layer) is None:
                continue

            # A gate of ones in front of every expert, of which the gradient is taken.
            def gated(_: nn.Module, args: tuple, index: int = index, watched: dict = watched) -> tuple:
                x, taken, weights = args
                gate = torch.ones(EXPERTS, dtype=torch.float64, requires_grad=True)
                watched[index] = gate
                return x, taken, weights * gate[taken]

            handles.append(layer.mlp.experts.register_forward_pre_hook(gated))
        for p in summed:
            p.requires_grad_(True)
        logits = model(input_ids=sample[None], use_cache=False).logits[0, :-1]
        F.cross_entropy(logits, sample[1:]).backward()
        for p in summed:
            summed[p] += p.grad / count
            squares[p] += (p.detach() * p.grad).square() / count
            p.grad = None
            p.requires_grad_(False)
        for index, gate in watched.items():
            gates[index] += gate.grad.square().numpy() / count
        for handle in handles:
            handle.remove()
    found = statistic(name, model, windows)
    for index, layer in enumerate(model.model.layers):
        mixture_of = family_of(model).mixture(layer)
        if mixture_of is None:
            continue
        by_weight = {
            "taylor": lambda p: (p.detach() * summed[p]).abs(),
            "fisher": lambda p: squares[p],
        }
        if name == "gate_fisher":
            expected = gates[index]
        else:
            expected = sum(by_weight[name](p).flatten(1).sum(1).numpy() for p in (mixture_of.gate_up, mixture_of.down))
        assert np.allclose(found.mlp[index][:, 0], expected, rtol=1e-9, atol=1e-15)
        if name != "gate_fisher":
            by_channel = sum(
                by_weight[name](p).unflatten(1, (2, WIDTH)).sum((1, 3))
                if p is mixture_of.gate_up
                else by_weight[name](p).sum(1)
                for p in (mixture_of.gate_up, mixture_of.down)
            )
            assert np.allclose(found.mlp[index][:, 1:], by_channel.numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", ["expert_outputs", "gate_fisher", "taylor"])
def test_statistics_have_the_same_bits_in_every_way_to_hold_the_model(tiny, mixture, name):
    model, windows, found = tiny(mixture, torch.float32), tokens(5, 9), load_statistic(name)
    needs = [Need(name, "", count) for count in (2, 5)]
    whole = found.collect(model, family_of(model), windows, needs)
    for way in WAYS[1:]:
        held, residency = in_way(model, way)
        for need, arrays in found.collect(held, family_of(model), windows, needs, residency).items():
            assert arrays.keys() == whole[need].keys()
            for array, values in arrays.items():
                np.testing.assert_array_equal(values, whole[need][array], err_msg=f"{way} {need} {array}")


def test_magnitude_is_the_mean_weight_of_an_expert(tiny):
    model = tiny("qwen3_moe")
    geometry = read_geometry(model, family_of(model))
    found = load_method("magnitude").scores(Dense(model, family_of(model), geometry, 0, {}))
    experts = model.model.layers[1].mlp.experts
    for expert in range(EXPERTS):
        total = experts.gate_up_proj[expert].abs().sum() + experts.down_proj[expert].abs().sum()
        assert found.mlp[1][expert] == pytest.approx(total.item() / (3 * HIDDEN * WIDTH + HIDDEN))


def test_methods_that_cannot_score_a_model_say_which_can():
    mixtures, plain = (True, False), (False, False)
    refused = {name for name in method_names() if name != "reap"} - {
        "blockwise", "block_influence", "fisher", "gate_fisher", "layerwise", "magnitude", "random", "taylor",
    }  # fmt: skip
    assert refused == {"flap", "kfac", "wanda_sp"}
    for name in method_names():
        method = load_method(name)
        if name in refused:
            with pytest.raises(
                UserError, match=r"experts have none of their own; for m use one of block_influence, .*reap"
            ):
                method.check_experts(mixtures, "m")
        else:
            method.check_experts(mixtures, "m")
    with pytest.raises(UserError, match=r"reap scores experts, and this model has none; for m use one of .*wanda_sp$"):
        load_method("reap").check_experts(plain, "m")


@pytest.mark.parametrize("method", ["layerwise", "blockwise", "block_influence", "random"])
def test_other_methods_score_every_expert(tiny, mixture, method):
    model, windows = tiny(mixture), tokens(2, 8)
    geometry, chosen = read_geometry(model, family_of(model)), load_method(method)
    values = {}
    for name in chosen.statistics:
        of, _, kind = name.partition(":")
        values[name] = statistic(of, model, windows, kind)
    scores = chosen.scores(Dense(model, family_of(model), geometry, 0, values))
    assert [len(part) for part in scores.mlp] == list(geometry.mlp_width)
    left = prune(model, family_of(model), select(scores, geometry, 0.3))
    assert len(decoder_layers(left, family_of(left))) == 4


def inner_scores(model: PreTrainedModel) -> GroupScores:
    return load_method("magnitude").scores(
        Dense(model, family_of(model), read_geometry(model, family_of(model)), 0, {})
    )


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_channels_inside_of_experts_are_those_of_a_dense_model_with_zeros(tiny, mixture, share):
    model = tiny(mixture)
    geometry, scores = read_geometry(model, family_of(model)), inner_scores(model)
    target = budget(geometry, 0.2, whole_experts=share)
    plan = in_two(scores, geometry, target, share, "free")
    assert PruningPlan.from_dict(plan.to_dict()) == plan
    reference = masked(model, plan)
    for layer, kept, inside in zip(reference.model.layers, plan.kept_channels, plan.inside(), strict=True):
        for expert, channels in zip(kept, inside, strict=bool(inside)):
            gone = sorted(set(range(WIDTH)) - set(channels))
            layer.mlp.experts.down_proj[expert, :, gone] = 0
    pruned = prune(model, family_of(model), plan)
    assert sum(p.numel() for p in pruned.parameters()) == geometry.total_params - plan.removed_params
    assert 0 <= target - plan.removed_params < 3 * HIDDEN * EXPERTS  # a rank of a layer
    whole = sum(
        (width - len(kept)) * cost
        for kept, width, cost in zip(plan.kept_channels, geometry.mlp_width, geometry.channel_cost, strict=True)
    )
    assert share or whole == 0
    with pytest.MonkeyPatch.context() as patch:
        route_in_float64(patch)
        expected = reference(input_ids=tokens(), use_cache=False).logits
        assert (pruned(input_ids=tokens(), use_cache=False).logits - expected).abs().max() <= 1e-10


def test_ranks_of_channels_go_by_their_mean_scores(tiny):
    """Two layers of three experts of four channels by hand; each rank costs 3 H a kept expert."""
    geometry = replace(
        read_geometry(tiny("qwen3_moe"), FAMILY),
        kv_heads=(1, 1), group_cost=(10**6,) * 2, last_group_extra=(0, 0), cache_layers=(0,), total_params=10_000,
        mlp_width=(3, 3), channel_cost=(416, 416), expert_width=(4, 4), experts_per_token=1,
    )  # fmt: skip
    channels = (
        np.array([[4.0, 1, 2, 3], [1, 2, 3, 4], [9, 9, 9, 9]]),  # ranks of the first two: 1, 2, 3, 4
        np.array([[1.5, 8, 8, 8], [8, 8, 2.5, 8], [8, 8, 8, 2]]),  # of all: 2, 8, 8, 8
    )
    scores = GroupScores((np.array([9.0]),) * 2, (np.array([1.0, 2, 0]), np.array([5.0, 5, 5])), channels)
    cost = 3 * HIDDEN
    plan = in_two(scores, geometry, 416 + 2 * cost + 3 * cost + 2 * cost + 10, 0.4, "free")
    assert plan.kept_channels == ((0, 1), (0, 1, 2)) and plan.kept_groups == ((0,), (0,))
    assert plan.kept_expert_channels == (((0, 3), (2, 3)), ((1, 2, 3), (0, 1, 3), (0, 1, 2)))
    assert plan.removed_params == 416 + 2 * 2 * cost + 3 * cost
    uniform = in_two(scores, replace(geometry, uniform_kv_heads=(1,)), 2 * 416 + 4 * cost + 10, 0.7, "uniform")
    assert [len(kept) for kept in uniform.kept_channels] == [2, 2]
    assert {len(kept) for layer in uniform.kept_expert_channels for kept in layer} == {3}


def test_many_channels_go_eight_at_once(tiny):
    geometry = replace(read_geometry(tiny("qwen3_moe"), FAMILY), expert_width=(64,) * 4, channel_cost=(6176,) * 4)
    draw = np.random.default_rng(4)
    scores = GroupScores(
        (np.ones(GROUPS),) * 4, (np.ones(EXPERTS),) * 4, tuple(draw.random((EXPERTS, 64)) for _ in range(4))
    )
    plan = in_two(scores, geometry, 60_000, 0.0, "free")
    assert all(len(kept) % 8 == 0 for layer in plan.kept_expert_channels for kept in layer)
    assert 0 <= 60_000 - plan.removed_params < 8 * 3 * HIDDEN * EXPERTS


def test_a_part_that_experts_or_their_channels_cannot_give_is_refused(tiny):
    geometry = read_geometry(tiny("qwen3_moe"), FAMILY)
    with pytest.raises(
        Infeasible, match=r"whole_experts 0 leaves [\d,]+ parameters to channels inside of experts, and 40,320 can"
    ):
        budget(geometry, 0.65, whole_experts=0.0)
    with pytest.raises(Infeasible, match=r"to whole experts and attention, and [\d,]+ can go; ask for less of both"):
        budget(geometry, 0.95, whole_experts=0.99)
    for method, mixtures, says in (
        ("reap", (True,), "reap scores no channels inside of experts; leave it out, or use .*magnitude.*taylor"),
        ("taylor", (False,), "no layer of m has experts; leave it out"),
    ):
        with pytest.raises(UserError, match=says):
            load_method(method).check_whole_experts(PruningConfig(method, 8, 8, whole_experts=0.5), mixtures, "m")
    steps = PruningConfig("taylor", 8, 8, whole_experts=0.5, steps=2)
    with pytest.raises(UserError, match="steps is 2, and channels inside of experts go in one"):
        load_method("taylor").check_whole_experts(steps, (True,), "m")
