"""The operations that the cost model counts of a refit and of a training, against torch's own count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.tuning.test_cost_model import LENGTH, LLAMA, ROTATIONS, ROWS, eager_llama, unseen
from tune_prune.evaluation.divergence import head_inputs
from tune_prune.models.families import decoder_layers
from tune_prune.models.geometry import read_geometry
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.groups import PruningPlan

RANK = 8  # of adapters


def test_operations_of_a_refit_are_those_that_torch_counts(monkeypatch):
    """Of a plan that leaves three quarters of the inputs of every last projection."""

    def cholesky(gram: tuple[int, ...], *_, **__) -> float:
        return gram[-1] ** 3 / 3

    def both_triangles(right: tuple[int, ...], factor: tuple[int, ...], *_, **__) -> int:
        return 2 * math.prod(right) * factor[-1]

    # Which torch does not count itself.
    solving = {torch.ops.aten.linalg_cholesky_ex: cholesky, torch.ops.aten.cholesky_solve: both_triangles}
    monkeypatch.setattr(refit, "WINDOW", LENGTH)
    model, arithmetic = eager_llama()
    windows = torch.randint(model.config.vocab_size, (2 * refit.HELD_OUT, LENGTH))
    total = read_geometry(model, LLAMA).total_params
    plan = PruningPlan(((0, 1, 3),) * 4, (tuple(range(5, 35)),) * 4, 0, 1, total)
    with FlopCounterMode(display=False, custom_mapping=solving) as counter:
        refit.least_squares(model, LLAMA, plan, windows, 0.1)
    work = refit.work(windows.numel(), arithmetic.layers, "cpu", 0.75)
    expected = arithmetic.of_pass(work, LENGTH) + unseen(arithmetic, work.attention_tokens / (ROWS * LENGTH))
    assert counter.get_total_flops() == pytest.approx(expected, rel=ROTATIONS)
    # By hand, of o with 48 inputs: products of 14 windows, errors on 2, right sides, Cholesky's factor and both triangles.
    attention = replace(arithmetic, input_widths=48, input_squares=48**2, input_cubes=48**3)
    without = arithmetic.of_pass(replace(work, product_tokens=0, fitted_share=0.0), LENGTH)
    by_hand = 2 * 48 * 36 * 14 * LENGTH + 2 * 32 * 48 * 2 * LENGTH + 2 * 32 * 12 * 36 + 36**3 / 3 + 2 * 32 * 36**2
    assert attention.of_pass(work, LENGTH) - without == pytest.approx(by_hand)


def test_operations_of_a_recovery_are_those_that_torch_counts(monkeypatch):
    """Of a model of which nothing was removed, without those of its adapters, which are left out."""
    for name, value in (("WINDOW", LENGTH), ("HELD_OUT", 4), ("ROWS", 2)):
        monkeypatch.setattr(recovery, name, value)
    steps, model, arithmetic = 3, *eager_llama()
    linears = [LLAMA.linears(layer) for layer in decoder_layers(model, LLAMA)]
    sizes = [{role: linear.weight.shape for role, linear in layer.items()} for layer in linears]
    windows = torch.randint(model.config.vocab_size, (recovery.samples_of(steps), LENGTH))
    with FlopCounterMode(display=False) as counter:
        states = head_inputs(model, list(windows)).view(*windows.shape, -1)
        recovery.lora(model, LLAMA, windows, states, steps, 0.01, RANK, 0, RESIDENT)
    with FlopCounterMode(display=False) as probes:  # of heads that come last
        NextTokenLosses(model)
        for _ in range(2):
            with LayerRunner(model, LLAMA).tail():
                pass
    works = recovery.work(steps, arithmetic.layers, RANK)
    expected = sum(arithmetic.of_pass(work, LENGTH) for work in works)
    expected += sum(
        (3 if work.backward else 1) * unseen(arithmetic, work.attention_tokens / (ROWS * LENGTH)) for work in works
    )
    trained, tried = steps * 2 * LENGTH, 2 * 4 * LENGTH
    first = [sizes[0][role] for role in ("query", "key", "value")]
    expected -= 2 * trained * sum(shape.numel() for shape in first)  # nobody asks for the gradient of the embeddings
    adapters = 2 * RANK * sum(sum(shape) for layer in sizes for shape in layer.values())
    asked = trained * (3 * adapters - 2 * RANK * sum(shape[1] for shape in first))
    expected += asked + tried * adapters
    assert counter.get_total_flops() - probes.get_total_flops() == pytest.approx(expected, rel=ROTATIONS)
