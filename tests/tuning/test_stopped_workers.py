"""Workers of a real Ray that are stopped (SIGSTOP) or die where nothing of theirs is running, or where only the driver can see it:
the search goes on, and every number is that of a search that nobody disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ray._private.state import actors

from tests.searches import start
from tests.tuning.test_tuning import ONE_AT_A_TIME, specs_of
from tune_prune.core.config import PruningConfig
from tune_prune.tuning.messages import Message
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.ray_cluster import deadline
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work

WHOLE_TEXT = True

CONFIGS = [PruningConfig("random", 16, 8, ratio) for ratio in (0.1, 0.2, 0.3)]


class Between(Observer):
    """Sends `sign` to the worker that has done the first trial, before it is given the next one."""

    def __init__(self, sign: signal.Signals) -> None:
        self.sign = sign
        self.hit: set[int] = set()
        self.started: list[Work] = []

    def on_start(self, work: Work) -> None:
        self.started.append(work)

    def on_end(self, work: Work, last: Message | None) -> None:
        if isinstance(work, TrialSpec) and not self.hit:
            self.hit = {actor["Pid"] for actor in actors(actor_state_name="ALIVE").values()}
            for pid in self.hit:
                os.kill(pid, self.sign)


class StopsTheJob(Observer):
    """Stops the worker of the first preparation job when that begins."""

    def __init__(self) -> None:
        self.begun = 0

    def on_start(self, work: Work) -> None:
        if isinstance(work, PrepareJob):
            self.begun += 1
            if self.begun == 1:
                for actor in actors(actor_state_name="ALIVE").values():
                    os.kill(actor["Pid"], signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_between_trials_costs_none(
    two_cpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: signal.Signals
) -> None:
    """Without a time limit per trial."""
    monkeypatch.setattr(deadline, "START_S", 2.0)
    monkeypatch.setattr(deadline, "LOOK_EVERY_S", 0.5)
    # A worker's own start takes longer than that here
    monkeypatch.setattr(deadline, "actors", lambda *a, job_id=None, **k: {} if job_id is not None else actors(*a, **k))
    jobs = specs_of("tiny-llama", CONFIGS, tmp_path / "scratch")
    start(jobs, tmp_path / "alone", inline=True)
    between = Between(sign)
    result = start(jobs, tmp_path / "search", [between], resources=ONE_AT_A_TIME)
    assert between.hit and result.count("complete") == 3
    alone = start(jobs, tmp_path / "alone", inline=True)
    for spec in jobs:
        assert result.records[spec.key].metrics == alone.records[spec.key].metrics
    assert not between.hit & {actor["Pid"] for actor in actors(actor_state_name="ALIVE").values()}


@pytest.mark.slow
def test_a_preparation_job_whose_worker_is_stopped_is_done_by_another(two_cpus: None, tmp_path: Path) -> None:
    jobs = specs_of("tiny-llama", CONFIGS[:1], tmp_path / "scratch")
    stops = StopsTheJob()
    result = start(jobs, tmp_path / "search", [stops], resources=ONE_AT_A_TIME, trial_timeout_s=40.0)
    assert stops.begun == 2 and result.count("complete") == 1
    assert result.baselines["tiny-llama"].status == "complete"
