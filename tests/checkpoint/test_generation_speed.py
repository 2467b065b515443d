"""Measured speed: who runs when, what is run, and what is made of the seconds and bytes. Tiny models, so no figure of speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tune_prune.checkpoint import generation_speed
from tune_prune.checkpoint.generation_speed import GenerationSpeed, measure, verdict, verdict_of
from tune_prune.checkpoint.layers import sizes
from tune_prune.core.errors import UserError
from tune_prune.core.speed_records import Relative
from tune_prune.models.families import FAMILIES
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.surgery import prune

FAMILY = FAMILIES["qwen2"]
KEPT = PruningPlan(((1, 3), (), (0, 1, 2), (2,)), (tuple(range(10)), (20,), (), tuple(range(40))), 0, 0, 0)


@pytest.fixture
def models(tiny: Callable[..., PreTrainedModel]) -> dict[str, PreTrainedModel]:
    """A dense model and a pruned copy that has lost an attention block and an MLP."""
    dense = tiny("qwen2", dtype=torch.float32)
    return {"dense": dense, "pruned": prune(dense, FAMILY, KEPT)}


@pytest.fixture
def calls(models: dict[str, PreTrainedModel]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The model's name and the token ids of every forward pass, as they happen."""
    made: list[tuple[str, torch.Tensor]] = []

    def follow(name: str) -> Callable[..., None]:
        return lambda _module, _args, kwargs: made.append((name, kwargs["input_ids"].clone()))

    hooks = [model.register_forward_pre_hook(follow(name), with_kwargs=True) for name, model in models.items()]
    yield made
    for hook in hooks:
        hook.remove()


def test_models_take_turns(models: dict[str, PreTrainedModel], calls: list[tuple[str, torch.Tensor]]) -> None:
    found = measure(models, prompt_tokens=9, new_tokens=3, batch_size=2, repeats=2)
    turn = [(2, 9), (2, 1), (2, 1), (2, 1)]
    once = [(name, shape) for name in ("dense", "pruned") for shape in turn]
    assert [(name, tuple(ids.shape)) for name, ids in calls] == 3 * once  # a warm-up and two rounds that count
    prompts = [ids for _, ids in calls if ids.shape[1] == 9]
    assert all(torch.equal(ids, prompts[0]) for ids in prompts)
    assert list(found) == ["dense", "pruned"]
    for one in found.values():
        for value in (one.prefill_tokens_per_s, one.decode_tokens_per_s):
            assert math.isfinite(value) and value > 0
        used = (one.prompt_tokens, one.new_tokens, one.batch_size, one.repeats, one.dtype, one.device)
        assert used == (9, 3, 2, 2, "float32", "CPU, 1 thread")


def six_tokens(model: PreTrainedModel, prompt: torch.Tensor) -> list[list[int]]:
    """The prompt and what `generate` puts behind it."""
    mask = torch.ones_like(prompt)
    return model.generate(
        prompt, attention_mask=mask, do_sample=False, max_new_tokens=6, min_new_tokens=6, pad_token_id=0
    ).tolist()


def test_decoding_is_that_of_generate(
    models: dict[str, PreTrainedModel], calls: list[tuple[str, torch.Tensor]]
) -> None:
    measure(models, prompt_tokens=7, new_tokens=6, repeats=1)
    fed = {name: [ids for caller, ids in calls[-14:] if caller == name] for name in models}
    assert [len(ids) for ids in fed.values()] == [7, 7]
    for name, model in models.items():
        prompt = fed[name][0]
        assert torch.cat(fed[name], dim=1).tolist() == six_tokens(model, prompt)


