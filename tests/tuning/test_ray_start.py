"""The start of a local Ray, in a process of its own beside imports and plan: what does not start ends in a sentence, and whatever
ends the search ends Ray."""

from __future__ import annotations

import contextlib
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

import psutil
import pytest
import ray

from tests.search_folders import TINY
from tune_prune.commands import search
from tune_prune.core.errors import MachineError
from tune_prune.tuning import preflight
from tune_prune.tuning.ray_cluster import cluster, head, local, loss

ROOT = Path(__file__).resolve().parents[2]
RAYS_WORDS = (
    "The current node timed out during startup. This could happen because some of the raylet failed to startup."
)


@pytest.mark.parametrize("error", [Exception(RAYS_WORDS), ConnectionError(RAYS_WORDS), RuntimeError(RAYS_WORDS)])
def test_a_ray_that_does_not_start_is_tried_again_and_then_a_sentence(error, monkeypatch, tmp_path):
    tried = []

    def init(**options: object) -> None:
        tried.append(options)
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(os, "getloadavg", lambda: (10.25, 9.0, 8.0))
    for name in ("RAY_preload_python_modules", "RAY_prestart_worker_first_driver"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back what `start` sets
    with pytest.raises(MachineError) as refused:
        head.start(2, tmp_path)
    said = str(refused.value)
    assert len(tried) == 2
    assert said.startswith("Ray did not start in 2 attempts (The current node timed out during startup; ")
    assert f"; load 10.2 of {len(os.sched_getaffinity(0))} CPU" in said and "--inline" in said


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """A function (code): that code is run in place of a local Ray, whose last act is to write the file that it returns."""
    ended = tmp_path / "ended"

    def put(code: str) -> Path:
        (tmp_path / "stand_in.py").write_text(
            f"import sys\n{code}\nsys.stdin.read()\nopen({str(ended)!r}, 'w').close()\n"
        )
        return ended

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local, "_HEAD", "stand_in")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return put


@pytest.mark.parametrize(
    ("code", "exit_code", "sentence"),
    [
        ("""print('{"machine_error": "Ray did not start in 2 attempts"}', flush=True)""", 1, "Ray did not start in 2"),
        ("""print('{"user_error": "set RAY_TMPDIR"}', flush=True)""", 2, "set RAY_TMPDIR"),
        ("sys.exit(3)", 1, "Ray ended while it started (exit code 3; load "),
    ],
)
def test_what_its_process_says_is_what_the_search_says(code, exit_code, sentence, stand_in, tmp_path, capfd):
    ended = stand_in(code)
    assert search.main([*TINY, "--limit", "2", "--storage-path", str(tmp_path)]) == exit_code
    said = capfd.readouterr().err
    assert said.startswith(f"error: {sentence}") and said.count("\n") == 1
    assert ended.exists() == ("exit" not in code)


def test_processes_of_a_local_ray_ask_no_proxy_for_each_other(stand_in, monkeypatch):
    monkeypatch.setenv("RAY_grpc_enable_http_proxy", "1")
    stand_in(
        """import json, os\nprint(json.dumps({"machine_error": os.environ["RAY_grpc_enable_http_proxy"]}), flush=True)"""
    )
    with local.LocalRay(1) as started, pytest.raises(MachineError, match=r"^0$"):
        started.address()
    assert os.environ["RAY_grpc_enable_http_proxy"] == "0"  # noqa: SIM112  # of this one, which joins it


