"""How a search spreads over a cluster: a SIMULATION. No model is run; stages take the cost model's seconds of simulated time.

    python scripts/simulate_cluster.py                                     135 and 5,000 trials on 1 to 64 nodes of 8 GPUs
    python scripts/simulate_cluster.py --nodes 16 --trials 5000 --controller-ms 20

What is real: the queue (jobs before the trials that need them), the messages, the stopping rule, the records in a ledger, all that
follows a search (the live line with its ETA, TensorBoard's files, status.json, what is kept of killed attempts), and the processor
time that these take, which counts: the driver handles one message at a time, and a worker waits for its turn between two stages,
as under Ray Tune. What is assumed: seconds of stages (`cost_model`, on GPUs that reach 40% of an H200's peak), with a spread of
--jitter; milliseconds of Ray Tune's own controller for a message (--controller-ms); seconds to load a model's weights whenever a
worker meets another model. bench_scale.py measures the CSV, which a search writes at its end.

    ideal        all work over all GPUs
    bound        what no order of work can beat: ideal, or the shortest preparation job and as many of the shortest trials, one
                 after the other, as some GPU must take
    makespan     as simulated
"""

from __future__ import annotations

import argparse
import heapq
import io
import itertools
import math
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import COUNT, FROM_ZERO, counts
from make_random_model import config_of

from tune_prune.commands.flags import output_file
from tune_prune.core.config import EvaluationProtocol, ModelRun, PruningConfig
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hashing import digest
from tune_prune.core.records import StageReport, TrialRecord
from tune_prune.core.store import TENSORBOARD
from tune_prune.models import loading
from tune_prune.pruning.selection import target_params
from tune_prune.pruning.statistics import by_statistic
from tune_prune.trial.statistics import by_samples
from tune_prune.trial.trial import TrialProgress
from tune_prune.tuning import space
from tune_prune.tuning.cost import (
    DISK_BYTES_PER_S,
    Arithmetic,
    CostEstimate,
    DeviceSpeed,
    Line,
    ModelCost,
    ModelWork,
    ZeroShotTokens,
    estimate,
)
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.lost_work import LostWork
from tune_prune.tuning.observers.observer import Observer, Observers
from tune_prune.tuning.observers.results import PrepareLines, PrepareObserver, RecordsObserver
from tune_prune.tuning.observers.status import StatusObserver
from tune_prune.tuning.observers.tensorboard import TensorBoardObserver
from tune_prune.tuning.progress import LiveLine
from tune_prune.tuning.queue import WorkQueue, prepare_jobs
from tune_prune.tuning.resources import TrialResources
from tune_prune.tuning.stopping import StoppingRule
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work
from tune_prune.tuning.worker import WorkerSettings

PEAK, REACHED = 989e12, 0.4  # operations a second of an H200 in bfloat16, and what of it
TEXT = 300_000  # tokens of WikiText-2's test set, about; and the seven tasks of the hub, all items
ZERO_SHOT = ZeroShotTokens(items=20_465, tokens=1_650_000, scored=600_000, exact=True)
GRIDS = {135: ("mistral-7b", "qwen2.5-7b", "llama-3-8b"), 5000: ("llama-3-8b",)}
PROTOCOL = EvaluationProtocol()


def configs_of(trials: int) -> list[PruningConfig]:
    """Of one model: the published grid, or one of 4 methods x 25 lengths x as many numbers of samples as it takes."""
    if trials == 45:
        return list(space.load("paper_grid").configs())
    methods, lengths = ("taylor", "layerwise", "blockwise", "wanda_sp"), [16 * i for i in range(1, 26)]
    samples = [16 * i for i in range(1, 1 + math.ceil(trials / 100))]
    return [PruningConfig(*levels) for levels in itertools.product(methods, lengths, samples)][:trials]


@cache
def weight_bytes(name: str) -> int:
    """In bfloat16."""
    return 2 * loading.config_geometry(config_of(name))[1].total_params


