"""Statistics and perplexity have the bits of passes of the whole model, which are written out here. That every statistic has them
in every way to hold a model is part of its contract (test_statistics)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from tests.residencies import FEW, WAYS, in_way
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.models.families import FAMILIES, decoder_layers
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.pruned.modeling_tune_prune import RemovedBlock
from tune_prune.pruning.passes import batches
from tune_prune.pruning.passes.batches import growing_batches
from tune_prune.pruning.statistics import Need, load_statistic, statistic_names
from tune_prune.pruning.statistics import taylor as module
from tune_prune.pruning.statistics.block_removal import KINDS, removal_losses
from tune_prune.pruning.statistics.taylor import taylor

SEQ_LEN = 9


@pytest.fixture(autouse=True)
def _batches_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * SEQ_LEN})


def windows(count: int) -> torch.Tensor:
    return torch.randint(0, 64, (count, SEQ_LEN), generator=torch.Generator().manual_seed(3))


def family_of(model: nn.Module):
    return FAMILIES[model.config.model_type]


class Identity(nn.Module):
    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        return hidden


@contextmanager
def without(model: nn.Module, index: int, kind: str) -> Iterator[None]:
    """`model` with the block taken out of it."""
    layers = decoder_layers(model, family_of(model))
    layer = layers[index]
    name = {"layer": None, "attention": "self_attn", "mlp": "mlp"}[kind]
    if name is None:
        layers[index] = Identity()
    else:
        block = getattr(layer, name)
        setattr(layer, name, RemovedBlock(kind, None))
    yield
    layers[index] = layer
    if name is not None:
        setattr(layer, name, block)


def losses_of_whole_models(model: nn.Module, samples: torch.Tensor) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Every removed model run from its first layer to its last, alone."""
    losses = NextTokenLosses(model)
    dense, removed = [], {kind: [] for kind in KINDS}
    for start, size in growing_batches(len(samples), 4):
        own = samples[start : start + size]
        batch = own[torch.arange(size) % len(own)]

        def means(batch: torch.Tensor = batch, count: int = len(own)) -> np.ndarray:
            return losses(batch)[:count].mean(dim=1).double().numpy()

        dense.append(means())
        for kind in KINDS:
            rows = []
            for index in range(model.config.num_hidden_layers):
                with without(model, index, kind):
                    rows.append(means())
            removed[kind].append(np.stack(rows))
    return np.concatenate(dense), {kind: np.concatenate(parts, axis=1) for kind, parts in removed.items()}


@pytest.mark.parametrize(("variant", "dtype"), FEW)
def test_removals_in_one_sweep_have_the_bits_of_removed_models(tiny, variant, dtype):
    model, samples = tiny(variant, dtype), windows(7)
    dense, removed = losses_of_whole_models(model, samples)
    found = removal_losses(model, family_of(model), samples, KINDS)
    np.testing.assert_array_equal(found.dense, dense)
    for kind in KINDS:
        np.testing.assert_array_equal(found.removed[kind], removed[kind], err_msg=kind)


@torch.inference_mode()
def inputs_of_whole_model(model: nn.Module, samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums of what goes into o and down, and of its squares, as the statistic names them."""
    sums: dict[str, torch.Tensor] = {"tokens": torch.tensor([samples.numel()])}
    for part in samples.split(4):
        handles = []
        for index, layer in enumerate(model.model.layers):
            for name, linear in (("attention", layer.self_attn.o_proj), ("mlp", layer.mlp.down_proj)):

                def add(_: nn.Module, args: tuple[torch.Tensor], key: str = f"{name}_{index}") -> None:
                    x = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
                    for own, numbers in ((key, x.square()), (f"sum_{key}", x)):
                        value = numbers.sum(dim=(0, 1), dtype=torch.float64)
                        sums[own] = sums[own] + value if own in sums else value

                handles.append(linear.register_forward_pre_hook(add))
        model.model(input_ids=part, use_cache=False)
        for handle in handles:
            handle.remove()
    return sums


@pytest.mark.parametrize(("variant", "dtype"), FEW)
def test_input_norms_have_the_bits_of_the_whole_model(tiny, variant, dtype):
    model, samples, statistic = tiny(variant, dtype), windows(11), load_statistic("input_norms")
    needs = [Need("input_norms", "", n) for n in (3, 11)]
    found = statistic.collect(model, family_of(model), samples, needs)
    for need in needs:
        expected = inputs_of_whole_model(model, samples[: need.num_samples])
        assert found[need].keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[need][name], value.numpy(), err_msg=name)


@pytest.mark.parametrize(("variant", "dtype"), FEW)
@pytest.mark.parametrize("way", WAYS)
def test_perplexity_has_the_bits_of_the_whole_model(tiny, variant, way, dtype):
    model, tokens = tiny(variant, dtype), windows(9).flatten()
    whole, total = NextTokenLosses(model), 0.0
    for batch in [*tokens[:75].view(5, 15).split(2), tokens[75:][None]]:
        total += whole(batch).double().sum().item()
    held, residency = in_way(model, way)
    assert perplexity(held, tokens, 15, 2, residency).mean_loss == total / (5 * 14 + 5)


@pytest.mark.parametrize("way", ["by layer", "streamed"])
def test_the_sums_of_one_layer_are_there_at_a_time(tiny, monkeypatch, way):
    """With the garbage collector off: what hooks hold in a circle would stay."""
    made: dict[int, weakref.ref[torch.Tensor]] = {}
    seen = []
    original = module._Accumulator.results

    def results(sums: module._Accumulator, num_samples: int):
        made.update({id(one): weakref.ref(one) for one in sums.sums.values()})
        seen.append(sum(one() is not None for one in made.values()))
        return original(sums, num_samples)

    monkeypatch.setattr(module._Accumulator, "results", results)
    held, residency = in_way(tiny("llama"), way)
    gc.disable()
    try:
        taylor(held, FAMILIES["llama"], windows(4), [3, 4], residency)
    finally:
        gc.enable()
    assert seen == 4 * 2 * [7]  # layers, snapshots, projections


@pytest.mark.parametrize("name", statistic_names())
def test_a_failing_pass_leaves_the_model_as_it_was(tiny, name):
    model, statistic = tiny("llama"), load_statistic(name)
    _, residency = in_way(model, "by layer")
    wrong = torch.full((2, SEQ_LEN), 999)
    with pytest.raises(IndexError):
        statistic.collect(model, FAMILIES["llama"], wrong, [Need(name, statistic.kinds[0], 2)], residency)
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
