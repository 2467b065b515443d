"""Questions to a cluster's nodes that are not answered, or answered as they must not be: a sentence that names the node. Ray is
replaced."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, WorkerCrashedError

from tests.trials import RUN
from tune_prune.core.errors import UserError
from tune_prune.core.machine import Memory
from tune_prune.core.store import open_store
from tune_prune.data.sources import data_fingerprint
from tune_prune.models import loading
from tune_prune.models.catalog import ModelSource, resolve
from tune_prune.tuning.gpus import Gpu
from tune_prune.tuning.ray_cluster import nodes
from tune_prune.tuning.resources import Node, TrialResources

GPU = Gpu("H200", Memory(80 * 2**30, 79 * 2**30), True)
MEMORY = Memory(512 * 2**30, 500 * 2**30)
FILE_ROOM = 5 * 2**30


def node(name: str, gpus: float = 2.0, cpus: float = 8.0) -> dict[str, Any]:
    return {
        "NodeID": name * 56,
        "Alive": True,
        "Resources": {"CPU": cpus, "GPU": gpus},
        "NodeManagerHostname": f"gpu-{name}",
        "NodeManagerAddress": f"10.0.0.{name}",
    }


class Task:
    """A remote function whose answers are set by the test: what it returns by node or, of an exception, raises."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer, self.asked = answer, []

    def options(self, scheduling_strategy: Any, **resources: Any) -> Any:
        self.asked.append((scheduling_strategy.node_id[0], resources))
        return SimpleNamespace(remote=lambda *_: partial(self.answer, scheduling_strategy.node_id[0]))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two nodes with GPUs that answer well; what `about` and `hardware` say can be replaced, and so can the order in which nodes
    answer, those that are not in it never."""
    here, _ = nodes._teller()(nodes.COMPARED)
    said = SimpleNamespace(
        nodes=[node("1"), node("2")],
        about=lambda name: (here, time.time()),
        hardware=lambda name: (MEMORY, FILE_ROOM, [GPU], False),
        here=here,
        order="1234",
    )

    def wait(tasks: list[partial[Any]], timeout: float | None) -> tuple[list[partial[Any]], list[partial[Any]]]:
        first = min(
            (task for task in tasks if task.args[0] in said.order),
            key=lambda task: said.order.index(task.args[0]),
            default=None,
        )
        return [task for task in tasks if task is first], [task for task in tasks if task is not first]

    def get(task: partial[Any]) -> Any:
        value = task()
        if isinstance(value, Exception):
            raise value
        return value

    hardware = Task(lambda name: said.hardware(name))
    said.asked = hardware.asked
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "nodes", lambda: said.nodes)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: Task(lambda name: said.about(name)))
    monkeypatch.setattr(nodes, "_hardware", hardware)
    monkeypatch.setattr(nodes, "available_resources_per_node", lambda: {"1" * 56: {"GPU": 2.0}, "2" * 56: {"GPU": 0.5}})
    return said


def other(cluster: SimpleNamespace, **versions: str) -> Callable[[str], Any]:
    """Node 2 has these versions."""
    return lambda name: (cluster.here | (versions if name == "2" else {}), time.time())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "did not answer within 120 s: see `ray status`"),
        (WorkerCrashedError(), "cannot run tune_prune"),
        ({"torch": "2.12.0"}, "has torch 2.12.0 (here 2."),
        ({"tune_prune": "none"}, "has tune_prune none (here "),
        (100.0, "has a clock that is 100 s ahead of this machine's: set both"),
        (-100.0, "has a clock that is 100 s behind this machine's"),
    ],
)
def test_a_node_that_is_not_like_this_machine_is_named(cluster, answer: Any, words: str) -> None:
    if answer is None:
        cluster.order = "1"
    elif isinstance(answer, dict):
        cluster.about = other(cluster, **answer)
    elif isinstance(answer, float):
        cluster.about = lambda name: (cluster.here, time.time() + (answer if name == "2" else 0))
    else:
        cluster.about = lambda name: answer if name == "2" else (cluster.here, time.time())
    with pytest.raises(UserError, match=r"^node gpu-2 \(10\.0\.0\.2\) .*`ray stop`\) to do without it$") as error:
        nodes.survey(use_gpus=True)
    assert words in str(error.value)


def test_a_clock_is_compared_when_its_node_answers(cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the slowest has."""
    now = [1000.0]
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))

    def about(name: str) -> Any:
        now[0] += 1 if name == "2" else 110  # the first takes long to start
        return cluster.here, now[0] + (100 if name == "2" else 0)

    cluster.about, cluster.order = about, "21"
    with pytest.raises(UserError, match=r"^node gpu-2 .* has a clock that is 100 s ahead of this machine's"):
        nodes.survey(use_gpus=True)


