"""The engine's shortcuts against the model that leaves nothing out: the last layer beside scored positions, and keys
behind a block of queries."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import VARIANTS, attends
from tests.evaluation.test_shared_prefix import CUT
from tune_prune.evaluation.engine import tree_attention
from tune_prune.evaluation.engine.prefix_trees import score_items
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.engine.scored_positions import at_positions
from tune_prune.models.families import FAMILIES, decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import prune

IDS = torch.randint(64, (3, 17), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.tensor([2, 16, 18, 33, 50])  # of the 51, in all three rows


@contextmanager
def widths(blocks):
    """Positions that each call of each block gets."""
    seen = [[] for _ in blocks]
    hooks = [
        block.register_forward_hook(lambda _, args, __, mine=mine: mine.append(args[0][..., 0].numel()))
        for block, mine in zip(blocks, seen, strict=True)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def assert_same_logits(model):
    whole = model(input_ids=IDS, use_cache=False).logits.flatten(0, 1)[POSITIONS]
    with at_positions(model, POSITIONS):
        found = model(input_ids=IDS, use_cache=False).logits
    assert found.shape == (1, len(POSITIONS), 64)
    torch.testing.assert_close(found[0], whole, rtol=0, atol=1e-12)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_last_layer_runs_at_scored_positions_only(variant, tiny):
    model = tiny(variant)
    assert_same_logits(model)
    family = family_of(model.config.model_type)
    layers = decoder_layers(model, family)
    blocks = [layer.get_submodule(f"{family.mlp}.{family.down}") for layer in layers]
    if attends(variant):
        blocks += [family.linears(layers[-1])[role] for role in ("query", "value", "output")]
    with at_positions(model, POSITIONS), widths(blocks) as seen:
        model(input_ids=IDS, use_cache=False)
    assert seen == [[51], [51], [51], [5], [51], [51], [5]][: len(blocks)]


@pytest.mark.parametrize(("variant", "groups", "channels"), CUT)
def test_a_last_layer_that_was_pruned(variant, tiny, groups, channels):
    model = tiny(variant)
    family = family_of(model.config.model_type)
    whole = PruningPlan.keep_all(read_geometry(model, family))
    plan = PruningPlan(
        (*whole.kept_groups[:-1], groups), (*whole.kept_channels[:-1], channels), 0, 0, whole.total_params
    )
    assert_same_logits(prune(model, family, plan))


def test_of_an_unknown_family_the_head_alone_is_spared():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)).double().eval()
    assert_same_logits(model)


def long_items() -> list[list[Request]]:
    """Trees of about 160, 100 and 40 tokens."""
    generator = np.random.default_rng(3)
    items = []
    for context, choices in ((60, (25, 31, 28, 22)), (40, (20, 20, 24)), (20, (9, 13))):
        shared = generator.integers(64, size=context)
        targets = [generator.integers(64, size=length) for length in choices]
        items.append([Request(np.concatenate([shared, wanted[:-1]]), wanted) for wanted in targets])
    return items


def alone(model, request: Request) -> float:
    log_probs = model(torch.from_numpy(request.inputs)[None]).logits[0].log_softmax(-1)[-len(request.targets) :]
    return log_probs[range(len(request.targets)), request.targets].sum().item()


@pytest.mark.parametrize("variant", [name for name, (kind, _) in VARIANTS.items() if not FAMILIES[kind].recurrent])
def test_trees_longer_than_a_block_score_as_each_request_alone(variant, tiny, monkeypatch):
    model = tiny(variant, max_position_embeddings=128)
    config = decoder_layers(model, family_of(model.config.model_type))[0].self_attn.config
    expected = [alone(model, request) for item in long_items() for request in item]
    shapes = []
    kernel = F.scaled_dot_product_attention

    def watched(query, key, *args, **kwargs):
        shapes.append((query.shape[2], key.shape[2]))
        return kernel(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    found = score_items(model, long_items(), batch_tokens=1).loglikelihoods
    np.testing.assert_allclose(found, expected, atol=1e-10)
    assert config._attn_implementation == "sdpa"
    longest = max(key for _, key in shapes)
    assert longest > 4 * tree_attention.SHORTEST_BLOCK
    blocks = [(query, key) for query, key in shapes if key < longest]
    assert {query for query, _ in shapes} != {longest} and (32, 64) in blocks and (32, 96) in blocks
