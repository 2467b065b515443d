"""The live line and its ETA, with a clock that the test turns: predicted work, corrected by what was measured."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, Samples
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.pruning.statistics import Need
from tune_prune.tuning.cost import TRIAL_OVERHEAD_S, WORKER_START_S, CostEstimate, ModelCost
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.progress import LATE, LiveLine, TimeLeft
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work

RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(), 0, "float32")
CONFIGS = [PruningConfig("taylor", 16, n) for n in (8, 16, 32, 64)]
SPECS = {f"k{i}": TrialSpec(RUN, config, f"k{i}") for i, config in enumerate(CONFIGS)}
JOBS = [PrepareJob(RUN), PrepareJob(RUN, Samples(16), tuple(Need("taylor", "", n) for n in (8, 16, 32, 64)))]
BASELINE, PASS = {"perplexity": 10.0, "zero_shot": 20.0}, {"importance": 40.0}
TRIAL = {"pruning": 1.0, "perplexity": 9.0, "zero_shot": 20.0}
COST = CostEstimate((ModelCost("tiny-llama", (), {None: BASELINE, Samples(16): PASS}, TRIAL, 4),), 1, 0.0, 0.0)


def left(slots: int = 1, waiting: int = 2) -> TimeLeft:
    return TimeLeft({"trial": TRIAL, "job": PASS}, {"trial": waiting, "job": 1}, slots)


def test_all_work_is_left_before_anything_starts():
    assert left().seconds() == pytest.approx(2 * (30 + TRIAL_OVERHEAD_S) + 40 + TRIAL_OVERHEAD_S)
    assert left(slots=2).seconds() == pytest.approx(left().seconds() / 2)
    assert not left().measured


def test_the_pace_of_a_stage_holds_for_what_is_left_of_it():
    work = left(waiting=1)
    work.start("a", "trial")
    work.done("a", "trial", "perplexity", 1.0, 18.0)  # twice as long as predicted
    # of perplexity nothing is left; what was never measured goes at the pace of all
    assert work.seconds() == pytest.approx(2 * (1 + 20) + 2 * 40 + TRIAL_OVERHEAD_S)
    work.done("a", "trial", "zero_shot", 0.25, 2.5)  # half as long
    pace = (18 + 2.5) / (9 + 5)
    assert work.seconds() == pytest.approx(pace * 1 + 0.5 * 15 + pace * 40 + TRIAL_OVERHEAD_S)
    work.end("a")  # stopped: the rest is dropped
    assert work.seconds() == pytest.approx(pace * 40 + TRIAL_OVERHEAD_S)


def test_what_came_from_the_cache_teaches_nothing():
    work = left(waiting=1)
    work.start("a", "trial")
    work.done("a", "trial", "perplexity", 1.0, None)
    assert not work.measured
    assert work.seconds() == pytest.approx(1 + 20 + 40 + TRIAL_OVERHEAD_S)


def test_the_longest_running_piece_is_the_least_that_is_left():
    work = TimeLeft({"job": PASS}, {"job": 1}, slots=8)
    work.start("a", "job")
    assert work.seconds() == 40


def test_a_piece_that_starts_again_begins_anew():
    work = left(waiting=1)
    for _ in range(2):
        work.start("a", "trial")
        work.done("a", "trial", "perplexity", 1.0, 9.0)
    work.start("a", "trial")
    assert work.seconds() == pytest.approx(30 + 40 + TRIAL_OVERHEAD_S)


class Search:
    """A search whose clock stands still until the test moves it; the last line is `shown`."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.screen = io.StringIO()
        given = {"cost": COST, "jobs": JOBS} | options
        self.line = LiveLine(SPECS, total=4, stream=self.screen, clock=lambda: self.now, **given)

    def start(self, work: Work) -> Work:
        self.line.on_start(work)
        return work

    def done(self, job: PrepareJob, message: JobMessage) -> None:
        self.line.on_message(job, message)
        self.line.on_end(job, message)

    def stage(self, spec: TrialSpec, stage: str, seconds: float, tokens: int = 1, **report: Any) -> Message:
        given = {"duration_s": seconds, "tokens": tokens, "metrics": {"acc_mean": 0.5}} | report
        message = stage_message(spec.key, stage, **given)
        self.line.on_message(spec, message)
        return message

    def shown(self, wait: float = 10.0) -> str:
        self.now += wait
        self.line.on_tick(running=0)
        return self.screen.getvalue().splitlines()[-1]


def clock(seconds: float) -> str:
    return f"{round(seconds) // 60:02d}:{round(seconds) % 60:02d}"


def test_the_first_line_has_an_eta():
    search = Search()
    search.line.on_begin()
    everything = WORKER_START_S + 30 + 40 + 4 * 30 + 6 * TRIAL_OVERHEAD_S
    assert search.screen.getvalue() == f"[0/4] prepared 0/2, running 0, failed 0, ETA {clock(everything)}\n"
    assert search.shown(wait=11).endswith(f"ETA {clock(everything - 11)}")  # it counts down while nothing happens


