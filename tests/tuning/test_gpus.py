"""What plans know of GPUs: asked in a process that ends, free memory instead of total, no first call in a speed, trials that
share. No test has a GPU: torch's answers are replaced."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tuning.test_cost_model import SPEED, work
from tune_prune.commands import plan_page, prune
from tune_prune.commands.prune_request import PruneRequest
from tune_prune.core import machine
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import MachineError, UserError
from tune_prune.core.machine import Memory
from tune_prune.core.records import TrialRecord
from tune_prune.models import catalog, loading
from tune_prune.models.runner import devices as of_models
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.groups import PruningPlan
from tune_prune.trial import trial
from tune_prune.trial.fallback import Fallback
from tune_prune.tuning import cost, plan_cost, preflight, resources
from tune_prune.tuning import gpus as gpu_module
from tune_prune.tuning.cost import Arithmetic, estimate
from tune_prune.tuning.gpus import Gpu, visible_gpus
from tune_prune.tuning.memory import MemoryPlan, memory_of
from tune_prune.tuning.plan import Plan, SearchSettings
from tune_prune.tuning.preflight import make_plan
from tune_prune.tuning.worker import WorkerSettings

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch):
    """A function that has torch see GPUs of (name, major version, free GiB, total GiB)."""

    def seen(*cards: tuple[str, int, float, float]) -> None:
        about = [
            SimpleNamespace(name=name, major=major, minor=0, total_memory=int(all_ * GIB))
            for name, major, _, all_ in cards
        ]
        free = [(int(free * GIB), int(all_ * GIB)) for _, _, free, all_ in cards]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about[index])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: free[index])

    return seen


# --- a process that ends


def test_a_call_in_its_own_process_gives_what_it_gives_here() -> None:
    assert gpu_module.call(divmod, 17, 5) == (3, 2)
    assert gpu_module.call(os.getpid) != os.getpid()
    assert gpu_module.call(print, "not the answer") is None
    with pytest.raises(UserError, match="unknown model 'lama'"):
        gpu_module.call(catalog.resolve, "lama")


def test_a_process_that_dies_is_a_sentence() -> None:
    with pytest.raises(MachineError, match=r"ended with code 7 \(it said nothing\); see") as error:
        gpu_module.call(os._exit, 7)
    assert "\n" not in str(error.value)


# --- what GPUs there are


def test_free_memory_is_told_beside_the_total(gpus) -> None:
    gpus(("V100", 7, 30, 32), ("H100", 9, 20, 80))
    assert visible_gpus() == [
        Gpu("V100", Memory(32 * GIB, 30 * GIB), False),
        Gpu("H100", Memory(80 * GIB, 20 * GIB), True),
    ]


@pytest.fixture
def planned(gpus, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A function (settings, *cards) -> the plan of tiny-llama's smoke space on a machine with those GPUs; what was called in a
    process of its own is in its `calls`."""
    monkeypatch.chdir(tmp_path)
    calls = []

    def own(function, *arguments):
        calls.append(function)
        return SPEED if function is plan_cost.measure else function(*arguments)

    monkeypatch.setattr(gpu_module, "call", own)

    def plan(cards, space="smoke", **settings):
        gpus(*cards)
        return make_plan(SearchSettings(("tiny-llama",), space, **settings))

    plan.calls = calls
    return plan


CARD = ("H100", 9, 79, 80)


@pytest.fixture
def large_gradients(planned, monkeypatch: pytest.MonkeyPatch) -> str:
    """A search space whose gradients take more than tests, which are in small batches."""
    monkeypatch.setattr("tune_prune.tuning.memory.default_batch_tokens", lambda *_: 64)
    monkeypatch.setattr("tune_prune.tuning.memory.windows_at_once", lambda *_: 1)
    Path("space.yaml").write_text("search: grid\nmethod: taylor\nseq_len: 256\nnum_samples: [5, 32]\n")
    return "space.yaml"


def test_a_plan_asks_and_measures_a_gpu_in_processes_that_end(planned) -> None:
    plan = planned([CARD, CARD])
    assert planned.calls == [visible_gpus, plan_cost.measure]
    assert (plan.resources.gpus, plan.slots, plan.gpu_names) == (0.25, min(8, machine.cpus()), ("H100",))
    assert plan.models[0].run.dtype == "float32"  # as its weights are stored
    assert "dtype        float32, as weights are stored; --dtype bfloat16 takes half the memory" in plan_page.details(
        plan
    )
    planned.calls.clear()
    assert planned([CARD], gpus_per_trial=0).gpu_names == ()
    assert planned.calls == []


