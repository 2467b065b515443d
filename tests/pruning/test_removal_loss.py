"""Removal losses against a model whose block was really taken out, for every family; and the model left as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conftest import VARIANTS
from tune_prune.models.families import FAMILIES
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.passes import batches
from tune_prune.pruning.statistics.block_removal import KINDS, RemovalLosses, removal_losses

SEQ_LEN = 12  # longer than the sliding window of the variants that have one


def windows(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def losses_of(model: nn.Module, samples: torch.Tensor) -> np.ndarray:
    """One sample at a time, so that the batches of the code under test are checked too."""
    return np.array(
        [F.cross_entropy(model(input_ids=row[None], use_cache=False).logits[0, :-1], row[1:]).item() for row in samples]
    )


@torch.no_grad()
def without(model: nn.Module, layer: int, kind: str) -> nn.Module:
    """A copy in which the block adds nothing: its last projection is zero, or the layer is out of the list."""
    cut = copy.deepcopy(model)
    if kind == "layer" and FAMILIES[model.config.model_type].shared_states:  # its keys and values stay
        cut.model.layers[layer].register_forward_hook(lambda _, args, output: args[0])
        return cut
    if kind == "layer":
        del cut.model.layers[layer]
        cut.config.num_hidden_layers -= 1
        if getattr(cut.config, "layer_types", None) and model.config.model_type != "falcon_h1":  # all of one type
            cut.config.layer_types = [t for i, t in enumerate(model.config.layer_types) if i != layer]
        return cut
    family = FAMILIES[model.config.model_type]
    output = f"{family.attention}.{family.output}" if kind == "attention" else f"{family.mlp}.{family.down}"
    block = cut.model.layers[layer].get_submodule(output)
    block.weight.zero_()
    if block.bias is not None:
        block.bias.zero_()
    return cut


@pytest.mark.parametrize(("variant", "attention"), [*((one, "sdpa") for one in VARIANTS), ("qwen2-sliding", "eager")])
def test_removal_is_what_taking_the_block_out_does(tiny, variant, attention):
    model, samples = tiny(variant, attn_implementation=attention), windows()
    family = FAMILIES[model.config.model_type]
    kinds = ("layer", "mlp") if family.recurrent else KINDS  # whose layers have other things in attention's place
    found = removal_losses(model, family, samples, kinds)
    # Eager attention takes its softmax in float32, in which states are, too.
    near = 1e-10 if attention == "sdpa" and not family.recurrent else 1e-6
    np.testing.assert_allclose(found.dense, losses_of(model, samples), atol=near)
    assert tuple(found.removed) == kinds
    for kind in kinds:
        expected = np.stack([losses_of(without(model, layer, kind), samples) for layer in range(4)])
        assert found.removed[kind].shape == (4, 3)
        np.testing.assert_allclose(found.removed[kind], expected, atol=near, err_msg=kind)
        assert np.abs(expected - found.dense).min(axis=1).max() > 1e-3  # taking it out makes a difference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_samples_give_the_bits_of_many(tiny, dtype):
    """With two tokens a sample, products of a batch of few samples have other kernels than those of many."""
    model = tiny("llama", dtype)
    samples = torch.randint(0, 64, (40, 2), generator=torch.Generator().manual_seed(0))
    many = removal_losses(model, FAMILIES["llama"], samples, ("mlp",))
    for count in (1, 2, 3, 4, 7, 20):
        few = removal_losses(model, FAMILIES["llama"], samples[:count], ("mlp",))
        np.testing.assert_array_equal(few.dense, many.dense[:count])
        np.testing.assert_array_equal(few.removed["mlp"], many.removed["mlp"][:, :count])


@pytest.mark.parametrize("residency", [RESIDENT, Residency(halvings=2)], ids=["at once", "in parts"])
@pytest.mark.parametrize("there", [1, 3, 8, 13])
def test_a_pass_goes_on_from_what_there_is_with_the_same_bits(tiny, monkeypatch, there, residency):
    """It goes on behind the last whole batch, which may be one that a pass over fewer samples has filled up."""
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * SEQ_LEN})
    model, samples, kinds = tiny("llama"), windows(13), ("layer", "mlp")
    whole = removal_losses(model, FAMILIES["llama"], samples, kinds)
    begun = removal_losses(model, FAMILIES["llama"], samples[:there], kinds)
    seen = []
    original = NextTokenLosses.__call__

    def record(losses: NextTokenLosses, batch: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        return original(losses, batch, states)

    monkeypatch.setattr(NextTokenLosses, "__call__", record)
    found = removal_losses(model, FAMILIES["llama"], samples, kinds, residency, begun)
    np.testing.assert_array_equal(found.dense, whole.dense)
    for kind in kinds:
        np.testing.assert_array_equal(found.removed[kind], whole.removed[kind])
    starts = [start for start, _ in batches.growing_batches(13, 4)]
    left = [start for start in starts if start >= max(s for s in starts if s <= there)]
    assert len(seen) == len(left) * (1 + 2 * 4)
    assert all(torch.equal(batch[0], samples[left[0]]) for batch in seen[: 1 + 2 * 4])


def test_increase_uses_the_first_samples_of_both():
    losses = RemovalLosses(np.array([1.0, 2.0, 4.0]), {"layer": np.array([[2.0, 2.0, 9.0], [1.5, 1.0, 0.0]])})
    np.testing.assert_allclose(losses.increase("layer", 1), [1.0, 0.5])
    np.testing.assert_allclose(losses.increase("layer", 2), [0.5, -0.25])
    np.testing.assert_allclose(losses.increase("layer", 3), [2.0, -1.5])