def model_cost(name: str, configs: Sequence[PruningConfig]) -> ModelCost:
    """Seconds of its stages on one GPU that reaches REACHED of PEAK."""
    config = config_of(name)
    _, geometry = loading.config_geometry(config)
    arithmetic = Arithmetic.of(geometry, config.vocab_size)
    token, head = arithmetic.all_layers(1, 128) / (PEAK * REACHED), arithmetic.head(1) / (PEAK * REACHED)
    speed = DeviceSpeed(Line(token, 0), Line(3 * token, 0), head, 2 * head, {}, engine=1.1)
    passes = {
        samples: [need for needs in by_statistic(shared).values() for need in needs]
        for samples, shared in by_samples(configs).items()
    }
    work = ModelWork(
        label=name,
        arithmetic=arithmetic,
        device="cuda",
        weight_bytes=weight_bytes(name),
        speed=speed,
        passes=passes,
        baseline=True,
        trials=len(configs),
        removed_params=target_params(geometry, 0.2, "free"),
        perplexity_tokens=TEXT,
        perplexity_window=2048,
        zero_shot=ZERO_SHOT,
        slices=len(PROTOCOL.slices),
    )
    return estimate([work], 1, 1).models[0]


@dataclass
class Worker:
    """One GPU: what it works on, and the stages that are left of it."""

    work: Work | None = None
    stages: list[tuple[str, float, int]] = field(default_factory=list)  # name, seconds, items scored after it
    progress: TrialProgress | None = None
    model: str = ""


def _fail(text: str) -> None:
    raise AssertionError(text)


