"""How a search holds its models on GPUs and on nodes of a cluster, which are given as data; and calls in a process that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.test_cost_model import work
from tune_prune.commands import prune
from tune_prune.commands.prune_request import PruneRequest
from tune_prune.core.config import PruningConfig
from tune_prune.core.errors import MachineError, UserError
from tune_prune.core.machine import Memory
from tune_prune.models import catalog, loading
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.pruning.groups import PruningPlan
from tune_prune.tuning import cost, gpus, plan_cost, preflight
from tune_prune.tuning.cost import Arithmetic, ModelWork, estimate
from tune_prune.tuning.gpus import Gpu
from tune_prune.tuning.plan import Plan, SearchSettings
from tune_prune.tuning.resources import Node

pytestmark = pytest.mark.usefixtures("tensors_alone")
MUCH = 2**40


def gpu(name: str, usable: float, bfloat16: bool = True) -> Gpu:
    """A GPU of whose memory trials may use so many bytes: nine tenths."""
    total = int(usable / 0.9) + 1
    return Gpu(name, Memory(total, total), bfloat16)


def node(name: str, free: float, *, cpus: float = 1, gpus: tuple[Gpu, ...] = ()) -> Node:
    resources = {"CPU": cpus, "GPU": float(len(gpus))}
    return Node(name, name, resources, memory=Memory(MUCH, int(free)), file_room=MUCH, gpus=gpus)


H100 = gpu("H100", MUCH)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """A function (machines, settings) -> the plan of a search on a cluster of nodes, on a machine with those GPUs, or here.
    Gradients take more than tests, which are in small batches."""
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text("search: grid\nmethod: [taylor, layerwise]\nseq_len: 256\nnum_samples: [5, 32]\n")
    monkeypatch.setattr(preflight, "_cluster", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(preflight, "_check_reach", lambda *_: None)
    monkeypatch.setattr(plan_cost, "cost_of", lambda *_: None)
    monkeypatch.setattr("tune_prune.tuning.memory.default_batch_tokens", lambda *_: 64)
    monkeypatch.setattr("tune_prune.tuning.memory.windows_at_once", lambda *_: 1)
    here = preflight._nodes

    def plan(*machines: Node | Gpu, **settings: Any) -> Plan:
        cards = [one for one in machines if isinstance(one, Gpu)]
        nodes = tuple(one for one in machines if isinstance(one, Node))
        alone = ([{"CPU": 8, "GPU": len(cards)}], cards)
        monkeypatch.setattr(preflight, "_survey", lambda _: nodes)
        monkeypatch.setattr(preflight, "_nodes", lambda *given: alone if cards else here(*given))
        where = {"address": "head:6379"} if nodes else {}
        usual = {"tasks": ("boolq",), "limit": 4, "dtype": "float32"}
        return preflight.make_plan(SearchSettings(("tiny-llama",), "space.yaml", **(usual | where | settings)))

    return plan


def test_the_node_with_least_room_for_a_trial_decides(planned) -> None:
    whole, by_layer, *_ = planned().models[0].ways
    assert by_layer.total < whole.total
    for least, way in (
        (node("small", whole.total), "resident"),
        (node("small", whole.total - 1), "by layer"),
        (node("small", 4 * whole.total - 1, cpus=4), "by layer"),
        (node("idle", 0, cpus=0), "resident"),
    ):
        assert str(planned(node("large", MUCH, cpus=8), least).memory.way) == way
    free = 2 * whole.total - 2
    assert str(planned(node("one", free), node("one", free)).memory.way) == "by layer"  # two on one machine
    assert str(planned(node("one", free), node("another", free)).memory.way) == "resident"


def test_a_node_on_which_no_trial_fits_is_named(planned) -> None:
    need = min(way.total for way in planned().models[0].ways)
    large, tight = node("large", MUCH, cpus=8), node("small", 2.5 * need, cpus=4)
    with pytest.raises(
        UserError, match=r"are free on node small; end other programs.*; or end Ray there \(`ray stop`\)"
    ):
        planned(large, node("small", need - 1))
    with pytest.raises(UserError, match=r" 4 run at once, .* free on node small; let at most 2 .* --cpus-per-trial 2;"):
        planned(large, tight)
    assert planned(large, tight, cpus_per_trial=2).resources.cpus == 2


def test_bfloat16_is_for_gpus_that_compute_in_it(planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "stored_as", lambda *_: "bfloat16")
    t4 = gpu("T4", MUCH, bfloat16=False)
    for cards, asked, dtype, lacking in (
        ((H100,), None, "bfloat16", ()),
        ((H100, t4), None, "float32", ("T4",)),
        ((t4,), None, "float32", ()),
        ((t4,), "bfloat16", "bfloat16", ()),
    ):
        plan = planned(*cards, dtype=asked)
        assert (plan.models[0].run.dtype, plan.without_bfloat16) == (dtype, lacking)


def test_a_share_that_was_asked_for_must_hold_a_trial(planned) -> None:
    need = min(way.total for way in planned(H100).models[0].ways)
    card, small = gpu("A10", 3.5 * need), gpu("small", 0.9 * need)
    assert planned(card, gpus_per_trial=0.3333).resources.gpus == 0.3333
    with pytest.raises(
        UserError, match=r"--gpus-per-trial is 0\.25, but 4 trials of about .* use 0\.3333 or more, or auto"
    ):
        planned(card, gpus_per_trial=0.25)
    with pytest.raises(UserError, match=r"a trial needs about .* the fullest GPU has .* to use: use a larger GPU"):
        planned(small, gpus_per_trial=1)
    with pytest.raises(UserError, match=r"to use: use a larger GPU, or others by CUDA_VISIBLE_DEVICES"):
        planned(H100, small)


def test_a_trial_on_several_gpus_needs_less_of_each(planned) -> None:
    one, two = planned(H100, gpus_per_trial=1), planned(H100, H100, gpus_per_trial=2)
    assert (two.resources.gpus, two.slots, two.memory.way.gpus) == (2, 1, 2)
    assert one.memory.weights / 2 < two.memory.weights < one.memory.weights
    small = gpu("A10", (one.memory.total + two.memory.total) / 2)
    assert str(planned(small, small, gpus_per_trial=2).memory.way) == "resident, on 2 GPUs"
    with pytest.raises(UserError, match=r"2 GPUs but no node has them together"):
        planned(H100, gpus_per_trial=2)


def test_each_kind_of_gpu_holds_models_as_suits_it(planned) -> None:
    """A kind that several nodes have goes by the memory of its own nodes, where hidden states may wait."""
    whole, lean = (planned(H100).models[0].ways[index].total for index in (0, 1))
    plan = planned(H100, H100, gpu("A10", (whole + lean) / 2))
    assert plan.memory.way != RESIDENT and plan.resources.gpus == 1 and plan.gpu_names == ("H100", "A10")
    assert plan.gpu_ways == {"H100": {"tiny-llama": RESIDENT}, "A10": {"tiny-llama": plan.memory.way}}
    assert planned(H100, H100).gpu_ways == {}
    in_host = next(way for way in planned(H100).models[0].ways if way.way.states == "host")
    small = gpu("A10", in_host.total)
    for room, states in ((in_host.away, "host"), (in_host.away - 1, "file")):
        nodes = (node("one", 0, gpus=(H100,)), node("two", room, gpus=(small,)))
        ways = planned(*nodes, gpus_per_trial=1).gpu_ways
        assert (ways["H100"]["tiny-llama"], ways["A10"]["tiny-llama"].states) == (RESIDENT, states)


def test_trials_that_fill_a_gpu_take_turns_on_it() -> None:
    """Four shares of one GPU take as long as the GPU alone, where one trial fills it; of a small model they run side by side."""
    weights = int(cost.FILLS_GPU)
    fills = Arithmetic(2, weights // 2, weights // 2, 0, 100, 0)
    large = work(arithmetic=fills, device="cuda", passes={}, trials=40, baseline=False)
    small = replace(large, arithmetic=Arithmetic(2, weights // 8, weights // 8, 0, 100, 0))

    def seconds(of: ModelWork, slots: int, share: float) -> float:
        return estimate([of], slots, share, start_s=0.0).wall_seconds

    assert seconds(large, 4, 0.25) == pytest.approx(seconds(large, 1, 1), rel=0.05)
    assert seconds(small, 4, 0.25) == pytest.approx(seconds(small, 1, 1) / 4, rel=0.05)


def test_a_call_in_a_process_of_its_own() -> None:
    assert gpus.call(divmod, 17, 5) == (3, 2)
    assert gpus.call(os.getpid) != os.getpid()
    assert gpus.call(print, "not the answer") is None
    with pytest.raises(UserError, match="unknown model 'lama'"):
        gpus.call(catalog.resolve, "lama")
    with pytest.raises(MachineError, match=r"ended with code 7 \(it said nothing\); see") as error:
        gpus.call(os._exit, 7)
    assert "\n" not in str(error.value)


def test_to_cut_by_a_plan_takes_no_gpu() -> None:
    config: Any = PruningConfig("random", 8, 8)
    plan = PruningPlan(((0,),), ((0,),), 0, 0, 1)
    known, unknown = (PruneRequest(run=None, config=config, plan=one) for one in (plan, None))
    assert prune.device_of(known) == prune.device_of(known, "cpu") == "cpu"
    assert prune.device_of(known, "auto", measure=True) == prune.device_of(unknown) == "auto"
    refitted = replace(known, config=replace(config, compensation="least_squares"))
    assert prune.device_of(refitted) == "auto"
