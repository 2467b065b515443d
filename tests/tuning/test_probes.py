"""Questions to a cluster's nodes that are not answered: a sentence that names the node. Ray is replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, WorkerCrashedError

from tune_prune.core.errors import UserError
from tune_prune.cost_model.machine import Gpu, Memory
from tune_prune.tuning.ray_cluster import cluster, remote
from tune_prune.tuning.ray_cluster.resources import TrialResources

NODE = {
    "NodeID": "a" * 56,
    "Alive": True,
    "Resources": {"CPU": 8.0, "GPU": 2.0},
    "NodeManagerHostname": "gpu-7",
    "NodeManagerAddress": "10.0.0.7",
}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch):
    """A function that sets what a node's task returns or, of an exception, raises."""

    def set_to(value: object) -> None:
        def get(task: object, timeout: float) -> object:
            assert task == "task" and timeout > 0
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(ray, "get", get)

    task = SimpleNamespace(options=lambda **_: task, remote=lambda *_: "task")
    monkeypatch.setattr(ray, "nodes", lambda: [NODE])
    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: task)
    monkeypatch.setattr(ray, "cancel", lambda task: None)
    monkeypatch.setattr(cluster, "_gpus", task)
    return set_to


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (GetTimeoutError("late"), "did not answer within 120 s: see `ray status`"),
        (WorkerCrashedError(), "cannot run tune_prune"),
        ([], "its torch sees none"),
    ],
)
def test_a_node_that_cannot_say_its_gpu_memory_is_named(answer, value: object, words: str) -> None:
    answer(value)
    with pytest.raises(UserError, match=r"^node gpu-7 \(10\.0\.0\.7\) ") as error:
        cluster.gpus()
    assert words in str(error.value) and "\n" not in str(error.value)
    gpu = Gpu("H200", Memory(80 * 2**30, 79 * 2**30), True)
    answer([gpu])
    assert cluster.gpus() == [gpu]


def test_a_worker_that_dies_while_it_measures_is_a_sentence_and_a_late_one_is_none(answer) -> None:
    answer(OutOfMemoryError("killed by the memory monitor\nand more"))
    with pytest.raises(UserError, match="memory monitor") as error:
        remote.call(len, (), TrialResources())
    assert "\n" not in str(error.value)
    answer(GetTimeoutError("late"))
    assert remote.call(len, (), TrialResources()) is None
    answer(ZeroDivisionError())  # of the function: a defect keeps its traceback
    with pytest.raises(ZeroDivisionError):
        remote.call(len, (), TrialResources())
