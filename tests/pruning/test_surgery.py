"""Surgery against an independent truth: the dense model in which the removed groups' o and down columns are zero.

A removed group reaches the residual stream through those columns only, so in float64 the two must agree to rounding.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, StaticCache

from tests.conftest import VARIANTS, attends
from tune_prune.core.errors import Infeasible
from tune_prune.models.families import FAMILIES, Family
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import GroupScores, PruningPlan
from tune_prune.pruning.selection import select
from tune_prune.pruning.surgery import prune

LAYERS, GROUPS, CHANNELS, HEAD_DIM, QUERIES_PER_KV = 4, 4, 40, 6, 2
TOLERANCE = 1e-10
ALL_GROUPS, ALL_CHANNELS = tuple(range(GROUPS)), tuple(range(CHANNELS))

# Kept groups and channels, layer by layer. Layers 0 and 2 keep a group: the first of each attention type of any variant.
KEEP_SETS: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]] = {
    "nothing removed": ((ALL_GROUPS,) * LAYERS, (ALL_CHANNELS,) * LAYERS),
    "different in every layer": (
        ((1, 3), (0,), (0, 1, 2), (2,)),
        (tuple(range(0, 40, 3)), (7,), tuple(range(5, 25)), ALL_CHANNELS),
    ),
    "attention of a middle layer": ((ALL_GROUPS, (), ALL_GROUPS, (0, 2)), (ALL_CHANNELS,) * LAYERS),
    "MLP of a middle layer": (((3,), ALL_GROUPS, (1, 2), ALL_GROUPS), (ALL_CHANNELS, (), (0, 39), ALL_CHANNELS)),
    "both of a middle layer": (((0, 1), (), (3,), ALL_GROUPS), ((3, 4, 39), (), ALL_CHANNELS, (1,))),
    "all but one group": (((2,), (), (1,), ()), ((), (), (), ())),
}


def removed_params(model: PreTrainedModel, family: Family, groups: tuple, channels: tuple) -> int:
    """Count the weights that a keep-set removes, one by one."""
    total = 0
    for layer, kept_groups, kept_channels in zip(model.model.layers, groups, channels, strict=True):
        hidden = model.config.hidden_size
        part = family.linears(layer)
        query_rows = QUERIES_PER_KV * HEAD_DIM
        lost_groups = GROUPS - len(kept_groups)
        lost_channels = part["down"].in_features - len(kept_channels)
        if "attention" in family.prunes:
            for role, rows in (("query", query_rows), ("key", HEAD_DIM), ("value", HEAD_DIM)):
                total += lost_groups * rows * (hidden + (part[role].bias is not None))
            total += lost_groups * query_rows * hidden  # columns of o
            if not kept_groups:
                total += HEAD_DIM * len(family.head_norms)
        for linear in (part["gate"], part["up"]):
            total += lost_channels * (hidden + (linear.bias is not None))
        total += lost_channels * hidden  # columns of down
    return total


def plan_of(model: PreTrainedModel, family: Family, groups: tuple, channels: tuple) -> PruningPlan:
    """The plan of a keep-set; of a family whose attention stays whole, that of its channels."""
    if "attention" not in family.prunes:
        groups = ((),) * len(groups)
    removed = removed_params(model, family, groups, channels)
    return PruningPlan(groups, channels, removed, removed, sum(p.numel() for p in model.parameters()))


def zeroed(model: PreTrainedModel, plan: PruningPlan) -> PreTrainedModel:
    """The dense model with the o and down columns of all removed groups set to zero."""
    reference, family = copy.deepcopy(model), FAMILIES[model.config.model_type]
    width = QUERIES_PER_KV * HEAD_DIM
    for layer, groups, channels in zip(reference.model.layers, plan.kept_groups, plan.kept_channels, strict=True):
        part = family.linears(layer)
        for group in set(ALL_GROUPS) - set(groups) if "attention" in family.prunes else ():
            part["output"].weight[:, group * width : (group + 1) * width] = 0
        for channel in set(range(part["down"].in_features)) - set(channels):
            part["down"].weight[:, channel] = 0
    return reference


def tokens(rows: int = 2, length: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def cached_logits(model: PreTrainedModel, ids: torch.Tensor, chunks: list[int], static: bool) -> torch.Tensor:
    """Logits [B, T, V] of decoding `ids` with a cache, `chunks` tokens at a time."""
    cache = StaticCache(config=model.config, max_cache_len=16) if static else None
    parts, start = [], 0
    for size in chunks:
        out = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, start + size
        parts.append(out.logits)
    assert start == ids.shape[1]
    return torch.cat(parts, dim=1)


# Every variant in the set that cuts every layer another way, and every set in two of them.
CASES = [(variant, "different in every layer", "sdpa") for variant in VARIANTS]
CASES += [(variant, keep, "sdpa") for variant in ("qwen2-sliding", "granite-biases-tied") for keep in KEEP_SETS]
CASES += [("llama-biases", "both of a middle layer", "eager"), ("qwen2-sliding", "all but one group", "eager")]


@torch.no_grad()
@pytest.mark.parametrize(("variant", "keep", "attention"), dict.fromkeys(CASES))
def test_pruned_equals_dense_with_zeroed_columns(tiny, variant, keep, attention, monkeypatch):
    # eager attention takes its softmax in float32 whatever the model's dtype, which would hide differences below 1e-7
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))
    model = tiny(variant, attn_implementation=attention)
    family = FAMILIES[model.config.model_type]
    plan = plan_of(model, family, *KEEP_SETS[keep])
    pruned, reference, ids = prune(model, family, plan), zeroed(model, plan), tokens()
    assert sum(p.numel() for p in pruned.parameters()) == plan.total_params - plan.removed_params

    expected = reference(input_ids=ids, use_cache=False).logits
    plain = pruned(input_ids=ids, use_cache=False).logits
    assert (plain - expected).abs().max() <= TOLERANCE
    assert expected.std() > 0.1  # the comparison is not one of zeros

    for chunks in ([1] * ids.shape[1], [6, 4, 1]):
        for static in (False, True)[: 1 + model._can_compile_fullgraph]:  # Falcon-H1 has no static cache
            if family.recurrent:  # whose states are in float32, and computed otherwise token by token
                expected = cached_logits(reference, ids, chunks, static)
            assert (cached_logits(pruned, ids, chunks, static) - expected).abs().max() <= TOLERANCE

    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    shown = mask.bool()
    assert (pruned(**padded).logits - reference(**padded).logits)[shown].abs().max() <= TOLERANCE


@pytest.mark.parametrize("ratio", [0.05, 0.5])
def test_the_ratio_asked_for_is_removed_to_within_one_channel(tiny, variant, ratio):
    model = tiny(variant)
    family = FAMILIES[model.config.model_type]
    geometry, draw = read_geometry(model, family), np.random.default_rng(1)
    before = sum(p.numel() for p in model.parameters())
    sizes = zip(geometry.kv_heads, geometry.mlp_width, strict=True)
    scores = GroupScores.of_layers([(draw.random(k), draw.random(m)) for k, m in sizes])
    if not attends(variant):  # the budget is of all parameters, and its MLPs are less of them than some budgets
        most = sum(geometry.mlp_width) * geometry.channel_cost[0]
        with pytest.raises(
            Infeasible, match=rf"only {most:,} can be removed \(.*all attention.*; ask for at most "
        ) as error:
            select(scores, geometry, most / before + 0.01)
        ratio *= float(re.search(r"at most ([\d.]+)", str(error.value))[1])
    plan = select(scores, geometry, ratio)
    removed = before - sum(p.numel() for p in prune(model, family, plan).parameters())
    assert removed == plan.removed_params and bool(plan.kept_groups[0]) == attends(variant)
    assert 0 <= ratio * before - removed < geometry.channel_cost[0] + 1


def test_the_dense_model_is_untouched_and_shares_what_is_not_cut(tiny, variant):
    model = tiny(variant)
    family = FAMILIES[model.config.model_type]
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    modules = [id(module) for module in model.modules()]
    plan = plan_of(model, family, *KEEP_SETS["both of a middle layer"])
    pruned = prune(model, family, plan)

    assert [id(module) for module in model.modules()] == modules
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0] and torch.equal(p, before[name][1]), name
    dense = dict(model.named_parameters())
    cut = 0
    for name, p in pruned.named_parameters():
        if name == "model.layers.1.self_attn.bias":  # all that is left of an attention block with an output bias
            name = "model.layers.1.self_attn.o_proj.bias"
        if p.shape == dense[name].shape:
            assert p is dense[name], f"{name} was copied though nothing was cut from it"
        else:
            cut += 1
            assert (
                p.untyped_storage().nbytes() == p.numel() * p.element_size()
            )  # no view that keeps the dense one alive
    assert cut > (10 if attends(variant) else 5)
    if model.config.tie_word_embeddings:
        assert pruned.lm_head.weight is pruned.model.embed_tokens.weight


def test_a_plan_for_another_model_is_refused(tiny):
    model = tiny("llama")
    plan = PruningPlan(((0,),), ((0,),), 0, 0, 1)
    with pytest.raises(ValueError, match="the plan is for 1 layers, the model has 4"):
        prune(model, FAMILIES["llama"], plan)
