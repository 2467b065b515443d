"""The cost model against independent truths: torch's own count of operations, the rows that the passes really run, lm-eval's
requests, and sums done by hand."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2TokenizerFast, MistralConfig

from tests.conftest import build_tiny
from tests.quiz import byte_tokenizer, score_all, unequal_llama, write_quiz
from tune_prune.core.config import EvaluationProtocol, PruningConfig, Samples
from tune_prune.core.machine import Load
from tune_prune.data.task_files import TaskSource
from tune_prune.evaluation.engine.rows import Request, score_requests
from tune_prune.evaluation.perplexity import perplexity
from tune_prune.evaluation.zero_shot import build_suite
from tune_prune.models.families import decoder_layers, family_of
from tune_prune.models.geometry import read_geometry
from tune_prune.models.head import NextTokenLosses
from tune_prune.models.runner.layer_runner import LayerRunner
from tune_prune.models.runner.residency import Residency
from tune_prune.pruning.passes import batches
from tune_prune.pruning.statistics import Need, kfac, load_statistic
from tune_prune.pruning.statistics import taylor as taylor_module
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


def test_operations_of_kfac_are_those_of_gate_fisher_and_its_products(monkeypatch):
    """What is solved at its snapshots takes time, and counts as no operations."""
    monkeypatch.setattr(kfac, "_losses", lambda _, gradients: np.zeros(len(gradients)))
    model, arithmetic = eager_llama()
    windows = torch.randint(model.config.vocab_size, (ROWS, LENGTH))

    def product(_, one: tuple[int, ...], other: tuple[int, ...], **__) -> int:
        return 2 * math.prod(one) * other[-1]

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


def test_zero_shot_operations_are_those_that_torch_counts():
    """Of the last layer, the output projection and the MLP run at the scored positions only."""
    model, arithmetic = eager_llama()
    generator = np.random.default_rng(0)
    requests = [
        Request(generator.integers(64, size=LENGTH), generator.integers(64, size=length)) for length in (3, 1, 5)
    ]
    with FlopCounterMode(display=False) as counter:
        score_requests(model, requests)
    forward = arithmetic.forward(ROWS * LENGTH, LENGTH, scored=9) + unseen(arithmetic, arithmetic.layers)
    assert counter.get_total_flops() == pytest.approx(forward, rel=ROTATIONS)


def test_head_counts_where_it_is_asked_and_pruning_shrinks_the_rest():
    _, arithmetic = eager_llama()
    head = 2 * 64 * 32  # vocabulary x hidden size of conftest's models
    assert arithmetic.forward(10, 5) == arithmetic.all_layers(10, 5) + 10 * head == arithmetic.forward(10, 5, scored=10)
    last = 2 * (arithmetic.mlp_weights + arithmetic.output_weights) / arithmetic.layers
    assert arithmetic.forward(10, 5, scored=4) == pytest.approx(arithmetic.forward(10, 5) - 6 * (head + last))
    half = arithmetic.pruned(arithmetic.projection_weights // 2)
    assert half.forward(10, 5, scored=0) == pytest.approx(arithmetic.forward(10, 5, scored=0) / 2)
    assert half.head(7) == arithmetic.head(7)


@pytest.mark.parametrize("wanted", [(8,), (3,), (3, 8), (2, 3, 7), (4, 8, 16), (1, 5, 10), (4, 6), (2, 4), (3, 4)])
@pytest.mark.parametrize("name", ["taylor", "kfac", "input_norms", "block_influence"])
def test_samples_and_copies_of_a_pass_with_snapshots(name, wanted, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_TOKENS", {"cpu": 4 * 4})
    copies = []
    for sums in (taylor_module._Accumulator, kfac._Factors):
        monkeypatch.setattr(sums, "copy", lambda self, original=sums.copy: copies.append(1) or original(self))
    model, statistic = build_tiny("llama"), load_statistic(name)
    seen = []
    model.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].shape), with_kwargs=True
    )
    needs = [Need(name, "", n) for n in wanted]
    statistic.collect(model, LLAMA, torch.randint(64, (16, 4)), needs)
    work = statistic.work(needs, 4, 4, "cpu")
    if work.head_positions:
        assert seen.pop(0) == (1, 2)  # the probe for a head that comes last
    assert work.attention_tokens == work.mlp_tokens == 4 * 4 * sum(samples for samples, _ in seen)
    assert work.batch_tokens == 4 * max(samples for samples, _ in seen)
    assert work.tokens == 4 * max(wanted)
    assert (2 in (work.weight_sums, work.product_sums)) == bool(copies)


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


def test_the_estimate_is_a_sum_that_can_be_done_by_hand(monkeypatch):
    """Seconds count tokens; a fifth of the projections is removed."""
    monkeypatch.setattr(costs, "SUITE_S_PER_ITEM", 1.0)
    monkeypatch.setattr(costs, "SUITE_S", 5.0)
    monkeypatch.setattr(costs, "PRUNING_S", 0.0)
    cost = estimate([work()], slots=1, gpus=0.5)
    stages = {stage.stage: stage for stage in cost.stages()}
    # 4 samples run twice: their snapshot falls inside the only batch; nothing is predicted after a sample's last token
    assert (stages["importance"].tokens, stages["importance"].seconds) == (
        16 * 8,
        pytest.approx(20 * (8 * 3 + 7 * 2 * 0.1)),
    )
    # dense 1, and behind the removed first of two layers half of it; the head three times; batches of 1, 1 and 2 samples
    assert (stages["removal"].tokens, stages["removal"].seconds) == (
        3 * 8 * 3,
        pytest.approx(4 * (8 * (1 + 0.5) + 7 * 3 * 0.1)),
    )
    assert (stages["perplexity"].runs, stages["perplexity"].tokens) == (4, 200)
    assert stages["perplexity"].seconds == pytest.approx(50 * (1 + 3 * 0.8) + 4 * 50 * 0.1)
    # all 50 tokens of the text and 40 of items: the dense model once without its head, a pruned one with two heads
    assert (stages["kl"].runs, stages["kl"].tokens) == (4, 360)
    assert stages["kl"].seconds == pytest.approx(90 * (1 + 3 * 0.8) + 3 * 2 * 90 * 0.1)
    suite = 5 + 10
    assert stages["zero_shot"].flops == pytest.approx((40 * 2000 - 20 * 400) * (1 + 3 * 0.8) + 4 * 20 * 200)
    assert stages["zero_shot"].seconds == pytest.approx(
        costs.ZERO_SHOT["cpu"] * stages["zero_shot"].flops / 2000 + suite
    )
    stored = estimate([work(zero_shot=replace(work().zero_shot, exact=True))], slots=1, gpus=0)
    assert stored.stages()[-1].seconds == pytest.approx(stages["zero_shot"].seconds - suite)
    total = sum(stage.seconds for stage in cost.stages())
    assert cost.gpu_hours == pytest.approx(0.5 * total / 3600)
    assert cost.wall_seconds == pytest.approx(costs.WORKER_START_S + total + 3 * costs.TRIAL_OVERHEAD_S)
    started = estimate([work()], slots=1, gpus=0.5, start_s=0.5)
    assert started.wall_seconds == pytest.approx(cost.wall_seconds - costs.WORKER_START_S + 0.5)
    plain = json.loads(json.dumps(cost.to_dict()))
    assert plain["stages"]["removal"]["tokens"] == 72
    assert plain["models"]["m"]["perplexity"]["runs"] == 4


@pytest.mark.parametrize(
    ("load", "cpus", "slots", "gpus", "longer"),
    [
        (Load(0.0, 4), 1, 4, 0, 1.2),  # a CPU for each
        (Load(2.0, 4), 1, 2, 0, 1.2),
        (Load(2.0, 4), 1, 4, 0, 6 / 4),  # 4 trials and 2 other programs on 4 CPUs
        (Load(2.0, 4), 2, 2, 0, 6 / 4),
        (Load(2.0, 4), 1, 40, 0, 6 / 4),  # most of them on other machines
        (Load(9.0, 4), 1, 8, 0.25, 1.2 * 4),  # of one GPU
        (Load(9.0, 4), 1, 8, 1, 1.2),
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


def test_an_adaptive_search_makes_its_passes_inside_the_trials():
    before, inside = (estimate([work()], 1, 0, statistics_in_trials=late) for late in (False, True))
    assert set(before.models[0].jobs) == {None, Samples(8)}
    assert set(inside.models[0].jobs) == {None}
    assert inside.models[0].trial["importance"] == pytest.approx(before.models[0].jobs[Samples(8)]["importance"] / 3)
    assert inside.stages() == before.stages()
    assert inside.wall_seconds == pytest.approx(before.wall_seconds)


def test_nothing_left_costs_nothing():
    cost = estimate([work(passes={}, baseline=False, trials=0)], 2, 1)
    assert (cost.wall_seconds, cost.gpu_hours) == (0, 0)
    assert not any(stage.runs for stage in cost.stages())


@pytest.mark.parametrize(("name", "share"), [("fisher", 1), ("gate_fisher", 2 / 3)])
def test_gradients_of_activations_alone_take_less_time(name, share):
    """A third of the operations of gradients are for those of the weights. 4 samples, whose last tokens predict nothing."""
    cost = estimate([work(passes={Samples(8): [Need(name, "", 4)]})], slots=1, gpus=0)
    (stage,) = (stage for stage in cost.stages() if stage.stage == load_statistic(name).stage)
    assert stage.seconds == pytest.approx(4 * 8 * 3 * share + 4 * 7 * 2 * 0.1)


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
            costs._step(work(trials=1, way=way, weight_bytes=size), stage, [config]).seconds for size in (0, 10**9)
        )
        assert some - none == pytest.approx(readings * 10**9 / costs.DISK_BYTES_PER_S)


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


def test_of_a_large_model_a_small_part_is_built():
    """Of Mistral-7B on a CPU not even one whole layer."""
    config = MistralConfig()
    model = costs._random_model(config, torch.float32, torch.device("cpu"))
    layers = decoder_layers(model, family_of("mistral"))
    assert sum(p.numel() for p in layers.parameters()) * 4 <= costs.BUILT_BYTES["cpu"]
    assert layers[0].self_attn.head_dim == 128 and config.num_hidden_layers == 32


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
