"""A cluster of two nodes on this machine, started by the commands of docs/cluster.md, with a token: who is let in, what a plan says
of nodes, and a whole search whose driver is not on the head; and what a node looks for in storage, models and data."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray import cloudpickle

from tests.search_folders import data_folder, model_folder
from tests.trials import RUN
from tune_prune.core.config import ModelRun
from tune_prune.core.errors import UserError
from tune_prune.core.store import FolderStore
from tune_prune.data.sources import data_fingerprint
from tune_prune.models import catalog, loading
from tune_prune.tuning import nodes
from tune_prune.tuning.plan import SearchSettings
from tune_prune.tuning.resolve import dense_model

ROOT = Path(__file__).resolve().parents[2]
HEAD, WORKER = "127.0.0.2", "127.0.0.3"  # 127.0.0.1 would become this machine's outward address
# Of machines of one's own.
PAGE = next(text for text in (ROOT / "docs" / "cluster.md").read_text().split("\n## ") if text.startswith("Machines"))
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
# The driver's raylet is the worker's: on one machine Ray would take the head's.
OFF_THE_HEAD = f"""
import sys
import ray
init = ray.init
def join(**options):
    init(_node_ip_address="{WORKER}", **options)
    print("driver on", ray.util.get_node_ip_address())
ray.init = join
from tune_prune.commands import search
assert search.main([*sys.argv[1:], "--dry-run"]) == 2
sys.exit(search.main([*sys.argv[1:], "--gpus-per-trial", "0"]))
"""
# `ray stop` ends every Ray of its user: here it sees the processes of this cluster alone.
OF_THIS_CLUSTER = """
import os
import psutil
everything = psutil.process_iter
def here(attributes=None):
    for process in everything(attributes):
        try:
            if process.environ().get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"]:
                yield process
        except psutil.Error:
            pass
psutil.process_iter = here
from ray.scripts.scripts import main
main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and an environment with its token. The head has no CPU for trials, the other node one."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        home = Path(folder, "home")
        home.mkdir()
        with socket.socket() as free:
            free.bind((HEAD, 0))
            address = f"{HEAD}:{free.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",  # as the page exports it
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        both = " --object-store-memory=100000000 --dashboard-agent-listen-port=0"
        head = f" --node-ip-address={HEAD} --port={address.partition(':')[2]} --include-dashboard=false --num-cpus=0"
        token, *starts = [command for command in COMMANDS if command.startswith("ray ") and "stop" not in command]
        first, second = (command.replace("HEAD:6379", address) + both for command in starts)
        try:
            for command in (token, first + head, second + f" --node-ip-address={WORKER} --num-cpus=1 --num-gpus=1"):
                done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
            yield address, environment
        finally:
            for process in psutil.process_iter(["environ"]):
                if (process.info["environ"] or {}).get("RAY_TMPDIR") == folder:
                    process.kill()


JOIN = """
import sys
import time
from tune_prune.core.ending import exit_code
from tune_prune.tuning import set_up_ray
set_up_ray(sys.argv[1])
from tune_prune.tuning import nodes, ray

def join():
    with ray.connected(sys.argv[1]):
        while len(nodes.alive()) < 3:
            time.sleep(1)
        nodes.survey(False)

exit_code(join)
"""


def joined(address: str, environment: Mapping[str, str]) -> str:
    """What a process of its own says that joins the cluster, and asks its nodes when they are three."""
    argv = [sys.executable, "-c", JOIN, address]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_cluster_with_a_token_lets_nobody_in_without_it(cluster, tmp_path) -> None:
    address, environment = cluster
    without = {name: value for name, value in environment.items() if name != "RAY_AUTH_MODE"}
    # The first has the token, and does not send it to where it was not asked for. Both wait for most of their time.
    with ThreadPoolExecutor() as pool:
        sentences = pool.map(partial(joined, address), (without, environment | {"RAY_AUTH_TOKEN": "another"}))
    for sentence in sentences:
        assert sentence.startswith(f"error: the Ray cluster at {address} cannot be joined (")
        assert "set RAY_AUTH_MODE=token and copy ~/.ray/auth_token" in sentence and sentence.count("\n") == 1


