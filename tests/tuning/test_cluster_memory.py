"""The memory of a cluster's nodes, which are stand-ins: every trial is planned for the node that has least room for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tune_prune.core import machine
from tune_prune.core.errors import UserError
from tune_prune.core.machine import Memory
from tune_prune.models.runner.residency import RESIDENT
from tune_prune.tuning import gpus, plan_cost, preflight
from tune_prune.tuning.gpus import Gpu
from tune_prune.tuning.plan import Plan, SearchSettings
from tune_prune.tuning.resources import Node

pytestmark = pytest.mark.usefixtures("tensors_alone")
SPACE = "search: grid\nmethod: [taylor, layerwise]\nseq_len: 256\nnum_samples: [5, 32]\n"
MUCH = 2**40


def node(name: str, free: int, *, cpus: float = 1, file_room: int = MUCH, gpus: tuple[Gpu, ...] = ()) -> Node:
    resources = {"CPU": cpus, "GPU": float(len(gpus))}
    return Node(name, name, resources, memory=Memory(MUCH, int(free)), file_room=int(file_room), gpus=gpus)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """A function (nodes, settings) -> the plan of a search on a cluster of them; without nodes, on this machine."""
    monkeypatch.chdir(tmp_path)
    Path("space.yaml").write_text(SPACE)
    monkeypatch.setattr(preflight, "_cluster", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(preflight, "_check_reach", lambda *_: None)
    monkeypatch.setattr(plan_cost, "cost_of", lambda *_: None)
    monkeypatch.setattr(gpus, "call", lambda function, *arguments: function(*arguments))

    def plan(*nodes: Node, **settings: Any) -> Plan:
        monkeypatch.setattr(preflight, "_survey", lambda _: nodes)
        where = {"address": "head:6379"} if nodes else {}
        usual = {"tasks": ("boolq",), "limit": 4, "dtype": "float32"}
        return preflight.make_plan(SearchSettings(("tiny-llama",), "space.yaml", **usual, **where, **settings))

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
    large = node("large", MUCH, cpus=8)
    with pytest.raises(
        UserError, match=r"are free on node small; end other programs.*; or end Ray there \(`ray stop`\)"
    ):
        planned(large, node("small", need - 1))
    with pytest.raises(
        UserError, match=r"^4 trials at once .* free on node small; let at most 2 run .* --cpus-per-trial 2;"
    ):
        planned(large, node("small", 2.5 * need, cpus=4))
    assert planned(large, node("small", 2.5 * need, cpus=4), cpus_per_trial=2).resources.cpus == 2


@pytest.mark.parametrize("where", ["cluster", "here"])
def test_memory_is_planned_for_as_many_trials_as_there_are(
    planned, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """However many CPUs there are: here for one trial and the dense model."""

    def of(free: int) -> Plan:
        if where == "cluster":
            return planned(node("small", free, cpus=64))
        monkeypatch.setattr(machine, "memory", lambda: Memory(MUCH, int(free)))
        return planned()

    monkeypatch.setattr(machine, "cpus", lambda: 64)
    need = min(way.total for way in planned().models[0].ways)
    with pytest.raises(UserError, match=r"^5 trials at once .*; let at most 2 run at once: --cpus-per-trial 32"):
        of(2.5 * need)
    Path("space.yaml").write_text("search: grid\nmethod: taylor\nseq_len: 256\nnum_samples: 32\n")
    whole = planned().models[0].ways[0].total
    for free, way in ((2 * whole, "resident"), (2 * whole - 1, "by layer")):
        plan = of(free)
        assert (plan.slots, str(plan.memory.way)) == (2, way)


def test_hidden_states_wait_where_the_node_with_least_room_has_some(planned) -> None:
    ways = {str(way.way): way for way in planned().models[0].ways}
    in_file = ways["by layer, states in a file"]
    tight = {"memory": in_file.total}
    large = node("large", MUCH)
    assert planned(large, node("small", MUCH, file_room=in_file.away), **tight).memory == in_file
    with pytest.raises(
        UserError, match=r"MiB in the folder for temporary files of node small, where .* MiB are free: set TMPDIR"
    ):
        planned(large, node("small", MUCH, file_room=in_file.away - 1), **tight)


def gpu(name: str, size: float) -> Gpu:
    """Of whose memory `size` bytes are used."""
    return Gpu(name, Memory(int(size / 0.9) + 1, int(size / 0.9) + 1), True)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are in small batches, so that gradients take more."""
    monkeypatch.setattr("tune_prune.tuning.memory.default_batch_tokens", lambda *_: 64)
    monkeypatch.setattr("tune_prune.tuning.memory.windows_at_once", lambda *_: 1)


@pytest.mark.usefixtures("small_batches")
def test_a_trial_on_several_gpus_goes_by_their_kind_where_a_node_has_one(planned) -> None:
    large, whole = gpu("H100", MUCH), planned(node("one", MUCH, gpus=(gpu("H100", MUCH),) * 2), gpus_per_trial=2)
    small = gpu("A10", whole.memory.total - 1)
    plan = planned(node("one", MUCH, gpus=(large, large)), node("two", MUCH, gpus=(small, small)), gpus_per_trial=2)
    lean = plan.memory.way
    assert (str(whole.memory.way), lean.gpus) == ("resident, on 2 GPUs", 2) and lean != whole.memory.way
    assert plan.gpu_ways == {"H100": {"tiny-llama": whole.memory.way}, "A10": {"tiny-llama": lean}}
    mixed = (node("one", MUCH, gpus=(large, small)), node("two", MUCH, gpus=(large, large)))
    assert planned(*mixed, gpus_per_trial=2).gpu_ways == {}


@pytest.mark.usefixtures("small_batches")
def test_states_of_a_gpu_wait_in_the_memory_of_its_node(planned) -> None:
    ways = planned(node("one", MUCH, gpus=(gpu("H100", MUCH),))).models[0].ways
    in_host = next(  # what is chosen on a GPU with that much memory
        way
        for index, way in enumerate(ways)
        if way.way.states == "host" and all(faster.total > way.total for faster in ways[:index])
    )
    small = gpu("A10", in_host.total)
    assert planned(node("one", in_host.away, gpus=(small,))).memory == in_host
    assert planned(node("one", in_host.away - 1, gpus=(small,))).memory.way.states == "file"
    two = (node("one", 0, gpus=(gpu("H100", MUCH),)), node("two", in_host.away, gpus=(small,)))
    kinds = planned(*two, gpus_per_trial=1).gpu_ways  # each kind by the memory of its own nodes
    assert kinds == {"H100": {"tiny-llama": RESIDENT}, "A10": {"tiny-llama": in_host.way}}