def test_a_round_waits_for_its_own_trials_only() -> None:
    """Of two models one has trials in this round of draws, as many as it has specs."""
    other = replace(COST.models[0], label="other")
    search = Search(cost=replace(COST, models=(*COST.models, other)), jobs=[])
    assert search.line._forecast.time.seconds() == pytest.approx(4 * (30 + TRIAL_OVERHEAD_S))


def test_the_eta_follows_jobs_stages_and_slices():
    search = Search()
    search.line.on_begin()
    search.start(JOBS[0])
    stages = [
        StageReport("perplexity", 20.0, tokens=5),
        *(StageReport("zero_shot", 5.0, tokens=5) for _ in range(4)),
    ]
    record = TrialRecord("b", "tiny-llama", None, "complete", stages=stages)
    search.done(JOBS[0], JobMessage(baseline=record))
    overhead = TRIAL_OVERHEAD_S
    # That perplexity took twice as long as predicted says little before a trial has ended: the first one loads and warms up
    assert search.shown().endswith(f"ETA {clock(40 + 4 * 30 + 5 * overhead - 10)}")

    assert "[0/4] prepared 1/2, running 0, " in search.shown(wait=10)

    search.start(JOBS[1])
    search.done(JOBS[1], JobMessage((StageReport("importance", 30.0, tokens=7),)))
    first = search.start(SPECS["k0"])
    search.stage(first, "pruning", 1.0, tokens=0)
    search.stage(first, "perplexity", 18.0)
    last = search.stage(first, "zero_shot", 5.0, items_scored=20, items_total=80)
    whole = 1 + 18 + 20
    assert search.shown().endswith(f"ETA {clock(15 + 3 * (30 + overhead) - 10)}")
    stopped = replace(last.record, status="stopped_early", reason="by the scheduler")
    search.line.on_end(first, replace(last, record=stopped))
    assert "[1/4] running 0, failed 0, stopped 1, ETA" in search.shown()
    assert search.shown(wait=0).endswith(f"ETA {clock(3 * (whole + overhead) - 10)}")
    second = search.start(SPECS["k1"])
    died = TrialRecord("k1", "tiny-llama", CONFIGS[1], "failed", "it died", "lost_worker")
    search.line.on_error(second, TrialMessage(died), RuntimeError("it died"))
    assert search.shown().endswith(
        f"[2/4] running 0, failed 1 (1 lost worker), stopped 1, ETA {clock(2 * (whole + overhead) - 10)}"
    )


def test_each_of_several_steps_is_a_part_of_its_stage() -> None:
    trial, spec = {"steps": 30.0, **TRIAL}, replace(SPECS["k0"], config=replace(CONFIGS[0], steps=4))
    models = (replace(COST.models[0], trial=trial, jobs={}, trials=1),)
    search = Search(cost=replace(COST, models=models), jobs=[])
    search.line._forecast.time = TimeLeft({"tiny-llama": trial}, {"tiny-llama": 1}, 1)
    search.start(spec)
    for done in (1, 2, 3):
        search.stage(spec, "steps", 10.0)
        assert search.line._forecast.time.seconds() == pytest.approx(30 - 10 * done + sum(TRIAL.values()))


def test_finished_trials_of_an_earlier_start_are_not_waited_for():
    recorded = [TrialRecord("k0", "tiny-llama", None, "complete", metrics={"acc_mean": 0.8421})]
    search = Search(recorded=recorded, jobs=[])
    search.line.on_begin()
    eta = clock(COST.start_s + 3 * (30 + TRIAL_OVERHEAD_S))
    assert search.screen.getvalue() == f"[1/4] running 0, failed 0, best accuracy .8421 taylor-s16-n8, ETA {eta}\n"


def test_the_best_is_the_mean_of_draws_not_the_luckiest_one() -> None:
    """And none of which a draw was stopped."""
    accuracies = {8: (0.8, 0.8, 0.8), 16: (0.6, 0.6, 0.9), 32: (0.95, None, 0.95), 64: (0.75, math.nan)}
    specs, records = {}, []
    for samples, draws in accuracies.items():
        for seed, accuracy in enumerate(draws):
            key, config = f"{samples}-{seed}", PruningConfig("taylor", 16, samples, seed=seed or None)
            specs[key] = TrialSpec(RUN, config, key)
            status = "stopped_early" if accuracy is None else "complete"
            metrics = {"acc_mean": accuracy or 0.0}
            records.append(TrialRecord(key, RUN.label, config, status, metrics=metrics))
    line = LiveLine(specs, len(specs), records, io.StringIO())
    assert line._text(0) == "[11/11] running 0, failed 0, stopped 1, best accuracy .8000 taylor-s16-n8"