class Cluster:
    """The simulated time of a search on so many GPUs; `run` once."""

    def __init__(
        self, costs: Sequence[ModelCost], specs: Sequence[TrialSpec], gpus: int, folder: Path, args: Any
    ) -> None:
        self.now = 0.0  # simulated seconds
        self.costs = {cost.label: cost for cost in costs}
        self.random = np.random.default_rng(args.seed)
        self.files = not args.no_files
        self.jitter, self.controller_s = args.jitter, args.controller_ms / 1000
        self.specs = {spec.key: spec for spec in specs}
        self.settings = WorkerSettings(folder, folder, TrialResources(cpus=1, gpus=1))
        jobs = prepare_jobs(specs, list(dict.fromkeys(spec.run for spec in specs)))
        self.queue = WorkQueue(jobs, specs)
        cost = CostEstimate(tuple(costs), gpus, 0.0, 0.0)
        options: dict[str, Any] = {"stream": io.StringIO(), "cost": cost, "jobs": jobs, "slots": gpus}
        self.line = LiveLine(self.specs, len(specs), clock=lambda: self.now, **options)
        self.rule = StoppingRule()
        self.observers = Observers(*self.followers(len(jobs), gpus), warn=_fail) if self.files else self.line
        self.threads = 0  # of this process, at most
        self.workers = [Worker() for _ in range(gpus)]
        self.work_s = self.ledger_s = self.driver_s = 0.0
        self.messages = 0
        self.jobs_s: list[float] = []
        self.trials_s: list[float] = []
        self.began: dict[Work, float] = {}
        self.ended: dict[Work, float] = {}

    def followers(self, jobs: int, gpus: int) -> tuple[list[Observer], list[Observer]]:
        """What follows a search, as tuning.driver has it: what it cannot do without, and its views."""
        keepers = [RecordsObserver(), LostWork(self.settings), PrepareObserver(lambda run, found: None)]
        labels = {key: spec.run.label for key, spec in self.specs.items()}
        tensorboard = TensorBoardObserver(Path(self.settings.experiment_dir) / TENSORBOARD, labels)
        self.status = StatusObserver(self.settings, len(self.specs), 0, gpus, self.line.seconds_left)
        return keepers, [tensorboard, PrepareLines(jobs, self.line.say), self.line, self.status]

    def run(self) -> float:
        """Simulate with all that follows a search."""
        with self.status if self.files else nullcontext():
            makespan = self._run()
            self.timed(self.observers.on_finish)
        return makespan

    def _run(self) -> float:
        """The simulated seconds until the last trial has ended."""
        idle, number = list(range(len(self.workers))), itertools.count()
        events: list[tuple[float, int, int]] = []  # when, the order in which it was asked for, which worker
        self.observers.on_begin()
        while True:
            while idle and (work := self.timed(self.queue.next)) is not None:
                worker = idle.pop()
                self.start(self.workers[worker], work)
                heapq.heappush(events, (self.now + self.stage(self.workers[worker]), next(number), worker))
            if not events:
                break
            self.threads = max(self.threads, threading.active_count())
            at, _, worker = heapq.heappop(events)
            self.now = max(self.now, at)  # the driver may be behind: then the worker has waited for it
            if self.message(self.workers[worker]):
                idle.append(worker)
            else:
                heapq.heappush(events, (self.now + self.stage(self.workers[worker]), next(number), worker))
        assert self.queue.empty and set(self.specs.values()) <= self.ended.keys(), "the queue has left work behind"
        return self.now

    def timed(self, call: Any, *arguments: Any) -> Any:
        """What the driver does: its seconds pass in the simulation, too; of processor time, as others use this machine."""
        started = time.process_time()
        result = call(*arguments)
        seconds = time.process_time() - started
        self.now += seconds
        self.driver_s += seconds
        return result

    def start(self, worker: Worker, work: Work) -> None:
        cost = self.costs[work.run.label]
        job = isinstance(work, PrepareJob)
        seconds = cost.jobs[work.samples] if isinstance(work, PrepareJob) else cost.trial
        stages = []
        for stage, duration in seconds.items():
            shares = PROTOCOL.slices if stage == "zero_shot" and not job else (1.0,)
            for before, share in itertools.pairwise((0.0, *shares)):
                spread = float(self.random.lognormal(0, self.jitter))
                stages.append((stage, duration * (share - before) * spread, round(share * ZERO_SHOT.items)))
        total = sum(duration for _, duration, _ in stages)
        self.work_s += total
        (self.jobs_s if job else self.trials_s).append(total)
        worker.work, worker.stages = work, stages
        worker.progress = None if isinstance(work, PrepareJob) else TrialProgress(work.key, work.run.label, work.config)
        self.began[work] = self.now
        self.timed(self.observers.on_start, work)

    def stage(self, worker: Worker) -> float:
        """Seconds of its next stage; of a job they are one."""
        assert worker.work is not None
        label, loading_s = worker.work.run.label, 0.0
        if worker.model != label:
            worker.model = label
            loading_s = weight_bytes(label) / DISK_BYTES_PER_S
        return loading_s + (worker.stages[0][1] if worker.progress else sum(seconds for _, seconds, _ in worker.stages))

    def message(self, worker: Worker) -> bool:
        """The driver hears of a stage or a job; whether that was its last."""
        work = worker.work
        assert work is not None
        self.messages += 1
        self.now += self.controller_s
        self.driver_s += self.controller_s
        last: Message
        if worker.progress is None:
            reports = tuple(StageReport(stage, seconds, tokens=1) for stage, seconds, _ in worker.stages)
            last = JobMessage(reports)
        else:
            stage, seconds, scored = worker.stages.pop(0)
            zero_shot = {"items_scored": scored, "items_total": ZERO_SHOT.items} if stage == "zero_shot" else {}
            report = StageReport(stage, seconds, {"acc_mean": 0.5}, tokens=1, **zero_shot)  # type: ignore[arg-type]
            reports = (*worker.progress.reports, report)
            worker.progress = TrialProgress(work.key, work.run.label, work.config, reports=reports)  # type: ignore[union-attr]
            last = TrialMessage(worker.progress, report, len(reports) - 1, record=self.record(worker))
            assert not self.rule.stops(last)
        ends = last.ended
        if not ends:
            self.timed(self.queue.report, work, last)
        self.timed(self.observers.on_message, work, last)
        if ends:
            self.timed(self.queue.end, work, last)
            self.timed(self.observers.on_end, work, last)
            self.ended[work] = self.now
        self.timed(self.observers.on_tick, len(self.workers))
        return ends

    def record(self, worker: Worker) -> TrialRecord | None:
        """At the end of a trial, written by its worker: beside the others, at no cost to the driver."""
        if worker.stages or worker.progress is None:
            return None
        if not self.files:
            return worker.progress.record("complete")
        started = time.perf_counter()
        record = self.settings.write_record(worker.progress, "complete")
        self.ledger_s += time.perf_counter() - started
        return record

    def bound(self) -> float:
        """Seconds that no order of work can beat."""
        each = math.ceil(len(self.trials_s) / len(self.workers))
        return max(self.work_s / len(self.workers), min(self.jobs_s) + sum(sorted(self.trials_s)[:each]))


