"""The measured speed of a device: what is run of a model, what the rest counts, and what other programs do to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig
from transformers.configuration_utils import PretrainedConfig

from tests.tuning.test_cost_model import SPEED, work
from tune_prune.core.config import EvaluationProtocol, PruningConfig
from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models.families import decoder_layers
from tune_prune.models.runner.residency import RESIDENT, Residency
from tune_prune.pruning.compensation import recovery
from tune_prune.tuning import cost
from tune_prune.tuning.cost import BUILT_BYTES, LONG_ROW, SHORT_ROW, Line, SpeedRequest, _Bench, measure, suite_tokens


def test_other_programs_do_not_make_the_measured_speed_slower(tiny_llama):
    """Seconds in which the process waits are not its own; their share is what `load` is for."""
    bench = _Bench(SpeedRequest(tiny_llama[0], "float32", "cpu", 1, 256))
    assert bench._seconds(lambda: time.sleep(0.2)) < 0.1
    assert bench._least(lambda: sum(range(100_000))) > 0 and bench.spreads[0] >= 1


def test_a_small_model_is_measured_whole_and_threads_are_put_back(tiny_llama):
    config, tokenizer = tiny_llama
    sample = suite_tokens(build_suite(tokenizer, EvaluationProtocol(limit=8), TaskSource.of(None, True), 512)).rows
    request = SpeedRequest(config, "float32", "cpu", 1, 256, sample)
    bench = _Bench(request)
    assert (bench.weights, bench.queries, bench.head_share) == (1, 1, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        speed = measure(request)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert speed.gradient(64) > speed.forward(64) > 0
    assert speed.head_gradient > speed.head > 0
    assert speed.forward(256) >= speed.forward(16)
    assert speed.snapshots["taylor"] > 0 and speed.engine > 0


def test_threads_that_wait_for_each_other_do_not_make_the_measured_speed_slower(tiny_llama, monkeypatch):
    """As beside other programs: what takes microseconds waits for the turn of the other thread."""

    def seconds(self: _Bench, run: Callable[[], object]) -> float:
        return 0.001 + 0.1 * (torch.get_num_threads() - 1)

    monkeypatch.setattr(cost._Bench, "_seconds", seconds)
    alone, two = (measure(SpeedRequest(tiny_llama[0], "float32", "cpu", count, 64)) for count in (1, 2))
    assert two.forward(SHORT_ROW) < 20 * alone.forward(SHORT_ROW)


def test_a_first_call_that_is_slow_does_not_end_the_growth_of_batches(tiny_llama, monkeypatch):
    """Of one position the head's weights are read as for many: its seconds would count for each of them."""
    calls: dict[int, int] = {}

    def seconds(self: _Bench, run: Callable[[], int]) -> float:
        count = run()
        calls[count] = calls.get(count, 0) + 1
        return (0.01 + 0.001 * count) * (4 if calls[count] == 1 else 1)

    monkeypatch.setattr(_Bench, "_seconds", seconds)
    bench = _Bench(SpeedRequest(tiny_llama[0], "float32", "cpu", 1, 64))
    assert bench._steady(lambda count: lambda: count, 1024) == (0.01 + 0.001 * 16) / 16
    assert list(calls) == [1, 2, 4, 8, 16]


def test_of_a_large_model_a_small_part_is_built_and_the_rest_counted():
    """Mistral-7B's layer on a CPU: the part that is built times what is left out makes the published sizes."""
    bench = _Bench(SpeedRequest(MistralConfig(), "float32", "cpu", 1, 2048))
    layers = decoder_layers(bench.model, bench.family)
    built = sum(p.numel() for layer in layers for name, p in layer.named_parameters() if "proj" in name)
    assert built * 4 <= BUILT_BYTES["cpu"]
    assert built * bench.weights == 32 * 218_103_808
    assert layers[0].self_attn.head_dim == 128
    assert bench.model.lm_head.weight.numel() * bench.head_share == 32_000 * 4096
    cubes = sum(
        width**3 for layer in layers for width in (layer.self_attn.o_proj.in_features, layer.mlp.down_proj.in_features)
    )
    assert cubes * bench.solves == 32 * (4096**3 + 14_336**3)
    bench._seconds = lambda run: 1.0
    assert (bench._snapshot("fisher"), bench._snapshot("kfac")) == (bench.weights, bench.solves)