def test_no_search_is_planned_on_a_gpu_that_torch_has_no_kernels_for(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    cards = [CARD, ("Tesla V100", 7, 30, 32)]
    with pytest.raises(UserError, match=r"^GPU 1 \(Tesla V100\) .*CUDA_VISIBLE_DEVICES.*\(--gpus-per-trial 0\)$"):
        planned(cards)
    assert planned(cards, gpus_per_trial=0).resources.gpus == 0


def test_bfloat16_is_for_gpus_that_compute_in_it(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "stored_as", lambda *_: "bfloat16")
    assert planned([CARD]).models[0].run.dtype == "bfloat16"
    both = planned([CARD, ("T4", 7, 14, 15)])
    assert both.models[0].run.dtype == "float32"
    said = (
        "all trials compute in float32, as T4 cannot compute in bfloat16; leave such GPUs out with CUDA_VISIBLE_DEVICES"
    )
    assert all(said in " ".join(text(both).split()) for text in (plan_page.details, plan_page.summary))
    alone, asked = planned([("T4", 7, 14, 15)]), planned([CARD, ("T4", 7, 14, 15)], dtype="float32")
    assert alone.models[0].run.dtype == asked.models[0].run.dtype == "float32"
    assert not any("bfloat16" in plan_page.details(plan) for plan in (alone, asked))
    assert planned([("T4", 7, 14, 15)], dtype="bfloat16").models[0].run.dtype == "bfloat16"
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, found=supported: found)
        assert of_models.fast_at_bfloat16("cuda") == supported


def test_memory_that_others_hold_is_not_planned_with(planned) -> None:
    need = planned([CARD]).memory.total / GIB
    assert planned([("H100", 9, 2.5 * need, 80)]).resources.gpus == 0.5
    with pytest.raises(UserError, match=r"0\.5 GiB of 80\.0 GiB are free on the fullest GPU: end other programs"):
        planned([CARD, ("H100", 9, 0.5, 80)])


def leanest(plan: Plan) -> float:
    """GiB of a trial in the leanest way there is."""
    return min(way.total for way in plan.models[0].ways) / GIB


def test_a_share_that_was_asked_for_must_hold_a_trial(planned) -> None:
    need = leanest(planned([CARD]))
    card = ("A10", 8, 3.5 * need, 24)
    assert planned([card], gpus_per_trial=0.3333).resources.gpus == 0.3333
    with pytest.raises(
        UserError, match=r"--gpus-per-trial is 0\.25, but 4 trials of about .* use 0\.3333 or more, or auto"
    ):
        planned([card], gpus_per_trial=0.25)
    small = ("small", 8, 0.9 * need, 0.9 * need)
    for cards in ([small], [small, small]):
        with pytest.raises(
            UserError, match=r"a trial needs about .* the smallest GPU has .* GiB to use: choose a smaller"
        ):
            planned(cards, gpus_per_trial=1)
    with pytest.raises(UserError, match=r"a trial needs about .* the smallest GPU has"):
        planned([small], inline=True)
    with pytest.raises(
        UserError, match=r"GiB to use: leave the small one out with CUDA_VISIBLE_DEVICES, or choose a smaller"
    ):
        planned([CARD, small])


def test_a_trial_on_several_gpus_needs_less_of_each(planned) -> None:
    one, two = planned([CARD], gpus_per_trial=1), planned([CARD] * 5, gpus_per_trial=2, cpus_per_trial=1)
    assert (two.resources.gpus, two.slots, two.memory.way.gpus) == (2, min(2, machine.cpus()), 2)
    assert one.memory.weights / 2 < two.memory.weights < one.memory.weights
    assert one.memory.process < two.memory.total < one.memory.total
    between = (one.memory.total + two.memory.total) / 2 / GIB
    small = ("A10", 8, between / 0.9, between / 0.9)  # of which 90% are used
    plan = planned([small, small], gpus_per_trial=2)
    assert str(plan.memory.way) == "resident, on 2 GPUs"
    inline = planned([small, small], gpus_per_trial=2, inline=True)
    assert (inline.resources, inline.slots, inline.memory) == (plan.resources, 1, plan.memory)
    with pytest.raises(UserError, match=r"2 GPUs but no node has them together"):
        planned([CARD], gpus_per_trial=2)


