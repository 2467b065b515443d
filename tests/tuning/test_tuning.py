"""Whole searches with a real Ray, real trials of the embedded models, and real event files.

The experiment of the first tests is one story: its driver is killed half way, one trial more is run without Ray, a second
start does the rest, a third one runs only what had failed. Run as a script, this file is that first driver. Then workers die, or
are stopped (SIGSTOP), where nothing of theirs is running, or where only the driver can see it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.searches import Started, start
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.errors import UserError
from tune_prune.core.ledger import Ledger
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import FolderStore
from tune_prune.trial.context import TrialContext
from tune_prune.tuning import nodes, orphans
from tune_prune.tuning import ray as tuning_ray
from tune_prune.tuning.messages import Message
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work

WHOLE_TEXT = True
pytestmark = pytest.mark.slow

PROTOCOL = EvaluationProtocol(tasks=("boolq", "piqa"), limit=10, slices=(0.5, 1.0), perplexity_window=64)
IMPOSSIBLE_RATIO = 0.95  # more than the layers hold: the trial fails, at every attempt
KILL_AFTER = 2
ONE_AT_A_TIME = TrialResources(cpus=1.5, gpus=0)  # of two CPUs
ROOT = Path(__file__).resolve().parents[2]


def specs_of(model: str, configs: list[PruningConfig], scratch: Path) -> list[TrialSpec]:
    run = ModelRun(model, model, None, "embedded", None, PROTOCOL, 0, "float32")
    context = TrialContext.open(run, scratch, device="cpu")
    return [TrialSpec(run, config, context.key(config)) for config in configs]


def story_jobs(scratch: Path) -> list[TrialSpec]:
    """Two models, one failing trial (the last of the first model)."""
    configs = [PruningConfig(method, 16, n) for n in (8, 16) for method in ("taylor", "blockwise")]
    impossible = PruningConfig("taylor", 16, 8, IMPOSSIBLE_RATIO)
    return [*specs_of("tiny-llama", [*configs, impossible], scratch), *specs_of("tiny-qwen2", configs[:2], scratch)]


@pytest.fixture(scope="module")
def experiment(two_cpus, tmp_path_factory) -> Path:
    """The folder that a driver, killed with -9 after its second record, leaves behind."""
    folder = tmp_path_factory.mktemp("story") / "experiment"
    files = Path(tempfile.mkdtemp(prefix="ray"))  # of its Ray, whose sockets want a short path
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(files)}
    driver = subprocess.Popen([sys.executable, __file__, str(folder)], env=environment)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("ledger/*.json"))) < KILL_AFTER:
        assert driver.poll() is None, "the driver ended before it could be killed"
        assert time.monotonic() < deadline, "no trial was recorded"
        time.sleep(0.02)
    (of_ray,) = files.iterdir()
    assert any(worker.name().startswith("ray::") for worker in orphans.processes(of_ray))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 15
    while of_ray.exists() or orphans.processes(of_ray):
        assert time.monotonic() < deadline, "its Ray has not ended"
        time.sleep(0.1)
    files.rmdir()
    return folder


@pytest.fixture(scope="module")
def second_start(experiment) -> tuple[list[TrialRecord], Started]:
    """What the killed driver and a start without Ray had recorded, and the result of the same search started again."""
    jobs = story_jobs(experiment.parent / "artifacts")
    alone = start(jobs[-1:], experiment, inline=True)
    assert alone.ran == [jobs[-1].key]
    before = Ledger(FolderStore(experiment)).records()
    return before, start(jobs, experiment)


@pytest.fixture(scope="module")
def without_ray(tmp_path_factory) -> tuple[Path, Started]:
    """The same search in this process alone, with nothing computed before."""
    folder = tmp_path_factory.mktemp("alone")
    return folder / "search", start(story_jobs(folder / "artifacts"), folder / "search", inline=True)


def test_after_a_kill_exactly_the_rest_is_run(experiment, second_start):
    before, result = second_start
    jobs = story_jobs(experiment.parent / "artifacts")
    finished = {record.key for record in before if record.status == "complete"}
    assert KILL_AFTER < len(before) < len(jobs)
    assert sorted(result.ran) == sorted(spec.key for spec in jobs if spec.key not in finished)
    after = {record.key: record for record in Ledger(FolderStore(experiment)).records()}
    assert {key: after[key] for key in finished} == {record.key: record for record in before if record.key in finished}
    assert after == result.records


def test_with_and_without_ray_the_results_are_the_same_bits(experiment, second_start, without_ray):
    """Some trials by Ray, one without, the rest by Ray again; and all of them without."""
    (_, mixed), (folder, alone) = second_start, without_ray
    assert alone.records.keys() == mixed.records.keys() and alone.baselines.keys() == mixed.baselines.keys()
    for one, other in ((alone.records, mixed.records), (alone.baselines, mixed.baselines)):
        for key, record in one.items():
            for name in ("status", "reason", "config", "metrics", "notes"):
                assert getattr(record, name) == getattr(other[key], name), name
    files = {path.relative_to(folder): path.read_bytes() for path in folder.glob("trials/*/*")}
    assert files == {path.relative_to(experiment): path.read_bytes() for path in experiment.glob("trials/*/*")}
    assert len([path for path in files if path.name == "items.parquet"]) == 6 + 2


def test_two_models_are_complete_and_have_baselines(experiment, second_start):
    _, result = second_start
    assert result.count("complete") == 6
    assert [record.model for record in result.records.values() if record.status == "complete"].count("tiny-qwen2") == 2
    assert set(result.baselines) == {"tiny-llama", "tiny-qwen2"}
    for record in result.records.values():
        if record.status == "complete":
            assert record.metrics["removed_fraction"] == pytest.approx(0.2, abs=0.005)
            assert record.metrics["ppl"] > result.baselines[record.model].metrics["ppl"]
            assert record.key not in result.ran or record.resources == {"cpu": 1.0, "gpu": 0.0}
            assert (experiment / "trials" / record.key / "pruning_plan.json").exists()


def test_a_failing_trial_is_a_failed_record_with_its_reason(second_start):
    _, result = second_start
    (failed,) = [record for record in result.records.values() if record.status == "failed"]
    assert failed.config.pruning_ratio == IMPOSSIBLE_RATIO
    assert str(IMPOSSIBLE_RATIO) in failed.reason and failed.failure == "infeasible"


def test_tensorboard_has_a_curve_and_an_hparams_row_per_trial(experiment, second_start):
    _, result = second_start
    jobs = story_jobs(experiment.parent / "artifacts")
    # Runs of a model that is pruned at several ratios could not be told apart otherwise
    labels = {spec.key: f"tiny-llama@{spec.config.pruning_ratio:g}" for spec in jobs if spec.run.label == "tiny-llama"}
    folders = {
        spec.key: experiment / "tensorboard" / labels.get(spec.key, "tiny-qwen2") / f"{spec.config.name}-{spec.key[:6]}"
        for spec in jobs
    }
    for key in [*result.ran, jobs[-1].key]:  # that one ran without Ray
        record = result.records[key]
        (_file,) = folders[key].iterdir()  # one run: no subfolder for the hparams
        events = EventAccumulator(str(folders[key])).Reload()
        row = events.PluginTagToContent("hparams")
        assert set(row) == {"_hparams_/experiment", "_hparams_/session_start_info", "_hparams_/session_end_info"}
        assert record.status.encode() in row["_hparams_/session_start_info"]
        assert (record.failure or "none").encode() in row["_hparams_/session_start_info"]
        if record.status == "complete":
            accuracy = events.Scalars("accuracy/acc_mean")
            assert [event.step for event in accuracy] == [10, 20]  # items scored after each slice
            assert accuracy[-1].value == pytest.approx(record.metrics["acc_mean"])
            (ppl,) = events.Scalars("perplexity/ppl")  # measured once
            assert ppl.value == pytest.approx(record.metrics["ppl"], rel=1e-6)
            tags = {"accuracy/acc_boolq", "accuracy/acc_piqa", "pruning/removed_fraction", "gradient/grad_norm_ratio"}
            assert tags <= set(events.Tags()["scalars"])


def test_a_failed_trial_is_run_again(experiment, second_start):
    """A third start, without Ray, runs what had failed."""
    _, result = second_start
    jobs = story_jobs(experiment.parent / "artifacts")
    (impossible,) = [spec for spec in jobs if spec.config.pruning_ratio == IMPOSSIBLE_RATIO]
    third = start(jobs, experiment, inline=True)
    assert third.ran == [impossible.key] and third.records[impossible.key].status == "failed"
    (one,) = {result.records[key].search_id for key in result.ran}  # one for each start
    assert third.records[impossible.key].search_id not in ("", one)
    for spec in jobs:
        assert spec is impossible or third.records[spec.key] == result.records[spec.key]


def test_optuna_with_asha_tries_distinct_points_and_records_what_was_stopped(two_cpus, tmp_path):
    """One trial at a time (two of 1.5 CPUs do not fit), so that the order, and therefore who is stopped, is the seed's."""
    configs = [PruningConfig(m, 16, n, 0.4) for n in (4, 8) for m in ("taylor", "wanda_sp", "random")]
    jobs = specs_of("tiny-llama", configs, tmp_path / "artifacts")
    options = {"search": "optuna", "num_trials": 5, "scheduler": "asha", "resources": ONE_AT_A_TIME}
    result = start(jobs, tmp_path / "search", **options)
    assert len(set(result.ran)) == 5
    stopped = [record for record in result.records.values() if record.status == "stopped_early"]
    complete = [record for record in result.records.values() if record.status == "complete"]
    assert len(stopped) + len(complete) == 5
    assert stopped
    assert complete
    for record in stopped:
        assert record.stages[-1].items_scored == 10
        assert "10 of 20" in record.reason
        assert record.metrics["acc_mean"] < max(other.metrics["acc_mean"] for other in complete)
    assert start(jobs, tmp_path / "search", **options).ran == []
    alone = start(jobs, tmp_path / "alone", inline=True, **options)
    assert alone.ran == result.ran
    for key, record in alone.records.items():
        assert (record.status, record.reason) == (result.records[key].status, result.records[key].reason)
        assert record.metrics == result.records[key].metrics


