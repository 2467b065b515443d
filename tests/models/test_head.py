"""Losses with the head in parts, against logits made whole."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from tests.conftest import VARIANTS
from tune_prune.models import head
from tune_prune.models.families import FAMILIES
from tune_prune.models.head import NextTokenLosses

IDS = torch.randint(64, (3, 11), generator=torch.Generator().manual_seed(4))


class Scaled(LlamaForCausalLM):
    """Changes its logits behind the head."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output


def scaled(model):
    other = Scaled(model.config).to(model.dtype).eval()
    other.load_state_dict(model.state_dict())
    return other


def by_hand(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)), ids[:, 1:].flatten(),
                           reduction="none").view(len(ids), -1)  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "positions"), [*((variant, 7) for variant in VARIANTS), ("llama", 1000), ("llama", 1)]
)
def test_losses_and_gradients_in_parts_are_those_of_the_whole(variant, tiny, monkeypatch, positions):
    monkeypatch.setattr(head, "positions_at_once", lambda *_: positions)
    monkeypatch.setattr(head, "softmax_rows", lambda *_: 3)
    model = tiny(variant)
    linears = map(FAMILIES[model.config.model_type].linears, model.model.layers)
    weights = [parts["down"].weight.requires_grad_(True) for parts in linears]
    losses = NextTokenLosses(model)
    assert losses.separate
    torch.testing.assert_close(losses(IDS), by_hand(model, IDS), rtol=0, atol=1e-12)
    expected = torch.autograd.grad(by_hand(model, IDS).mean(dim=1).sum(), weights)
    losses.backward(IDS)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=1e-14)


def test_logits_that_change_behind_the_head_are_made_whole(tiny):
    model = scaled(tiny("llama"))
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    losses = NextTokenLosses(model)
    assert not losses.separate
    torch.testing.assert_close(losses(IDS), by_hand(model, IDS), rtol=0, atol=1e-12)
    (expected,) = torch.autograd.grad(by_hand(model, IDS).mean(dim=1).sum(), weight)
    losses.backward(IDS)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-10, atol=1e-14)
    assert (NextTokenLosses(tiny("llama"))(IDS) - losses(IDS)).abs().max() > 1e-2


@pytest.mark.parametrize("change", [copy.deepcopy, scaled], ids=["in parts", "whole"])
def test_losses_of_bfloat16_logits_are_taken_in_float32(tiny, change):
    model = change(tiny("llama", dtype=torch.bfloat16))
    found = NextTokenLosses(model)(IDS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, by_hand(model, IDS), rtol=0, atol=1e-6)
    coarse = F.cross_entropy(model(input_ids=IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    assert (coarse.float().view(3, -1) - found).abs().max() > 1e-3


def test_logits_of_so_many_positions_are_there_at_once_on_a_cpu_of_256_at_least():
    found = {vocabulary: [head.positions_at_once("cpu", vocabulary, models) for models in (1, 2)]
             for vocabulary in (1024, 16_384, 262_144)}  # fmt: skip
    assert found == {1024: [6144, 3072], 16_384: [384, 256], 262_144: [256, 256]}
    assert [head.positions_at_once("cuda", 262_144, models) for models in (1, 2)] == [256, 128]


def test_a_softmax_is_taken_of_what_a_cpu_holds_in_its_cache_and_of_a_position_for_each_thread(monkeypatch):
    for threads, rows in ((1, 4), (8, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert [head.softmax_rows(device, 262_144) for device in ("cuda", "cpu", "mps")] == [256, rows, rows]


@pytest.mark.parametrize(
    ("variant", "separate"), [("llama", True), ("llama", False), ("gemma3_text-biases-tied", True)]
)
def test_gradients_of_divergences_are_those_of_whole_logits(tiny, variant, separate, monkeypatch):
    monkeypatch.setattr(head, "positions_at_once", lambda *_: 7)
    monkeypatch.setattr(head, "softmax_rows", lambda *_: 3)
    model = tiny(variant) if separate else scaled(tiny(variant))
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    losses = NextTokenLosses(model)
    assert losses.separate is separate
    states = torch.randn(3, 11, model.config.hidden_size, dtype=model.dtype, generator=torch.Generator().manual_seed(6))
    wanted = model.lm_head(states)
    if not separate or model.config.model_type == "gemma3_text":  # both cap their logits at 3
        wanted = 3 * torch.tanh(wanted / 3)
    own = model(input_ids=IDS, use_cache=False).logits
    each = F.kl_div(own.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    (expected,) = torch.autograd.grad(
        each[:, :-1].mean(dim=1).sum(), weight
    )  # as losses, not at a sample's last position
    losses.backward(IDS, dense=states)
    torch.testing.assert_close(weight.grad, expected, rtol=1e-9, atol=1e-14)