def test_a_trial_that_would_fit_one_gpu_layer_by_layer_is_sent_there(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a model's layers, which for tiny-llama are made out to be larger, do not fit a GPU on which two of them do."""
    ways = planned([CARD], gpus_per_trial=1).models[0].ways
    size = min(plan.total for plan in ways if plan.way.from_files) / GIB

    def larger(*arguments: Any) -> list[MemoryPlan]:
        found = memory_of(*arguments)
        return [replace(plan, weights=plan.weights + GIB) if plan.weights else plan for plan in found]

    monkeypatch.setattr(preflight, "memory_of", larger)
    fits = ("A10", 8, (size + 2**20 / GIB) / 0.9, (size + 2**20 / GIB) / 0.9)
    with pytest.raises(UserError, match=r"GiB to use: use --gpus-per-trial 1 \(layers .*\), or choose a smaller model"):
        planned([fits, fits], gpus_per_trial=2)
    assert planned([fits, fits], gpus_per_trial=1).memory.way.from_files


def test_a_stage_waits_for_all_gpus_and_the_fullest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    allocated = {"cuda:0": 0, "cuda:1": 0}  # at most, since it was reset
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocated.update({str(device): 0}))
    monkeypatch.setattr(of_models, "_peak_memory_bytes", lambda device: allocated[str(device)])
    one = trial.Trial.__new__(trial.Trial)
    devices = tuple(torch.device("cuda", index) for index in range(2))
    one.context, one._caveats = SimpleNamespace(loaded=SimpleNamespace(devices=devices), fallback=Fallback()), ()
    one.record = TrialRecord("key", "m", PruningConfig("random", 8, 8))
    for stage, *used in (("pruning", 5, 7), ("kl", 6, 2)):
        with one._stage(stage):
            allocated |= dict(zip(allocated, used, strict=True))
    assert tuple(waited) == devices * 2
    assert [report.peak_memory_bytes for report in one.record.stages] == [7, 6]
    assert one.record.peak_memory_bytes == 7


def test_several_kinds_of_gpu_are_said(planned) -> None:
    plan = planned([CARD, ("A100", 8, 79, 80)])
    assert any("H100, A100" in note for note in plan.cost.notes)


