"""The Ray of a search: what does not start ends in a sentence, and whatever ends the search ends Ray."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from tests.search_folders import TINY
from tune_prune.commands import search
from tune_prune.core.errors import UserError
from tune_prune.tuning import local_ray, orphans, set_up_ray
from tune_prune.tuning import ray as tuning_ray

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_ray(monkeypatch) -> None:
    """Another file's Ray may be up in this process."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpus", "long", "code", "words"),
    [(-1, "", 1, "Ray has ended: its "), (1, "a" * 100, 2, "set RAY_TMPDIR to a short writable path, e.g. /tmp/r")],
)
def test_a_ray_that_does_not_start_is_a_sentence(cpus, long, code, words, ray_folder):
    folder = ray_folder / long
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", CONNECTED.replace("None, 1", f"None, {cpus}")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr and not list(folder.iterdir())


@pytest.mark.slow
def test_a_plan_that_is_refused_ends_a_ray_that_was_starting(no_ray, ray_folder, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder))
    with local_ray.started_early(True):
        wait_for(lambda: any("gcs_server" in one.name() for one in orphans.processes(*ray_folder.iterdir())), 60)
        began = time.monotonic()
    assert time.monotonic() - began < 5 and not list(ray_folder.iterdir())


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (lambda **_: (_ for _ in ()).throw(ConnectionError("Could not find any running Ray instance")), "running Ray"),
        (lambda **_: None, "--address is auto, which is the Ray of another search"),
    ],
)
def test_auto_is_a_cluster_and_no_ray_of_another_search(init, words, no_ray, monkeypatch):
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, local_ray.RESOURCE: 1.0})
    with pytest.raises(UserError, match=words), tuning_ray.connected("auto"):
        pass


@pytest.mark.parametrize(
    ("address", "loopback", "words"), [(None, "1", "ray was imported before"), ("auto", "0", "restart Python to use")]
)
def test_a_ray_that_was_imported_with_other_switches_is_refused(address, loopback, words, no_ray, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", loopback)
    with pytest.raises(UserError, match=words):
        set_up_ray(address)


@pytest.mark.parametrize("flag", ["--dry-run", "--inline"])
def test_a_dry_run_and_a_search_without_ray_start_none(flag, no_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(local_ray, "LocalRay", lambda *_: pytest.fail("Ray is started"))
    space = tmp_path / "one.yaml"
    space.write_text("search: grid\nmethod: random\nseq_len: 16\nnum_samples: 8\n")
    argv = ["--model", "tiny-llama", "--search-space", str(space), "--tasks", "boolq", "--limit", "2"]
    assert search.main([*argv, flag, "--storage-path", str(tmp_path)]) == 0


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where a Ray of the test keeps its files; the name is short, as socket paths end at 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def wait_for(what: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


CONNECTED = """
import sys
from tune_prune.core.ending import exit_code
from tune_prune.tuning import set_up_ray
set_up_ray(None)
from tune_prune.tuning import ray as tuning_ray

def main():
    with tuning_ray.connected(None, 1):
        import ray
        print(ray.get(ray.remote(lambda: "in").remote()), flush=True)
        for line in sys.stdin:
            pass

sys.exit(exit_code(main))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "code"), [("nothing", 0), ("driver", -signal.SIGKILL), ("raylet", 1), ("gcs_server", 1)]
)
def test_whatever_ends_a_search_its_ray_leaves_nothing(dies, code, ray_folder):
    """Also behind a proxy that is dead, which its processes ask for nothing, and where a worker is stopped."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    files = {"RAY_TMPDIR": str(ray_folder), "TMPDIR": str(ray_folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(
        [sys.executable, "-c", CONNECTED],
        env=os.environ | proxies | files | {"RAY_grpc_enable_http_proxy": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None and driver.stdin is not None
    assert driver.stdout.readline() == "in\n"
    (of_ray,) = ray_folder.glob("tune_prune.*")
    assert stat.filemode(of_ray.stat().st_mode) == "drwx------"  # what Ray has within it is open to everybody
    processes = {process.name(): process for process in orphans.processes(of_ray)}
    next(process for name, process in processes.items() if name.startswith("ray::IDLE")).suspend()
    if dies == "driver":
        driver.kill()
    elif dies in processes:
        processes[dies].kill()
        driver.wait(timeout=60)  # it ends by force after ten seconds of a process that other tests slow down
    said = driver.communicate()[1]
    assert driver.returncode == code, said
    if code == 1:
        assert said.startswith("error: Ray has ended: its ") and said.count("\n") == 1
    wait_for(lambda: not orphans.processes(of_ray) and not of_ray.exists(), 15 if dies == "driver" else 1)
    assert dies == "driver" or not list(ray_folder.glob("tune_prune.*"))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_ray_that_dies_is_a_sentence_whichever_signal_this_process_hears(sign, monkeypatch):
    """No later search of this process, as in a notebook, is on the dead one."""
    monkeypatch.setattr(tuning_ray, "A_SIGNAL_S", 0.05)
    monkeypatch.setattr(tuning_ray, "_dead", threading.Event())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(sign, signal.default_int_handler)
        lost = pytest.raises(tuning_ray.RayLost, match="Ray has ended: its raylet died")
        with lost, tuning_ray._watched(lambda _: "raylet"):
            wait_for(lambda: False, 30)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with pytest.raises(tuning_ray.RayLost, match="died: restart Python"), tuning_ray.connected(None):
        pass


def test_a_head_is_lost_when_it_was_silent_long_enough(monkeypatch):
    """One that is started again in time is not; and nobody asks for a head whose search is over."""
    now, silent = 0.0, [(10, 45), (60, 1000)]  # from, to

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            now += timeout or 0.0
            return False

    def check(address: str) -> None:
        if any(begin < now <= end for begin, end in silent):
            raise UserError("no answer")

    monkeypatch.setattr(tuning_ray.time, "monotonic", lambda: now)
    monkeypatch.setattr(tuning_ray.address_check, "check", check)
    assert tuning_ray._silence_of("head:6379", Over()) == "head at head:6379"
    assert now == 60 + tuning_ray.SILENCE_S
    over = threading.Event()
    over.set()
    assert tuning_ray._silence_of("head:6379", over) == "head at head:6379" and now == 60 + tuning_ray.SILENCE_S


TRACKERS = """
import sys
from tune_prune.tuning import ray
ray._leave_trackers_out()
from ray.air._internal import usage
usage._count_callbacks([])  # as Ray Tune does whenever a search begins
assert not {"mlflow", "wandb"} & set(sys.modules)
import mlflow, wandb  # they are there for who wants them
"""


@pytest.mark.slow
def test_ray_imports_no_tracker_that_nobody_asked_for():
    run = subprocess.run([sys.executable, "-c", TRACKERS], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_search_that_is_terminated_says_how_to_go_on(ray_folder, tmp_path):
    """And leaves neither a process nor a file. `make torture` does the same to its other parts."""
    command = [sys.executable, "-m", "tune_prune.search", *TINY, "--limit", "60", "--storage-path", str(tmp_path)]
    driver = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(ray_folder), "RAY_TMPDIR": str(ray_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("[prepare 1/"):
            break
    driver.terminate()
    said = driver.communicate(timeout=120)[1]
    assert driver.returncode == 143 and "terminated: finished trials are kept" in said, said
    assert "to go on, run the same command again:\n  tune-prune search --model tiny-llama" in said
    assert "Traceback" not in said and "SIGTERM" not in said
    assert not list(ray_folder.glob("*tune_prune*"))
