"""The cost model against independent truths: torch's own count of operations, the rows that the passes really run, lm-eval's
requests, and sums done by hand."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2TokenizerFast

from tests.conftest import MIXTURES, build_tiny
from tests.quiz import byte_tokenizer, score_all, unequal_llama, write_quiz
from tune_prune.core.config import EvaluationProtocol, Samples
from tune_prune.core.machine import Load
from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.divergence import head_inputs
from tune_prune.evaluation.engine.prefix_trees import score_items
from tune_prune.evaluation.engine.rows import Request
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models.families import decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.compensation import recovery, refit
from tune_prune.pruning.groups import PruningPlan
from tune_prune.pruning.statistics import Need, kfac, load_statistic
from tune_prune.tuning import cost as costs
from tune_prune.tuning.cost import (
    Arithmetic,
    ModelWork,
    Speed,
    SpeedRequest,
    ZeroShotTokens,
    estimate,
    hub_tokens,
    measure,
    suite_tokens,
)

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TUNE_PRUNE_DATA", ROOT.parent / "shared" / "data"))

LLAMA = family_of("llama")
ROWS, LENGTH = 3, 16
RANK = 8  # of adapters
ROTATIONS = 1e-4  # some versions of transformers make the angles by a matrix product, which is not counted


def eager_llama():
    """Eager attention computes the scores of all pairs, twice as many as Arithmetic counts; see `unseen`."""
    model = build_tiny("llama", attn_implementation="eager")
    return model, Arithmetic.of(read_geometry(model, LLAMA), model.config.vocab_size)


def unseen(arithmetic: Arithmetic, attentions: float) -> float:
    """Operations of eager attention on pairs of which the second comes later, in that many attention blocks."""
    width = arithmetic.query_width / arithmetic.layers
    return attentions * 4 * width * (LENGTH - (LENGTH + 1) / 2) * ROWS * LENGTH


def test_forward_operations_are_those_that_torch_counts():
    model, arithmetic = eager_llama()
    ids = torch.randint(model.config.vocab_size, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    forward = arithmetic.forward(ROWS * LENGTH, LENGTH) + unseen(arithmetic, arithmetic.layers)
    assert counter.get_total_flops() == pytest.approx(forward, rel=ROTATIONS)


PASSES = [(name, ("",)) for name in ("taylor", "fisher", "gate_fisher", "input_norms", "block_influence")]
PASSES += [("block_removal", kinds) for kinds in (("layer",), ("attention", "mlp"), ("layer", "attention", "mlp"))]


@pytest.mark.parametrize(("name", "kinds"), PASSES)
def test_operations_of_a_statistics_pass_are_those_that_torch_counts(name, kinds):
    model, arithmetic = eager_llama()
    statistic, windows = load_statistic(name), torch.randint(model.config.vocab_size, (ROWS, LENGTH))
    needs = [Need(name, kind, ROWS) for kind in kinds]
    work = statistic.work(needs, LENGTH, arithmetic.layers, "cpu")
    with FlopCounterMode(display=False) as probe:
        if work.backward:
            NextTokenLosses(model)  # finds out first whether the head comes last
        elif work.head_positions:
            with LayerRunner(model, LLAMA).tail():  # for which it needs no layer
                pass
    with FlopCounterMode(display=False) as counter:
        statistic.collect(model, LLAMA, windows, needs)
    times = 3 if work.backward else 1
    expected = arithmetic.of_pass(work, LENGTH)
    expected += times * unseen(arithmetic, work.attention_tokens / (ROWS * LENGTH))
    if work.backward:  # nobody asks for the gradient of the embeddings
        first = LLAMA.linears(decoder_layers(model, LLAMA)[0])
        expected -= 2 * ROWS * LENGTH * sum(first[role].weight.numel() for role in ("query", "key", "value"))
    if (
        work.backward and not work.weight_sums
    ):  # nor, without one of weights, what is in front of the first layer's output
        expected -= 2 * 4 * arithmetic.query_width / arithmetic.layers * ROWS * LENGTH**2
    assert counter.get_total_flops() - probe.get_total_flops() == pytest.approx(expected, rel=ROTATIONS)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", ["", "taylor", "gate_fisher", "expert_outputs"])
def test_of_a_mixture_the_experts_that_a_token_takes_count(mixture, name, monkeypatch):
    model = build_tiny(mixture, attn_implementation="eager")
    family = family_of(model.config.model_type)
    arithmetic = Arithmetic.of(read_geometry(model, family), model.config.vocab_size)
    windows = torch.randint(model.config.vocab_size, (ROWS, LENGTH))
    if not name:
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model(input_ids=windows, use_cache=False)
        expected = arithmetic.forward(ROWS * LENGTH, LENGTH) + unseen(arithmetic, arithmetic.layers)
        assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)  # biases are counted as weights
        return
    need, statistic = Need(name, "", ROWS), load_statistic(name)
    work = statistic.work([need], LENGTH, arithmetic.layers, "cpu")
    NextTokenLosses(model)
    with FlopCounterMode(display=False) as counter:
        statistic.collect(model, family, windows, [need])
    with FlopCounterMode(display=False) as probe:
        NextTokenLosses(model)
    times = 3 if work.backward else 1
    expected = arithmetic.of_pass(work, LENGTH) + times * unseen(arithmetic, work.attention_tokens / (ROWS * LENGTH))
    found = counter.get_total_flops() - work.backward * probe.get_total_flops()
    # What nobody asks for, of the first layer and of experts that no token takes; and of expert_outputs the routers count twice.
    assert found == pytest.approx(expected, rel=0.08)


def product(_, one: tuple[int, ...], other: tuple[int, ...], **__) -> int:
    return 2 * math.prod(one) * other[-1]


def test_operations_of_kfac_are_those_of_gate_fisher_and_its_products(monkeypatch):
    """Solving at its snapshots takes time, and counts as no operations."""
    monkeypatch.setattr(kfac, "_losses", lambda _, gradients: np.zeros(len(gradients)))
    model, arithmetic = eager_llama()
    windows = torch.randint(model.config.vocab_size, (ROWS, LENGTH))
    in_place = {torch.ops.aten.addmm_: product, torch.ops.aten.baddbmm_: product}  # which torch does not count itself
    counted, expected = [], []
    for name in ("gate_fisher", "kfac"):
        statistic, needs = load_statistic(name), [Need(name, "", count) for count in (1, ROWS)]
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            statistic.collect(model, LLAMA, windows, needs)
        counted.append(counter.get_total_flops())
        expected.append(arithmetic.of_pass(statistic.work(needs, LENGTH, arithmetic.layers, "cpu"), LENGTH))
    tokens = (1 + ROWS) * LENGTH
    by_hand = (
        2 * tokens * 4 * (48**2 + 40**2 + 4 * 12**2)
    )  # layers; inputs of o and of down, KV groups of two heads of 6
    assert counted[1] - counted[0] == by_hand == pytest.approx(expected[1] - expected[0])


def test_operations_of_a_refit_are_those_that_torch_counts(monkeypatch):
    """The plan leaves three quarters of the inputs of every last projection."""

    def cholesky(gram: tuple[int, ...], *_, **__) -> float:
        return gram[-1] ** 3 / 3

    def both_triangles(right: tuple[int, ...], factor: tuple[int, ...], *_, **__) -> int:
        return 2 * math.prod(right) * factor[-1]

    # Which torch does not count itself.
    solving = {
        torch.ops.aten.addmm_: product,
        torch.ops.aten.linalg_cholesky_ex: cholesky,
        torch.ops.aten.cholesky_solve: both_triangles,
    }
    monkeypatch.setattr(refit, "WINDOW", LENGTH)
    monkeypatch.setattr(refit, "STRIPS", 6)  # of which both widths are multiples
    model, arithmetic = eager_llama()
    windows = torch.randint(model.config.vocab_size, (2 * refit.HELD_OUT, LENGTH))
    total = read_geometry(model, LLAMA).total_params
    plan = PruningPlan(((0, 1, 3),) * 4, (tuple(range(5, 35)),) * 4, 0, 1, total)
    with FlopCounterMode(display=False, custom_mapping=solving) as counter:
        refit.least_squares(model, LLAMA, plan, windows, 0.1)
    work = refit.work(windows.numel(), arithmetic.layers, "cpu", 0.75)
    expected = arithmetic.of_pass(work, LENGTH) + unseen(arithmetic, work.attention_tokens / (ROWS * LENGTH))
    assert counter.get_total_flops() == pytest.approx(expected, rel=ROTATIONS)


def test_operations_of_a_recovery_are_those_that_torch_counts(monkeypatch):
    """Nothing was removed from the model; operations of the adapters, which the count leaves out, are taken off."""
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


def test_zero_shot_operations_are_those_that_torch_counts():
    """The last layer's output projection and MLP run at the scored positions only."""
    model, arithmetic = eager_llama()
    generator = np.random.default_rng(0)
    requests = [
        Request(generator.integers(64, size=LENGTH), generator.integers(64, size=length)) for length in (3, 1, 5)
    ]
    with FlopCounterMode(display=False) as counter:
        score_items(model, [requests], share=False)
    forward = arithmetic.forward(ROWS * LENGTH, LENGTH, scored=9) + unseen(arithmetic, arithmetic.layers)
    assert counter.get_total_flops() == pytest.approx(forward, rel=ROTATIONS)


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "tasks").is_dir(), reason=f"no task files in {DATA} (TUNE_PRUNE_DATA)")
def test_the_table_of_hub_tasks_says_what_the_files_hold():
    folder = DATA / "models" / "gpt2-tokenizer"
    tokenizer = GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    assert costs.tokens_per_gpt2_token(tokenizer) == 1
    assert hub_tokens(tokenizer, EvaluationProtocol()).items == 3270 + 1838 + 10_042 + 1267 + 2376 + 1172 + 500
    protocol = EvaluationProtocol(tasks=("piqa", "arc_easy", "openbookqa"))
    files = suite_tokens(build_suite(tokenizer, protocol, TaskSource("folder", str(DATA)), 2048))
    table = hub_tokens(tokenizer, protocol)
    assert (table.tokens, table.scored) == pytest.approx((files.tokens, files.scored), rel=0.06)
    assert (table.exact, files.exact) == (False, True)