def test_all_nodes_with_problems_are_listed(cluster) -> None:
    cluster.nodes.append(node("3"))
    cluster.about = lambda name: (cluster.here | ({"ray": "2.55.0"} if name in "13" else {}), time.time())
    with pytest.raises(UserError) as error:
        nodes.survey(use_gpus=True)
    first, *rest = str(error.value).splitlines()
    assert first.startswith("2 of 3 nodes cannot run trials") and "ray stop" in first
    assert [line.split()[1] for line in rest] == ["gpu-1", "gpu-3"]


def test_a_build_of_torch_for_gpus_is_the_same_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    assert nodes._teller()(["torch"])[0]["torch"] == "2.13.0"


def test_the_question_for_versions_travels_as_code(run_without: Callable[..., str]) -> None:
    """A node without this package, or with another one, reads it."""
    code = "from ray import cloudpickle\nprint(cloudpickle.loads(bytes.fromhex(sys.argv[1]))(['ray', 'nothing'])[0])"
    told = run_without(("tune_prune",), code, cloudpickle.dumps(nodes._teller()).hex())
    assert "'tune_prune': 'none'" in told and f"'ray': '{ray.__version__}', 'nothing': 'none'" in told


def test_gpus_are_asked_where_they_are_free_and_only_their_nodes_run_trials(cluster) -> None:
    cluster.nodes.append(node("3", gpus=0.0))
    found = nodes.survey(use_gpus=True)
    assert [(one.runs_trials, one.gpus) for one in found] == [(True, (GPU,)), (True, (GPU,)), (False, ())]
    assert cluster.asked == [("1", {"num_gpus": 2}), ("2", {"num_gpus": 0.01})]
    assert (found[0].memory, found[0].file_room) == (MEMORY, FILE_ROOM) and found[2].memory is None
    assert found[0].versions == cluster.here and found[0].skew_s == 0
    cluster.asked.clear()
    cluster.nodes.append(node("4", cpus=0.0))
    assert [one.runs_trials for one in nodes.survey(use_gpus=False)] == [True, True, True, False]
    assert {resources["num_gpus"] for _, resources in cluster.asked} == {0}


def test_a_node_whose_torch_sees_no_gpu_is_named(cluster) -> None:
    cluster.hardware = lambda name: (MEMORY, FILE_ROOM, [], False)
    with pytest.raises(UserError, match="offers GPUs but its torch sees none"):
        nodes.survey(use_gpus=True)


def test_a_node_with_a_gpu_that_torch_has_no_kernels_for_is_named(cluster) -> None:
    old = replace(GPU, problem="GPU 1 (Tesla V100) is of compute capability 7.0")
    cluster.hardware = lambda name: (MEMORY, FILE_ROOM, [GPU, old] if name == "2" else [GPU], False)
    with pytest.raises(
        UserError, match=r"^node gpu-2 .* cannot use: GPU 1 \(Tesla V100\) .*\(--gpus-per-trial 0\); or end"
    ):
        nodes.survey(use_gpus=True)


@pytest.mark.parametrize("seen", ["used", "removed"])
def test_a_folder_that_another_search_makes_at_the_same_time_hides_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    folder = tmp_path / "new" / "results"

    def ask(*_: object) -> tuple[dict[str, Any], dict[str, str]]:
        if seen == "used":
            (folder / "of another search").touch()
        else:
            shutil.rmtree(folder)
        return {}, {"gpu-2": "is not well"}

    monkeypatch.setattr(nodes, "_ask", ask)
    with pytest.raises(UserError, match="node gpu-2 is not well"):
        nodes.check_reach([Node("2" * 56, "gpu-2", {}, runs_trials=True)], folder, [])
    assert [path.name for path in folder.parent.glob("*/*")] == ["of another search"] * (seen == "used")
    assert folder.parent.exists() == (seen == "used")