def test_a_starved_machine_gives_no_negative_speed(monkeypatch, tiny_llama):
    """Long rows that were measured while others computed: the line through them must not fall below zero."""
    seconds = iter([1e-6 * SHORT_ROW, 1.0 * LONG_ROW])  # of a short row, then of a long one
    monkeypatch.setattr(_Bench, "_steady", lambda *_: next(seconds))
    bench = _Bench(SpeedRequest(tiny_llama[0], "float32", "cpu", 1, LONG_ROW))
    line = bench._line(lambda rows, length: lambda: None, 2048)
    assert line.at_zero > 0 and line.slope > 0


def gpu_that_launches(
    config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch, launching: float, of_token: float
) -> _Bench:
    """A device that takes so many seconds for every call, and no more until there are tokens enough to take longer."""
    bench, now = _Bench(SpeedRequest(config, "float32", "cpu", 1, 64)), [0.0]
    bench.device = torch.device("cuda")
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "_wait", lambda: None)

    def make(tokens: int):
        def run() -> None:
            now[0] += max(launching, of_token * tokens)

        return run

    bench.make = make
    return bench


def test_a_small_model_on_a_gpu_is_not_taken_for_as_slow_as_its_launches(tiny_llama, monkeypatch):
    """SmolLM2's 30 layers are launched in some 30 ms, whatever the batch: forecasts for an H100 were eight times too long."""
    bench = gpu_that_launches(tiny_llama[0], monkeypatch, launching=0.03, of_token=1e-5)
    assert bench._steady(bench.make, 16_384) == pytest.approx(1e-5)
    assert bench._steady(bench.make, 512) == pytest.approx(0.03 / 512)  # no pass has larger batches
    assert bench._call(lambda rows, length: bench.make(rows * length)) == pytest.approx(0.03 * bench.weights)
    bench.device = torch.device("cpu")
    assert bench._call(lambda rows, length: bench.make(rows * length)) == 0


def test_a_slow_gpu_is_not_given_ever_larger_batches(tiny_llama, monkeypatch):
    bench = gpu_that_launches(tiny_llama[0], monkeypatch, launching=0.01, of_token=0.3)
    assert bench._steady(bench.make, 16_384) == pytest.approx(0.3)


def test_steps_of_a_training_take_their_launches_only_where_those_are_many():
    """A small model's step of 512 tokens takes as long on a GPU as its launches by layer; as a whole it is one launch."""
    few = recovery.step_work(100, work().arithmetic.layers, 8)
    todo = replace(
        few, tokens=100 * few.tokens, attention_tokens=100 * few.attention_tokens, mlp_tokens=100 * few.mlp_tokens
    )
    quick = replace(SPEED, gradient=Line(1e-9, 0.0), head_gradient=0.0)
    slow = replace(quick, gradient_call=0.05)
    plain, at_once, by_layer = (
        cost._pass(work(speed=speed, way=way), "recovery", todo, 128).seconds
        for speed, way in ((quick, RESIDENT), (slow, RESIDENT), (slow, Residency(gradients_by_layer=True)))
    )
    assert at_once == plain < 0.01 and by_layer >= 100 * 0.05


@pytest.mark.parametrize(
    ("stage", "config", "whole", "streamed"),
    [
        # The dense model's hidden states; and the copy, once or twice for each of ten steps
        ("recovery", PruningConfig("taylor", 128, 8, recovery="lora", recovery_steps=10), 1 + 1, 1 + 2 * 10),
        # Two copies, once each or for the two directions of gradients
        ("steps", PruningConfig("taylor", 128, 8, steps=3), 2, 2 * 2),
        ("steps", PruningConfig("block_influence", 128, 8, steps=3), 2, 2),
    ],
)
def test_a_copy_that_is_held_as_a_whole_is_read_once(
    stage: str, config: PruningConfig, whole: int, streamed: int
) -> None:
    for pruned_whole, readings in ((True, whole), (False, streamed)):
        way = Residency(from_files=True, pruned_whole=pruned_whole)
        none, some = (
            cost._step(work(trials=1, way=way, weight_bytes=size), stage, [config]).seconds for size in (0, 10**9)
        )
        assert some - none == pytest.approx(readings * 10**9 / cost.DISK_BYTES_PER_S)