def test_of_equal_accuracies_the_lower_perplexity_is_the_best() -> None:
    """0.92619... is 389 of 420 items, as sums in another order round it."""
    measured = [(0.9261904761904763, 3.0), (0.9261904761904762, 2.0), (0.9261904761904763, math.nan), (0.9, 1.0)]
    records = [
        TrialRecord(key, RUN.label, spec.config, "complete", metrics={"acc_mean": accuracy, "ppl": ppl})
        for (key, spec), (accuracy, ppl) in zip(SPECS.items(), measured, strict=True)
    ]
    assert LiveLine(SPECS, 4, records, io.StringIO())._text(0).endswith("best accuracy .9262 taylor-s16-n16")
    fewer_tokens = [replace(record, metrics={"acc_mean": 0.9, "ppl": 2.0}) for record in reversed(records)]
    assert LiveLine(SPECS, 4, fewer_tokens, io.StringIO())._text(0).endswith("best accuracy .9000 taylor-s16-n8")


def test_before_a_trial_has_ended_the_eta_is_a_range():
    search = Search(cost=replace(COST, slowdown=(0.5, 2.0)), jobs=[])
    search.line.on_begin()
    whole = WORKER_START_S + 4 * (30 + TRIAL_OVERHEAD_S)
    assert search.shown(wait=12).endswith(f"ETA {clock(whole / 2 - 12)} to {clock(2 * whole - 12)}")
    search.start(SPECS["k0"])
    last = search.stage(SPECS["k0"], "perplexity", 10.0)
    assert " to " in search.shown()
    search.line.on_end(SPECS["k0"], last)
    assert " to " not in search.shown()


def test_without_a_prediction_there_is_no_eta():
    search = Search(cost=None)
    search.start(SPECS["k0"])
    assert search.shown() == "[0/4] prepared 0/2, running 0, failed 0"


def test_hours_are_shown_as_such():
    slow = CostEstimate((ModelCost("tiny-llama", (), {}, {"perplexity": 3600.0}, 4),), 1, 0.0, 0.0)
    search = Search(cost=slow, jobs=[])
    assert search.shown(wait=12).endswith("ETA 3:59:59")


def test_without_a_terminal_a_long_search_writes_few_lines():
    search = Search()
    search.line.on_begin()
    seconds = 24 * 3600
    for _ in range(seconds // 5):
        search.now += 5
        search.line.on_tick(running=1)
    lines = search.screen.getvalue().splitlines()
    assert 1000 // 10 < len(lines) < 1000 // 10 + 600  # every 10 seconds at first, then every hundredth of the time
    assert "\r" not in search.screen.getvalue()


def test_what_is_left_is_a_range_of_the_paces_seen():
    search = Search(cost=replace(COST, slowdown=(0.5, 2.0)), jobs=[])
    low, high = search.line.seconds_left() or (0, 0)
    whole = WORKER_START_S + 4 * (30 + TRIAL_OVERHEAD_S)
    assert (low, high) == pytest.approx((whole / 2, 2 * whole))
    search.line.on_end(search.start(SPECS["k1"]), None)
    search.start(SPECS["k0"])
    for pace in (0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0):
        search.stage(SPECS["k0"], "pruning", pace)
    middle = search.line._forecast.time.seconds()  # type: ignore[union-attr]
    assert search.line.seconds_left() == pytest.approx((middle, middle))  # three quarters went as predicted
    for pace in (0.5, 2.0, 0.5, 2.0, 0.5, 2.0):
        search.stage(SPECS["k0"], "pruning", pace)
    low, high = search.line.seconds_left() or (0, 0)
    middle = search.line._forecast.time.seconds()  # type: ignore[union-attr]
    assert low < middle < high
    assert Search(cost=None).line.seconds_left() is None


def test_a_stage_that_takes_ten_times_its_forecast_is_said_once():
    search = Search(jobs=[])
    work = search.start(SPECS["k0"])
    search.stage(work, "pruning", 1.0)
    longest = search.line._forecast.time.of_stage(work)  # type: ignore[union-attr]
    assert longest == 20.0
    assert "warning" not in search.shown(wait=LATE * longest)
    name = f"{work.run.label} {work.config.name}"
    search.shown(wait=20.0)
    said = [line for line in search.screen.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(said) == 1 and said[0].startswith(f"warning: a stage of {name} takes 03:40, and 00:20 were predicted")
    search.shown(wait=1000.0)
    search.stage(work, "perplexity", 1220.0)
    assert search.screen.getvalue().count("warning: ") == 1


def test_a_job_and_a_search_in_this_process_are_late_too():
    """Which tell nothing before they are done."""
    search = Search()
    job = search.start(JOBS[1])
    search.now += 10_000
    search.done(job, JobMessage())
    assert search.screen.getvalue().count("warning: ") == 1