SPEED = Speed(2000.0)  # a second for the layers of a token, a tenth of one for its logits
NEEDS = (Need("taylor", "", 4), Need("taylor", "", 16), Need("block_removal", "layer", 3))


def work(**changes) -> ModelWork:
    values = {
        "label": "m",
        "arithmetic": Arithmetic(2, 600, 400, 0, 100, 0),
        "device": "cpu",
        "weight_bytes": 0,
        "speed": SPEED,
        "passes": {Samples(8): NEEDS},
        "baseline": True,
        "trials": 3,
        "removed_params": 200,
        "perplexity_tokens": 50,
        "perplexity_window": 20,
        "zero_shot": ZeroShotTokens(items=10, tokens=40, scored=20, exact=False),
    }
    return ModelWork(**(values | changes))


@pytest.mark.parametrize(
    ("load", "cpus", "slots", "gpus", "longer"),
    [
        (Load(0.0, 4), 1, 4, 0, 1.2),  # a CPU for each
        (Load(2.0, 4), 1, 4, 0, 6 / 4),  # 4 trials and 2 other programs on 4 CPUs
        (Load(9.0, 4), 1, 8, 0.25, 1.2 * 4),  # of one GPU
    ],
)
def test_the_wall_time_is_a_range_up_to_what_it_is_beside_the_load(load, cpus, slots, gpus, longer):
    """The rates are those of one process by itself; a device is shared evenly. Other programs are why runs of the measurement
    differed by a fifth: that is not counted beside them."""
    cost = estimate([work(speed=replace(SPEED, load=load, spread=1.2))], slots, gpus, cpus=cpus)
    assert cost.load == load
    assert cost.slowdown == (costs.FASTER, pytest.approx(costs.SLOWER * longer))
    assert cost.wall_range == tuple(pytest.approx(cost.wall_seconds * end) for end in cost.slowdown)
    assert cost.to_dict()["wall_seconds"] == list(cost.wall_range)
    assert cost.to_dict()["load"] == {"average": load.average, "cpus": load.cpus}