@pytest.mark.slow
def test_a_search_from_a_node_that_is_not_the_head(cluster, tmp_path) -> None:
    """A node whose torch does not see the GPU that it offers is named by the dry run."""
    address, environment = cluster
    (dry, command) = [command for command in COMMANDS if command.startswith("tune-prune search")]
    assert dry == f"{command} --dry-run"
    space = tmp_path / "one.yaml"
    space.write_text("search: grid\nmethod: random\nseq_len: 16\nnum_samples: 8\n")
    places = {"/shared": tmp_path / "not" / "yet", "smoke": space, "auto": address}
    for word, place in places.items():
        command = command.replace(word, str(place))
    argv = [*shlex.split(command)[2:], "--tasks", "boolq", "--limit", "2", "--verbose"]
    done = subprocess.run(
        [sys.executable, "-c", OFF_THE_HEAD, *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (sentence,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.search(rf"node .* \({WORKER}\) offers GPUs but its torch sees none: install", sentence), sentence
    assert sentence.endswith("or end Ray there (`ray stop`) to do without it")
    lines = done.stdout.splitlines()
    assert {line for line in lines if line.startswith("driver on ")} == {f"driver on {WORKER}"}
    assert "[1/1]" in done.stdout
    (first,) = (index for index, line in enumerate(lines) if line.startswith("nodes        2, all with tune_prune 0."))
    table = [line.split() for line in lines[first + 1 : first + 4]]
    assert table[0] == ["CPUs", "memory", "GPUs"]
    assert [row[1] for row in table[1:]] == [f"({HEAD})", f"({WORKER})"]
    assert table[1][2:] == ["0", "-", "no", "trials", "here"]
    assert table[2][2] == "1"
    assert list((tmp_path / "not" / "yet" / "ray_results").glob(".node-check*")) == []


@pytest.mark.slow
def test_a_node_with_another_version_is_named(cluster, tmp_path) -> None:
    """The cluster of this machine is auto, too, which finds out that it asks for a token."""
    address, environment = cluster
    without = {name: value for name, value in environment.items() if name != "RAY_AUTH_MODE"}
    metadata = tmp_path / "lm_eval-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 9.9\n")
    odd = [Path(sys.executable).with_name("ray"), "start", f"--address={address}", "--node-ip-address=127.0.0.4"]
    odd += ["--num-cpus=1", "--object-store-memory=100000000", "--dashboard-agent-listen-port=0", "--block"]
    others = environment | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with subprocess.Popen(odd, env=others, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        try:
            sentence = joined("auto", without)
        finally:
            for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
                process.kill()
    assert re.match(r"error: node .* \(127.0.0.4\) has lm_eval 9.9 \(here .*\): install the same versions", sentence)
    assert sentence.count("\n") == 1


@pytest.mark.slow
def test_the_end_of_ray(cluster) -> None:
    """The last of this cluster."""
    _, environment = cluster
    (stop,) = {command for command in COMMANDS if "stop" in command}
    argv = [sys.executable, "-c", OF_THIS_CLUSTER, *shlex.split(stop)[1:]]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and re.search(r"Stopped all \d+ Ray processes", done.stdout), done.stdout + done.stderr
    daemons = ("gcs_server", "raylet")
    left = [p.info for p in psutil.process_iter(["name", "environ"]) if p.info["name"] in daemons]
    assert [one for one in left if (one["environ"] or {}).get("RAY_TMPDIR") == environment["RAY_TMPDIR"]] == []


# --- what a node looks for and says, asked of this machine


def test_the_question_for_versions_travels_as_code(run_without: Callable[..., str], monkeypatch) -> None:
    """A node without this package, or with another one, reads it. A build of torch for GPUs is the same torch."""
    code = "from ray import cloudpickle\nprint(cloudpickle.loads(bytes.fromhex(sys.argv[1]))(['ray', 'nothing']))"
    told = run_without(("tune_prune",), code, cloudpickle.dumps(nodes.teller()).hex())
    assert "'tune_prune': 'none'" in told and f"'ray': '{ray.__version__}', 'nothing': 'none'" in told
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    assert nodes.teller()(["torch"])["torch"] == "2.13.0"


def test_a_node_that_cannot_download_says_so(monkeypatch) -> None:
    def refuse(source: catalog.ModelSource) -> None:
        if source.location == "somebody/gone":
            raise UserError("it is not there")

    monkeypatch.setattr(loading, "fetch_weights", refuse)
    runs = [replace(RUN, model="somebody/model"), replace(RUN, model="somebody/gone")]
    assert nodes.fetch(runs[:1]) is None
    assert nodes.fetch(runs).startswith("cannot download weights (it is not there): let it reach the hub")


@pytest.fixture
def known(tmp_path) -> tuple[FolderStore, list[tuple[ModelRun, str, str]]]:
    """Storage with a question in it, and a model with its data."""
    model, data = model_folder(tmp_path / "model"), tmp_path / "data"
    data_folder(data)
    run = dense_model(SearchSettings((str(model),), data_dir=str(data), calibration="embedded"), str(model), bool).run
    source = catalog.resolve(run.model)
    store = FolderStore(tmp_path / "storage")
    store.put("question", "token")
    return store, [(run, loading.model_fingerprint(source, loading.load_config(source)), data_fingerprint(run))]


def reach(store: FolderStore, models: list[tuple[ModelRun, str, str]]) -> str | None:
    return nodes.reach(store.folder, "question", "answer", "token", models)


def test_a_node_that_sees_storage_model_and_data_answers(known) -> None:
    store, models = known
    assert reach(store, models) is None and store.get("answer") == b"token"


@pytest.mark.parametrize("fault", ["not mounted", "another folder", "read-only"])
def test_storage_that_a_node_does_not_share_is_named(known, fault: str, monkeypatch) -> None:
    store, models = known
    if fault == "not mounted":
        shutil.rmtree(store.folder)
    elif fault == "another folder":
        store.put("question", "that of another search")
    else:

        def refuse(self: FolderStore, name: str, content: str) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(FolderStore, "put", refuse)
    problem = reach(store, models)
    assert problem is not None and f"does not share the folder {store.folder} (" in problem
    assert "set --storage-path to a folder that every node mounts" in problem
    assert ("Read-only file system" in problem) == (fault == "read-only")
    assert store.folder.exists() == (fault != "not mounted")  # a node makes no folder of its own


def test_models_and_data_that_a_node_lacks_are_named(known) -> None:
    store, [(run, model, data)] = known
    shutil.copy(Path(run.model) / "config.json", Path(run.model) / "generation_config.json")
    assert reach(store, [(run, "of before", data)]).startswith("has another model in ")
    assert reach(store, [(run, model, "of before")]).startswith("has other texts or tasks than this machine (")
    shutil.rmtree(run.data_dir)
    assert reach(store, [(run, model, data)]).startswith("lacks what model needs (")
    gone = replace(run, model=f"{run.model}/gone")
    assert f"model folder {run.model}/gone does not exist" in reach(store, [(gone, model, data)])