def workers() -> list[psutil.Process]:
    """Those of the Ray of this process that have trials, the newest last."""
    children = [child for child in psutil.Process().children(recursive=True) if "Trainable" in child.name()]
    return sorted(children, key=psutil.Process.create_time)


def kill_the_newest_worker() -> None:
    workers()[-1].kill()


class KillsTheFirst(Observer):
    """The worker of the first job and of the first trial is killed when it begins, as a kernel does where memory runs out."""

    def __init__(self) -> None:
        self.killed: dict[type, Work] = {}

    def on_start(self, work: Work) -> None:
        if type(work) not in self.killed:
            self.killed[type(work)] = work
            kill_the_newest_worker()


class KillsGradients(Observer):
    """Every worker that begins the job or the first trial that takes gradients is killed; `started`: all that have begun."""

    def __init__(self, first: TrialSpec) -> None:
        self._first = first
        self.started: list[Work] = []

    def on_start(self, work: Work) -> None:
        self.started.append(work)
        if isinstance(work, PrepareJob) or work == self._first:
            kill_the_newest_worker()


def test_after_the_death_of_a_worker_its_work_takes_as_little_memory_as_it_can(two_cpus, without_ray, tmp_path):
    jobs = story_jobs(tmp_path / "scratch")[:2]
    kills = KillsTheFirst()
    result = start(jobs, tmp_path / "search", [kills], resources=ONE_AT_A_TIME)
    assert kills.killed.keys() == {PrepareJob, TrialSpec} and result.count("complete") == 2
    note = "a worker died with the model resident, so it is streamed"
    assert note in result.records[kills.killed[TrialSpec].key].notes
    _, alone = without_ray
    for spec in jobs:
        assert result.records[spec.key].metrics == alone.records[spec.key].metrics
    assert result.baselines["tiny-llama"].metrics == alone.baselines["tiny-llama"].metrics