def test_each_kind_of_gpu_holds_models_as_suits_it(
    planned, large_gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, lean = (
        way.total / GIB for way in (planned([CARD], large_gradients).models[0].ways[index] for index in (0, 1))
    )
    small = ("A10", 8, (whole + lean) / 2 / 0.9, (whole + lean) / 2 / 0.9)  # of which 90% are used
    plan = planned([CARD, ("H100", 9, 60, 80), small], large_gradients)
    assert plan.memory.way != RESIDENT and plan.resources.gpus == 1
    assert plan.gpu_ways == {"H100": {"tiny-llama": RESIDENT}, "A10": {"tiny-llama": plan.memory.way}}
    assert "on H100: tiny-llama resident" in plan_page.details(plan)
    assert planned([CARD, CARD]).gpu_ways == {}
    settings = WorkerSettings(
        Path("/e"), Path("/a"), plan.resources, {"tiny-llama": plan.memory.way}, gpu_ways=plan.gpu_ways
    )
    for name, way in (("H100", RESIDENT), ("A10", plan.memory.way), ("another", plan.memory.way)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda found=name: found)
        assert settings.way("tiny-llama") == way


def test_a_share_is_one_of_what_was_free_and_leaves_room_for_the_context(
    gpus, planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts what it allocates against the fraction of all memory, and the CUDA context beside it."""
    free = planned([("A10", 8, 16, 24), ("A10", 8, 18, 24), CARD]).gpu_free
    assert free == {"A10": 16 * GIB, "H100": 79 * GIB}
    gpus(("A10", 8, 2, 24))  # when other trials have begun
    fractions = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A10")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    threads = torch.get_num_threads()
    try:
        for share in (0, 0.5, 1):
            resources.limit_process(resources.TrialResources(1, share), {})
        resources.limit_process(resources.TrialResources(1, 0.5), free)
    finally:
        torch.set_num_threads(threads)
    of_all, of_free = (fraction * 24 * GIB for fraction in fractions)
    context = 12 * GIB - of_all
    assert 0.4 * GIB < context < 1.5 * GIB
    assert of_free == pytest.approx(8 * GIB - context)


def test_settings_of_a_process_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "mine")
    matmul = torch.backends.cuda.matmul
    before = torch.backends.cuda.cudnn_sdp_enabled(), matmul.allow_bf16_reduced_precision_reduction
    try:
        loading.set_up_gpu()
        assert os.environ["PYTORCH_ALLOC_CONF"] == "mine"
        monkeypatch.delenv("PYTORCH_ALLOC_CONF")
        loading.set_up_gpu()
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not matmul.allow_bf16_reduced_precision_reduction
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]


# --- speed and cost


def test_trials_that_fill_a_gpu_take_turns_on_it() -> None:
    """Four shares of one GPU take as long as the GPU alone, where one trial fills it; of a small model they run side by side."""
    weights = int(cost.FILLS_GPU)
    large = work(
        arithmetic=Arithmetic(2, weights // 2, weights // 2, 0, 100, 0),
        device="cuda",
        passes={},
        trials=40,
        baseline=False,
    )
    small = replace(large, arithmetic=Arithmetic(2, weights // 8, weights // 8, 0, 100, 0))

    def seconds(of, slots: int, share: float) -> float:
        return estimate([of], slots, share, start_s=0.0).wall_seconds

    assert seconds(large, 4, 0.25) == pytest.approx(seconds(large, 1, 1), rel=0.05)
    assert seconds(large, 8, 0.25) == pytest.approx(seconds(large, 2, 1), rel=0.05)
    assert seconds(small, 4, 0.25) == pytest.approx(seconds(small, 1, 1) / 4, rel=0.05)
    ends = {name: estimate([of], 4, 0.25).slowdown[1] for name, of in (("large", large), ("small", small))}
    assert ends["small"] == 4 * ends["large"]  # they may turn out to wait for each other
    whole, shared = (estimate([large], slots, share) for slots, share in ((1, 1), (4, 0.25)))
    assert shared.gpu_hours == pytest.approx(whole.gpu_hours, rel=0.01)
    assert shared.models[0].trial["zero_shot"] == pytest.approx(4 * whole.models[0].trial["zero_shot"])


def test_slicing_7b_weights_takes_a_tenth_of_a_second_on_a_gpu() -> None:
    on_gpu, on_cpu = (
        estimate([work(device=device, weight_bytes=14_500_000_000)], 1, 1).models[0].trial["pruning"]
        for device in ("cuda", "cpu")
    )
    assert on_gpu < 0.2 < 20 < on_cpu


# --- trials


def test_a_stage_ends_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were only queued belong to the stage that queued them."""
    now = [0.0]

    def synchronize(device: torch.device) -> None:
        now[0] += 5.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(of_models, "_peak_memory_bytes", lambda device: 0)
    one = trial.Trial.__new__(trial.Trial)
    loaded = SimpleNamespace(devices=(torch.device("cuda"),))
    one.context, one._caveats = SimpleNamespace(loaded=loaded, fallback=Fallback()), ()
    one.record = TrialRecord("key", "m", PruningConfig("random", 8, 8))
    with one._stage("pruning") as report:
        now[0] += 1.0
    assert report.duration_s == one.record.stages[0].duration_s == 6.0


def test_to_cut_by_a_plan_takes_no_gpu() -> None:
    config: Any = PruningConfig("random", 8, 8)
    plan = PruningPlan(((0,),), ((0,),), 0, 0, 1)
    known, unknown = (PruneRequest(run=None, config=config, plan=found) for found in (plan, None))
    assert prune.device_of(known) == prune.device_of(known, "cpu") == "cpu"
    assert prune.device_of(known, "auto", measure=True) == prune.device_of(unknown) == "auto"
    assert prune.device_of(known, "cuda") == "cuda"
    refitted = replace(known, config=replace(known.config, compensation="least_squares"))
    assert prune.device_of(refitted) == "auto"


def test_keys_name_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert [of_models.device_key(torch.device(name)) for name in ("cpu", "cuda:1")] == ["cpu", "GPU 1"]