@pytest.mark.slow
def test_a_local_ray_starts_behind_a_proxy_that_is_dead():
    code = (
        "import ray\nfrom tune_prune.tuning.ray_cluster import cluster\n"
        "with cluster.connected(None, 1):\n    print(ray.get(ray.put('in')))"
    )
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    environment = os.environ | proxies | {"RAY_grpc_enable_http_proxy": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("in\n", 0), done.stderr


@pytest.mark.parametrize(
    ("stops", "exit_code"), [(["--num-trials", "3"], 2), (["--search-space", "nowhere"], 2), ([], 130)]
)
def test_a_plan_that_is_refused_or_interrupted_ends_ray(stops, exit_code, stand_in, tmp_path, monkeypatch):
    def interrupted(settings: object, card: object) -> None:
        raise KeyboardInterrupt

    ended = stand_in("")
    if exit_code == 130:
        monkeypatch.setattr(preflight, "make_plan", interrupted)
    assert search.main([*TINY, *stops, "--storage-path", str(tmp_path)]) == exit_code
    assert ended.exists()


@pytest.mark.parametrize("flag", ["--dry-run", "--inline"])
def test_a_dry_run_and_a_search_without_ray_start_none(flag, tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(local, "LocalRay", lambda: pytest.fail("Ray is started"))
    space = tmp_path / "one.yaml"
    space.write_text("search: grid\nmethod: random\nseq_len: 16\nnum_samples: 8\n")
    argv = ["--model", "tiny-llama", "--search-space", str(space), "--tasks", "boolq", "--limit", "2"]
    assert search.main([*argv, flag, "--storage-path", str(tmp_path)]) == 0


@pytest.fixture
def ray_folder(monkeypatch) -> Iterator[Path]:
    """Where a Ray of the test keeps its files; the name is short, as socket paths end at 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        yield Path(folder)


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those whose command names it, as those of a Ray do."""
    found = psutil.process_iter(["cmdline"])
    return [
        process for process in found if str(folder) in " ".join(process.info["cmdline"] or ())
    ]  # None: it has ended


WHILE_IT_IS_ENDED = """
import sys, threading, time
from pathlib import Path
from tune_prune.core import temporary
from tune_prune.tuning.ray_cluster import head

def a_thread_of_ray_fails(folder):
    thread = threading.Thread(target=lambda: open("/no/such/socket"))
    thread.start()
    thread.join()

temporary.remove = a_thread_of_ray_fails
print("it is said before", file=sys.stderr)
head._end_with_the_search(Path(sys.argv[1]))
"""


def test_what_rays_threads_say_of_its_end_is_not_shown(tmp_path):
    """Its listener of errors printed a traceback where the control store was ended as it subscribed to it."""
    argv = [sys.executable, "-c", WHILE_IT_IS_ENDED, str(tmp_path / "of_ray")]
    done = subprocess.run(argv, input="", capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "it is said before\n")


@pytest.mark.slow
@pytest.mark.parametrize("far", ["half", "up"])
def test_a_ray_that_no_search_has_joined_leaves_nothing(far, ray_folder):
    with local.LocalRay(1) as starting:
        if far == "up":
            starting.address()
        else:
            wait_for(lambda: any("raylet" in process.name() for process in processes_of(ray_folder)))
        rights = {path.name[:11]: stat.filemode(path.stat().st_mode) for path in ray_folder.iterdir()}
        assert rights == {"tune_prune.": "drwx------"}  # what Ray has within it is open to everybody
        began = time.monotonic()
    assert time.monotonic() - began < 5
    wait_for(lambda: not processes_of(ray_folder), 5)
    assert list(ray_folder.iterdir()) == []


@pytest.mark.slow
def test_a_ray_ends_with_a_search_that_is_killed(ray_folder):
    code = "from tune_prune.tuning.ray_cluster.local import LocalRay\nprint(LocalRay(1).address(), flush=True)\ninput()"
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert driver.stdout is not None and b"127.0.0.1" in driver.stdout.readline()
    assert processes_of(ray_folder)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    wait_for(lambda: not processes_of(ray_folder) and not list(ray_folder.iterdir()), 10)


@pytest.mark.slow
def test_the_workers_that_have_started_with_ray_run_the_trials(ray_folder, tmp_path):
    """In a process of its own, as a command: two workers, which have imported before they were asked to."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    command = [
        "taskset",
        "-c",
        ",".join(map(str, cpus)),
        sys.executable,
        "-m",
        "tune_prune.search",
        *TINY,
        "--limit",
        "2",
    ]
    driver = subprocess.Popen(
        [*command, "--storage-path", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    workers = set()
    while driver.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(driver.pid).children(recursive=True)
            workers |= {process.pid for process in processes if process.name().startswith(("ray::IDLE", "ray::Prune"))}
        time.sleep(0.1)
    out, err = driver.communicate()
    assert driver.returncode == 0 and "[6/6]" in out, err
    assert len(workers) == len(cpus)
    assert not processes_of(ray_folder) and not list(ray_folder.iterdir())


def wait_in_python(seconds: float) -> None:
    """An interrupt from a thread is not heard by a system call."""
    for _ in range(round(seconds / 0.01)):
        time.sleep(0.01)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_ray_that_dies_while_it_is_joined_is_a_sentence(sign, monkeypatch):
    """Whichever signal this process hears, and although Ray has put a handler of its own there, which exits with 15.
    No later search of this process, as in a notebook, is on the dead one."""
    monkeypatch.setattr(loss, "A_SIGNAL_S", 0.05)
    monkeypatch.setattr(loss, "_DEAD", threading.Event())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # dead or not
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(sign, lambda number, frame: sys.exit(number))
        with pytest.raises(loss.RayLost, match="Ray has ended: its raylet died"), loss.watched(lambda _: "raylet"):
            wait_in_python(30)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for work in (cluster.connected(None), local.started_early(True)):
        with pytest.raises(MachineError, match="the Ray of this Python process has died: restart Python"), work:
            pass
    with local.started_early(False) as unwanted:
        assert unwanted is None


@pytest.mark.parametrize(
    ("announced", "sentence"),
    [(None, "no Ray cluster was started on this machine"), ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1")],
)
@pytest.mark.parametrize("named", [None, "auto"])  # what scripts set it to
def test_auto_is_the_cluster_that_was_started_here_and_no_other_ray(
    named, announced, sentence, tmp_path, monkeypatch, capfd
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if named is not None:
        monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(cluster, "read_ray_address", lambda: announced)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray looks for one itself"))
    assert search.main([*TINY, "--address", "auto", "--storage-path", str(tmp_path)]) == 2
    assert sentence in capfd.readouterr().err


TRACKERS = """
import sys
from tune_prune.tuning.ray_cluster import tuner
tuner.leave_trackers_out()
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
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(ray_folder)},
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
    wait_for(lambda: not processes_of(ray_folder), 30)
    assert not list(ray_folder.glob("*tune_prune*"))
