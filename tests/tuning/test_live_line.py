"""The live line and its ETA, with a clock that the test turns: predicted work, corrected by what was measured."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from tests.trial_messages import stage_message
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig, Samples
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.pruning.statistics import Need
from tune_prune.tuning.cost import TRIAL_OVERHEAD_S, WORKER_START_S, CostEstimate, ModelCost
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.progress import LiveLine
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work

RUN = ModelRun("tiny-llama", "tiny-llama", None, "embedded", None, EvaluationProtocol(), 0, "float32")
CONFIGS = [PruningConfig("taylor", 16, n) for n in (8, 16, 32, 64)]
SPECS = {f"k{i}": TrialSpec(RUN, config, f"k{i}") for i, config in enumerate(CONFIGS)}
JOBS = [PrepareJob(RUN), PrepareJob(RUN, Samples(16), tuple(Need("taylor", "", n) for n in (8, 16, 32, 64)))]
BASELINE, PASS = {"perplexity": 10.0, "zero_shot": 20.0}, {"importance": 40.0}
TRIAL = {"pruning": 1.0, "perplexity": 9.0, "zero_shot": 20.0}
COST = CostEstimate((ModelCost("tiny-llama", (), {None: BASELINE, Samples(16): PASS}, TRIAL, 4),), 1, 0.0, 0.0)


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


def test_the_eta_follows_jobs_stages_and_slices():
    search = Search()
    search.line.on_begin()
    search.start(JOBS[0])
    stages = [StageReport("perplexity", 20.0, tokens=5), *[StageReport("zero_shot", 5.0, tokens=5)] * 4]
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


def test_the_best_is_the_mean_of_draws_not_the_luckiest_one() -> None:
    """A configuration of which a draw was stopped is no candidate."""
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