def test_a_job_whose_workers_die_costs_the_trials_that_need_it(two_cpus, tmp_path, capfd):
    configs = [PruningConfig("taylor", 16, 8), PruningConfig("taylor", 16, 16), PruningConfig("random", 16, 8)]
    jobs = specs_of("tiny-llama", configs, tmp_path / "artifacts")
    other = specs_of("tiny-llama", [PruningConfig("random", 16, 8, 0.4)], tmp_path / "artifacts")
    start(other, tmp_path / "search", inline=True)  # the baseline is there
    kills = KillsGradients(jobs[0])
    result = start(jobs, tmp_path / "search", [kills], resources=ONE_AT_A_TIME)
    died, not_run, alive = (result.records[spec.key] for spec in jobs)
    assert [record.failure for record in (died, not_run, alive)] == ["lost_worker", "lost_worker", ""]
    assert alive.status == "complete"
    assert died.reason.startswith("the worker of the trial died") and not_run.reason.startswith("not run: ")
    assert kills.started.count(jobs[0]) == 2 and kills.started.count(jobs[1]) == 1  # by its record alone
    told = capfd.readouterr().out
    assert told.count("given up (") == 1 and "[3/3] running 0, failed 2" in told
    again = start(jobs, tmp_path / "search", inline=True)
    assert again.ran == [jobs[0].key, jobs[1].key] and again.count("complete") == 3