def test_pieces_are_dealt_out_to_the_slots():
    """Baseline, statistics and equal trials, each to the worker that is free first."""
    wall = {slots: estimate([work(trials=9)], slots, 0).wall_seconds - costs.WORKER_START_S for slots in (1, 2, 20)}
    cost = estimate([work(trials=9)], 1, 0).models[0]
    baseline, statistics = (sum(job.values()) for job in cost.jobs.values())
    trial = sum(cost.trial.values()) + costs.TRIAL_OVERHEAD_S
    assert wall[1] == pytest.approx(baseline + statistics + 9 * trial)
    assert wall[20] == pytest.approx(statistics)  # the longest piece
    assert baseline + 3 * trial > statistics > baseline + 2 * trial
    assert wall[2] == pytest.approx(max(baseline + 6 * trial, statistics + 3 * trial))


def test_the_rate_of_this_machine_foretells_what_a_model_takes_here(tiny_llama):
    """Within a factor of four, as other programs may run; and the number of threads is as it was."""
    model = AutoModelForCausalLM.from_config(tiny_llama[0]).eval()
    arithmetic = Arithmetic.of(read_geometry(model, LLAMA), model.config.vocab_size)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        speed = measure(SpeedRequest(model.config, "float32", "cpu", 2))
        assert torch.get_num_threads() == 1
        tokens = torch.randint(model.config.vocab_size, (4096,))
        taken = []
        for _ in range(3):
            began = time.process_time()
            perplexity(model, tokens, 256)
            taken.append(time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    assert speed.spread >= 1 and speed.load.cpus >= 1
    assert 1 / 4 < arithmetic.forward(4096, 256) / speed.flops / min(taken) < 4


def test_memory_is_planned_for_the_longest_row_that_is_forwarded(tmp_path):
    items = [{"passage": "red", "question": f"q{n}?", "options": ["a", "b"], "answer": 0} for n in range(80)]
    items[33]["passage"] = items[40]["passage"] = "the blue door " * 25
    protocol, model, widths = EvaluationProtocol(("quiz",)), unequal_llama(), []
    suite = build_suite(byte_tokenizer(True), protocol, write_quiz(tmp_path, items), 512)
    hook = model.model.register_forward_pre_hook(
        lambda _, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    score_all(suite, model)
    hook.remove()
    assert suite_tokens(suite).longest_row == max(widths) > 25 * 14
    alone = suite_tokens(suite, share=False)  # as layers that carry a state read them
    distinct = {request.inputs.tobytes(): len(request.inputs) for item in suite.items for request in item.requests}
    assert alone.tokens == sum(distinct.values()) > suite_tokens(suite).tokens