def test_steps_with_a_static_cache_decode_the_same_tokens(
    models: dict[str, PreTrainedModel], calls: list[tuple[str, torch.Tensor]]
) -> None:
    """A CUDA graph replays such steps: a step has the same tensors every time, and its cache where no layer has lost its attention
    and where one has."""
    prompt = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(0))

    def captured(step: Callable[[], object]) -> Callable[[], object]:
        step()
        return step

    for name, model in models.items():
        seconds = generation_speed._static_seconds(model, prompt, 5, captured)
        assert min(seconds) > 0
        fed = [ids for caller, ids in calls if caller == name]
        assert torch.cat(fed[:7], dim=1).tolist() == six_tokens(model, prompt)


@pytest.mark.parametrize(
    ("asked", "used"),
    [((512, 10), (54, 10)), ((512, 500), (32, 32)), ((8, 500), (8, 32))],
)
def test_a_position_limit_shortens_and_says_so(
    models: dict[str, PreTrainedModel],
    calls: list[tuple[str, torch.Tensor]],
    asked: tuple[int, int],
    used: tuple[int, int],
) -> None:
    found = measure(models, *asked, repeats=1)  # of 64 positions
    assert {(one.prompt_tokens, one.new_tokens) for one in found.values()} == {used}
    assert calls[0][1].shape == (1, used[0])
    assert len(calls) == 2 * 2 * (1 + used[1])


def test_what_cannot_be_measured_is_refused(models: dict[str, PreTrainedModel]) -> None:
    for asked in ({"prompt_tokens": 0}, {"new_tokens": 0}, {"batch_size": 0}, {"repeats": 0}):
        with pytest.raises(ValueError, match=r"=0.* at least 1"):
            measure(models, **asked)
    models["dense"].config.max_position_embeddings = 1
    with pytest.raises(UserError, match="max_position_embeddings is 1"):
        measure(models)


def test_peak_memory_is_the_models_own(models: dict[str, PreTrainedModel]) -> None:
    settings: dict[str, Any] = {"prompt_tokens": 40, "new_tokens": 8, "repeats": 1}
    beside = measure(models, **settings)
    for name, model in models.items():
        alone = measure({name: model}, **settings)[name]
        assert alone.peak_memory_bytes == beside[name].peak_memory_bytes
        size = sizes(model, FAMILY)
        # at least weights, the whole cache and a position's logits; not much more than a layer's work beside them
        least = size.weight_bytes + 48 * size.kv_bytes_per_token + 4 * 64
        assert least < alone.peak_memory_bytes < least + 40 * 4 * (8 * 32 + 4 * 40) + 4 * 8 * 40 * 40
    assert beside["pruned"].peak_memory_bytes < beside["dense"].peak_memory_bytes
    short, long = (measure(models, 2, new_tokens, repeats=1)["dense"].peak_memory_bytes for new_tokens in (10, 60))
    grown = 50 * sizes(models["dense"], FAMILY).kv_bytes_per_token
    assert grown <= long - short < 1.5 * grown  # the cache, of which a layer's part is copied when it grows


ONE = GenerationSpeed(24_512.3, 61.52, 16_532_111_222, 512, 64, 1, 5, "bfloat16", "NVIDIA H200")
OTHER = GenerationSpeed(30_640.4, 76.9, 13_225_688_978, 512, 64, 1, 5, "bfloat16", "NVIDIA H200")


def test_a_verdict_says_nothing_that_single_rounds_contradict() -> None:
    said = "25% faster at prefill (reading the prompt), 25% faster at decode (writing the answer)"
    assert verdict_of({"dense": ONE, "pruned": OTHER}) == f"speed        {said}"
    ratios = Relative(1.1, 0.99, 1.2), Relative(0.45, 0.4, 0.5)
    assert verdict(Relative(1.1, 0.99, 1.4), ratios[1]).startswith("not clearly faster or slower at prefill")
    assert (
        verdict(*ratios) == "about as fast at prefill (reading the prompt), 55% slower at decode (writing the answer)"
    )
    assert verdict(Relative(2.25, 2.0, 2.5), ratios[0]).startswith("2.2 times as fast at prefill")