class Between(Observer):
    """Sends `sign` to the worker that has done the first trial, before it is given the next one."""

    def __init__(self, sign: signal.Signals) -> None:
        self._sign = sign
        self.hit: list[psutil.Process] = []

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, TrialSpec) and not self.hit:
            self.hit = workers()
            for worker in self.hit:
                worker.send_signal(self._sign)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_between_trials_costs_none(two_cpus, without_ray, tmp_path, monkeypatch, sign):
    """Without a time limit per trial."""
    monkeypatch.setattr(tuning_ray.Deadline, "NEXT_S", 2.0)
    jobs, between = story_jobs(tmp_path / "artifacts")[:3], Between(sign)
    result = start(jobs, tmp_path / "search", [between], resources=ONE_AT_A_TIME)
    assert between.hit and result.count("complete") == 3
    _, alone = without_ray
    for spec in jobs:
        assert result.records[spec.key].metrics == alone.records[spec.key].metrics
    assert psutil.wait_procs(between.hit, timeout=10)[1] == []


class Stops(Observer):
    """Stops the worker of the first job and of the first trial when it begins; `started`: all that have begun."""

    def __init__(self) -> None:
        self.started: list[Work] = []

    def on_start(self, work: Work) -> None:
        if type(work) not in map(type, self.started):
            workers()[-1].suspend()
        self.started.append(work)


def test_work_whose_worker_is_stopped_ends_by_the_time_limit(two_cpus, tmp_path):
    """A job is done by another worker; a trial, which would take as long again, is a failed record."""
    configs = [PruningConfig("random", 16, 8, ratio) for ratio in (0.1, 0.2)]
    jobs, stops = specs_of("tiny-llama", configs, tmp_path / "scratch"), Stops()
    result = start(jobs, tmp_path / "search", [stops], resources=ONE_AT_A_TIME, trial_timeout_s=12.0)
    baseline, again, *trials = stops.started
    assert baseline == again and trials == jobs and result.baselines["tiny-llama"].status == "complete"
    hung, other = (result.records[spec.key] for spec in jobs)
    assert (hung.failure, other.status) == ("hung", "complete")
    assert "time limit of 12 s per trial (--trial-timeout)" in hung.reason


def test_what_cannot_work_is_a_user_error_before_any_trial(two_cpus, tmp_path):
    with pytest.raises(UserError, match="99 CPUs"):
        start(story_jobs(tmp_path), tmp_path / "search", resources=TrialResources(99, 0))
    assert not (tmp_path / "search" / "ledger").exists()


def test_a_failure_of_the_preparation_keeps_its_own_words(two_cpus, tmp_path):
    jobs = specs_of("tiny-llama", [PruningConfig("taylor", 16, 1_000_000)], tmp_path)
    with pytest.raises(UserError) as error:
        start(jobs, tmp_path / "search")
    assert "1000000" in str(error.value).replace(",", "").replace("_", "")


def test_a_local_ray_is_for_this_process_alone_and_its_workers_are_as_nice_as_other_programs(two_cpus):
    worker, niceness = ray.get(ray.remote(lambda: (os.getpid(), os.nice(0))).remote())
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    assert worker in processes and niceness == os.nice(0)
    listening = {c.laddr.ip for c in psutil.net_connections("inet") if c.pid in processes and c.status == "LISTEN"}
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_a_call_answers_raises_or_is_given_up(two_cpus, monkeypatch):
    def half(number: int) -> int:
        if number % 2:
            raise ValueError("odd")
        return number // 2

    assert nodes.call(half, 6, TrialResources(cpus=1)) == 3
    with pytest.raises(ValueError, match="odd"):
        nodes.call(half, 7, TrialResources(cpus=1))
    with pytest.raises(UserError, match="a worker of the cluster died") as error:
        nodes.call(lambda code: os._exit(code), 3, TrialResources(cpus=1))
    assert "\n" not in str(error.value)
    monkeypatch.setattr(nodes, "WAIT_S", 0.1)
    assert nodes.call(half, 6, TrialResources(cpus=99)) is None  # no node is ever free for it


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://head:10001", "HOST:PORT"),
        ("head", "HOST:PORT"),
        ("my..head:6379", "no Ray cluster answers at my..head:6379 .*'my..head' is no name of a machine"),
        ("head:²", "HOST:PORT"),
    ],
)
def test_a_dead_or_odd_address_is_a_user_error_at_once(monkeypatch, address, words):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    started = time.monotonic()
    with pytest.raises(UserError, match=words), tuning_ray.connected(address):
        pass
    assert time.monotonic() - started < 10


if __name__ == "__main__":  # one trial at a time, so that some are left when it is killed
    folder = Path(sys.argv[1])
    with tuning_ray.connected(None, num_cpus=2):
        start(story_jobs(folder.parent / "artifacts"), folder, resources=ONE_AT_A_TIME)