def specs_of(trials: int) -> tuple[list[ModelCost], list[TrialSpec]]:
    models = GRIDS.get(trials, GRIDS[5000])
    configs = configs_of(trials // len(models))
    specs = []
    for name in models:
        run = ModelRun(name, name, None, "wikitext2", None, PROTOCOL, 0, "bfloat16")
        specs += [TrialSpec(run, config, digest([name, config.identity()])) for config in configs]
    return [model_cost(name, configs) for name in models], specs


def simulate(trials: int, nodes: int, args: Any) -> dict[str, float]:
    costs, specs = specs_of(trials)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(costs, specs, nodes * args.gpus_per_node, Path(folder), args)
        makespan = cluster.run()
        started = time.perf_counter()
        assert len(cluster.settings.ledger.records()) == (0 if args.no_files else len(specs))
        reading = time.perf_counter() - started
    gpus = nodes * args.gpus_per_node
    return {
        "nodes": nodes,
        "gpus": gpus,
        "trials": trials,
        "ideal_s": cluster.work_s / gpus,
        "bound_s": cluster.bound(),
        "makespan_s": makespan,
        "efficiency": cluster.work_s / gpus / makespan,
        "of_bound": cluster.bound() / makespan,
        "driver_busy": cluster.driver_s / makespan,
        "driver_ms_per_message": 1000 * cluster.driver_s / cluster.messages,
        "threads": cluster.threads,
        "record_ms": 1000 * cluster.ledger_s / len(specs),
        "ledger_read_s": reading,
        "process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def rows(args: Any) -> Iterator[dict[str, float]]:
    for trials, nodes in itertools.product(args.trials, args.nodes):
        yield simulate(trials, nodes, args)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nodes", type=counts, default="1,2,4,8,16,32,64", metavar="N,N", help="(default: %(default)s)")
    p.add_argument("--gpus-per-node", type=COUNT, default=8, metavar="N", help="(default: %(default)s)")
    p.add_argument("--trials", type=counts, default="135,5000", metavar="N,N", help="in all (default: %(default)s)")
    p.add_argument(
        "--jitter", type=float, default=0.1, metavar="X", help="spread of a stage's seconds (default: %(default)s)"
    )
    p.add_argument("--controller-ms", type=float, default=10.0, metavar="X", help="of a message (default: %(default)s)")
    p.add_argument(
        "--no-files", action="store_true", help="no records and no views but the live line: less than the driver does"
    )
    p.add_argument("--seed", type=FROM_ZERO, default=0, metavar="S", help="(default: %(default)s)")
    p.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers as JSON, too")
    args = p.parse_args(argv)
    if not (0 <= args.jitter <= 10 and 0 <= args.controller_ms <= 1e6):
        p.error(
            f"--jitter is {args.jitter:g} and --controller-ms {args.controller_ms:g}; they must be from 0 to 10 and from 0 to 1e6"
        )
    torch.set_num_threads(1)
    print("A simulation: stages take the cost model's seconds of simulated time.\n")
    heads = "trials nodes  GPUs     ideal     bound  makespan of ideal of bound driver busy ms/message threads   MiB"
    print(heads)
    found = []
    for row in rows(args):
        found.append(row)
        hours = " ".join(f"{row[name] / 3600:>7.2f} h" for name in ("ideal_s", "bound_s", "makespan_s"))
        print(
            f"{row['trials']:>6} {row['nodes']:>5} {row['gpus']:>5} {hours} {row['efficiency']:>8.1%} {row['of_bound']:>8.1%}"
            f" {row['driver_busy']:>11.1%} {row['driver_ms_per_message']:>10.2f} {row['threads']:>7} {row['process_mib']:>5.0f}",
            flush=True,
        )
    if args.output is not None:
        atomic_write_text(args.output, to_json({"simulated": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