def test_a_worker_that_dies_while_it_measures_is_a_sentence_and_a_late_one_is_none(monkeypatch) -> None:
    def answers(error: Exception) -> None:
        def get(task: object, timeout: float) -> object:
            raise error

        monkeypatch.setattr(ray, "get", get)

    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: SimpleNamespace(remote=lambda *_: "task"))
    monkeypatch.setattr(ray, "cancel", lambda task: None)
    answers(OutOfMemoryError("killed by the memory monitor\nand more"))
    with pytest.raises(UserError, match="memory monitor") as error:
        nodes.call(len, (), TrialResources())
    assert "\n" not in str(error.value)
    answers(GetTimeoutError("late"))
    assert nodes.call(len, (), TrialResources()) is None
    answers(ZeroDivisionError())  # of the function: a defect keeps its traceback
    with pytest.raises(ZeroDivisionError):
        nodes.call(len, (), TrialResources())


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({}, None),
        ({"2": "cannot download weights (no network): let it reach the hub"}, r"node gpu-2 .* \(no network\): let it"),
        ({"1": "x", "2": "y"}, "2 of 2 nodes cannot run trials"),
        ({"2": WorkerCrashedError()}, r"node gpu-2 .* cannot run tune_prune \("),
    ],
)
def test_weights_are_fetched_on_nodes_where_a_trial_fits(
    cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], sentence: str | None
) -> None:
    cluster.nodes.append(node("3", cpus=0.0))
    fetch = Task(answers.get)
    monkeypatch.setattr(nodes, "_fetch", fetch)
    nodes.fetch_weights([RUN], TrialResources(1.0, 0.0))
    assert fetch.asked == []  # a model that is no hub's
    with contextlib.nullcontext() if sentence is None else pytest.raises(UserError, match=sentence):
        nodes.fetch_weights([RUN, replace(RUN, model="somebody/model")], TrialResources(1.0, 0.0))
    assert [name for name, _ in fetch.asked] == ["1", "2"]


def test_a_node_that_cannot_download_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: ModelSource) -> None:
        if source.location == "somebody/gone":
            raise UserError("it is not there")

    monkeypatch.setattr(loading, "fetch_weights", refuse)
    runs = [replace(RUN, model="somebody/model"), replace(RUN, model="somebody/gone")]
    assert nodes._fetch._function(runs[:1]) is None
    assert nodes._fetch._function(runs) == (
        "cannot download weights (it is not there): let it reach the hub, or set HF_HOME to a folder that every node mounts"
    )


@pytest.fixture
def reach(cluster: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a node does in place of `_reach`, by its name; the others do what it does."""
    otherwise: dict[str, Any] = {}

    def options(scheduling_strategy: Any) -> Any:
        name = scheduling_strategy.node_id[0]
        return SimpleNamespace(remote=lambda *more: partial(otherwise.get(name, lambda *_: cluster.ask(*more)), name))

    monkeypatch.setattr(nodes, "_reach", SimpleNamespace(options=options))
    cluster.ask = nodes_reach
    return otherwise


nodes_reach = nodes._reach._function
WORKERS = [Node(name * 56, f"gpu-{name}", {}, runs_trials=True) for name in "12"]


def test_nodes_that_reach_everything_leave_nothing(reach: dict[str, Any], tmp_path: Path) -> None:
    source = resolve(RUN.model)
    model = (RUN, loading.model_fingerprint(source, loading.load_config(source)), data_fingerprint(RUN))
    nodes.check_reach(WORKERS, tmp_path / "new" / "results", [model])
    assert not any(tmp_path.iterdir())


def test_an_answer_that_is_not_seen_here_is_a_folder_that_is_not_shared(reach: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "results"
    reach["2"] = lambda name: None  # it has written somewhere
    said = f"does not share the folder {place}"
    with pytest.raises(UserError, match=rf"^node gpu-2 {said} .*\(what it writes is not seen here\)"):
        nodes.check_reach(WORKERS, place, [])
    assert open_store(place).names() == [] and not any(tmp_path.iterdir())


def test_what_a_node_does_not_reach_is_named(tmp_path: Path) -> None:
    """On the node, branch by branch."""
    store, source = open_store(tmp_path), resolve(RUN.model)
    model, data = loading.model_fingerprint(source, loading.load_config(source)), data_fingerprint(RUN)

    def said(models: list[Any], question: str = "question", answer: str = "answer", token: str = "token") -> Any:
        return nodes_reach(tmp_path, question, answer, token, models)

    store.put("question", "token")
    assert said([(RUN, model, data)]) is None and store.get("answer") == b"token"
    assert "(it does not see what this machine writes): set --storage-path" in said([], question="elsewhere")
    assert "(it does not see what this machine writes)" in said([], token="of another folder with that name")
    (tmp_path / "in_the_way").touch()
    assert "(FileExistsError: File exists)" in said([], answer="in_the_way/answer")
    assert said([(RUN, "another", data)]).startswith(f"has another model in {source.location}: copy")
    assert said([(RUN, model, "another")]) == ("has other texts or tasks than this machine (embedded): copy them there")
    lacking = said([(replace(RUN, model=str(tmp_path / "nothing")), model, data)])
    assert (
        lacking.startswith(f"lacks what tiny-llama needs (model folder {tmp_path}/nothing does not exist")
        and "mounts" in lacking
    )
