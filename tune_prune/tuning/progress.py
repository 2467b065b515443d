"""How far a search is: the time that is left, by the cost model and by what stages took so far, and one line on the screen."""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TextIO

from tune_prune.core.config import PruningConfig
from tune_prune.core.measures import comparable, fraction
from tune_prune.core.records import TrialRecord, failure_counts
from tune_prune.core.terminal import printable
from tune_prune.tuning.cost import TRIAL_OVERHEAD_S, CostEstimate, Seconds
from tune_prune.tuning.messages import JobMessage, Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.work import PrepareJob, TrialSpec, Work, labels_of_groups

TTY_REFRESH_S = 0.5
LOG_REFRESH_S = 10.0  # without a terminal; later on
LOG_REFRESH_SHARE = (
    0.01  # of the time that the search has taken, so that one of days writes no more lines than one of hours
)
_PACES = 200  # stages whose paces say how far the time left is uncertain; the latest count


class TimeLeft:
    """Seconds until a search is done: the predicted work that is left, each stage at the pace it had so far, over the slots.

    Jobs and trials are pieces of work; `waiting` says how many of each kind have not been started.
    """

    def __init__(self, pieces: Mapping[Hashable, Seconds], waiting: Mapping[Hashable, int], slots: int) -> None:
        self._pieces = pieces  # predicted seconds by stage of each kind of piece
        self._waiting = Counter(waiting)
        self._slots = slots
        self._running: dict[Hashable, Seconds] = {}
        self._predicted: defaultdict[str, float] = defaultdict(float)  # by stage, of what was measured
        self._measured: defaultdict[str, float] = defaultdict(float)
        self._paces: deque[float] = deque(maxlen=_PACES)  # measured over predicted, of one stage each

    def start(self, name: Hashable, kind: Hashable) -> None:
        """Begin a piece of that kind, under a name of its own; once more under the same name: it begins again."""
        if name not in self._running:
            self._waiting[kind] = max(0, self._waiting[kind] - 1)
        self._running[name] = dict(self._pieces.get(kind, {}))

    def done(self, name: Hashable, kind: Hashable, stage: str, share: float, seconds: float | None) -> None:
        """Count `share` of a stage as done in measured `seconds` (None: nothing was computed, so nothing is learnt)."""
        predicted = share * self._pieces.get(kind, {}).get(stage, 0.0)
        left = self._running.get(name, {})
        left[stage] = max(0.0, left.get(stage, 0.0) - predicted)
        if seconds is not None and predicted:
            self._predicted[stage] += predicted
            self._measured[stage] += seconds
            self._paces.append(seconds / predicted)

    def end(self, name: Hashable) -> None:
        """Forget a piece that is over, whatever was left of it."""
        self._running.pop(name, None)

    @property
    def measured(self) -> bool:
        return bool(self._measured)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The quartiles of the paces that stages had, over their median; None while there are few."""
        if len(self._paces) < 8:
            return None
        low, middle, high = statistics.quantiles(self._paces, n=4)
        return low / middle, high / middle

    def seconds(self, as_predicted: bool = False) -> float:
        """Predict what is left, at the paces so far or `as_predicted`."""

        def take(work: Seconds) -> float:
            return sum(seconds * (1.0 if as_predicted else self._pace(stage)) for stage, seconds in work.items())

        running = [take(left) for left in self._running.values()]
        waiting = [count * (take(self._pieces.get(of, {})) + TRIAL_OVERHEAD_S) for of, count in self._waiting.items()]
        return max((sum(running) + sum(waiting)) / self._slots, *running, 0.0)

    def _pace(self, stage: str) -> float:
        """Return measured over predicted so far, of this stage or else of all; 1 before anything is measured."""
        if self._predicted.get(stage):
            return self._measured[stage] / self._predicted[stage]
        everything = sum(self._predicted.values())
        return sum(self._measured.values()) / everything if everything else 1.0


def _kind(work: Work) -> Hashable:
    """Return what pieces of work of equal cost have in common."""
    return (work.run.label, work.samples) if isinstance(work, PrepareJob) else work.run.label


class Forecast:
    """When a search will be done, by all that starts, reports and ends."""

    def __init__(
        self,
        cost: CostEstimate,
        specs: Mapping[str, TrialSpec],
        total: int,
        recorded: Sequence[TrialRecord],
        jobs: Sequence[PrepareJob],
        slots: int,
        clock: Callable[[], float],
    ) -> None:
        pieces: dict[Hashable, Seconds] = {}
        waiting: dict[Hashable, int] = {}
        counts = Counter(spec.run.label for spec in specs.values())
        for model in cost.models:
            pieces[model.label] = model.trial
            # An adaptive search tries a part of the specs, the same of each model; a round of draws has none of some models.
            share = total * counts[model.label] // max(1, len(specs))
            waiting[model.label] = share - sum(record.model == model.label for record in recorded)
            for job in jobs:
                if job.run.label == model.label:
                    pieces[model.label, job.samples] = model.jobs.get(job.samples, {})
                    waiting[model.label, job.samples] = 1
        self.time = TimeLeft(pieces, waiting, slots)
        self._cost = cost
        self._clock = clock
        self._scored: dict[str, int] = {}  # zero-shot items by trial
        # Whether a trial has ended: until then paces are those of the preparation, which loads and warms up.
        self.tried = False
        self.slowdown = cost.slowdown
        self.changed = clock()

    def start(self, work: Work) -> None:
        if isinstance(work, TrialSpec):
            self._scored.pop(work.key, None)
        self.time.start(work, _kind(work))

    def learn(self, work: Work, message: Message) -> None:
        """Take from a message what of `work` is done, and how long it took."""
        self.changed = self._clock()
        if isinstance(message, JobMessage):
            reports = [(report.stage, report.duration_s, report.tokens) for report in message.reports]
            stages = message.baseline.stages if message.baseline is not None else []
            reports += [(stage.stage, stage.duration_s, stage.tokens) for stage in stages]
            for stage in dict.fromkeys(stage for stage, _, _ in reports):
                seconds = sum(duration for other, duration, tokens in reports if other == stage and tokens)
                self.time.done(work, _kind(work), stage, 1.0, seconds or None)
        elif message.stage is not None:
            key, report, share = message.record.key, message.stage, 1.0
            if report.items_total:
                share = (report.items_scored - self._scored.get(key, 0)) / report.items_total
                self._scored[key] = report.items_scored
            if report.stage == "steps" and isinstance(work, TrialSpec):  # one for each but the last
                share = 1 / (work.config.steps - 1)
            computed = report.tokens > 0 or report.stage == "pruning"  # which forwards nothing and is never cached
            self.time.done(work, _kind(work), report.stage, share, report.duration_s if computed else None)

    def end(self, work: Work) -> None:
        self.time.end(work)
        self.tried |= isinstance(work, TrialSpec)
        self.changed = self._clock()

    def seconds(self, ends: tuple[float, float] | None = None) -> tuple[float, float]:
        """Predict what is left, at least and at most: as the cost model says until a trial has ended, then at the paces so far,
        times `ends`."""
        left = self.time.seconds(as_predicted=not self.tried) + (0.0 if self.time.measured else self._cost.start_s)
        low, high = ends or (1.0, 1.0) if self.tried else self.slowdown
        passed = self._clock() - self.changed
        return max(0.0, left * low - passed), max(0.0, left * high - passed)


class LiveLine(Observer):
    """One line on the screen: `[12/45] running 2, failed 0, best accuracy .8421 blockwise-s64-n128, ETA 01:40`;
    while what trials share is being prepared, with `prepared 1/6` in front.

    On a terminal the line is rewritten; elsewhere lines follow each other. `total` counts trials, those in `recorded` included.
    Without a `cost` there is no ETA.
    """

    title = "the line of progress"

    def __init__(
        self,
        specs: Mapping[str, TrialSpec],
        total: int,
        recorded: Sequence[TrialRecord] = (),
        stream: TextIO | None = None,
        cost: CostEstimate | None = None,
        jobs: Sequence[PrepareJob] = (),
        slots: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._specs = specs
        self._total = total
        self._given_stream = stream  # None: sys.stdout, asked for each time, as Ray pickles what it calls
        self._tty = self._stream.isatty()
        self._groups = labels_of_groups(specs.values())
        self._several = len(set(self._groups.values())) > 1
        # By group's label and configuration, without its seed, accuracy and perplexity of each draw; NaN of one that was stopped:
        # those that went on are the lucky ones.
        self._draws: dict[str, dict[PruningConfig, list[tuple[float, float]]]] = {}
        self._warned: set[str] = set()
        self._num_jobs = len(jobs)
        self._clock = clock
        self._failures: list[str] = []  # the class of each failed trial
        self._done = self._stopped = self._prepared = self._width = 0
        for record in recorded:
            self._count(record.key, record.status, record.metrics)
        self._forecast = Forecast(cost, specs, total, recorded, jobs, slots, clock) if cost is not None else None
        self._began = self._shown = clock()

    @property
    def _stream(self) -> TextIO:
        return self._given_stream or sys.stdout

    def say(self, text: str) -> None:
        """Write a line of its own that stays, such as what a preparation job found."""
        self._write(text)
        self.end()

    def end(self) -> None:
        """Leave the line, so that what is printed next starts on its own."""
        if self._tty and self._width:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._stream.write("\n")
                self._stream.flush()
        self._width = 0

    def on_begin(self) -> None:
        if self._forecast is not None:
            self._forecast.changed = self._clock()
        self._write(self._text(0))

    def on_tick(self, running: int) -> None:
        now = self._clock()
        seldom = max(LOG_REFRESH_S, LOG_REFRESH_SHARE * (now - self._began))
        if now - self._shown >= (TTY_REFRESH_S if self._tty else seldom):
            self._write(self._text(running))

    def on_start(self, work: Work) -> None:
        if self._forecast is not None:
            self._forecast.start(work)

    def on_message(self, work: Work, message: Message) -> None:
        for warning in message.warnings:
            if warning not in self._warned:  # another worker may have met the same
                self._warned.add(warning)
                self.say(f"warning: {warning}")
        if self._forecast is not None:
            self._forecast.learn(work, message)

    def on_end(self, work: Work, last: Message | None) -> None:
        self._prepared += isinstance(work, PrepareJob)
        if self._forecast is not None:
            self._forecast.end(work)
        if isinstance(work, TrialSpec) and isinstance(last, TrialMessage) and last.ended:
            self._count(work.key, last.record.status, last.record.metrics, last.record.failure)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self.on_end(work, last)

    def on_finish(self) -> None:
        self.say(self._text(0))

    def seconds_left(self) -> tuple[float, float] | None:
        """Predict the seconds until the search is done, at least and at most; None where nothing was predicted or is left."""
        if self._forecast is None or self._done >= self._total:
            return None
        return self._forecast.seconds(self._forecast.time.spread or self._forecast.slowdown)

    def _count(self, key: str, status: str, metrics: Mapping[str, float], failure: str = "") -> None:
        self._done += 1
        self._stopped += status == "stopped_early"
        if status == "failed":
            self._failures.append(failure)
        accuracy = metrics.get("acc_mean", math.nan) if status == "complete" else math.nan
        if status == "stopped_early" or math.isfinite(accuracy):
            config, ppl = replace(self._specs[key].config, seed=None), metrics.get("ppl", math.nan)
            known = (accuracy, math.inf if math.isnan(ppl) else ppl)
            self._draws.setdefault(self._groups[key], {}).setdefault(config, []).append(known)

    def _best(self) -> str:
        """Name the most accurate configuration of each group by the mean of its draws, and as rule "accuracy" chooses of equals."""
        best = []
        for label, configs in self._draws.items():
            ranked = []
            for config, draws in configs.items():
                accuracies, ppls = zip(*draws, strict=True)
                if not math.isnan(mean := statistics.fmean(accuracies)):
                    tokens = config.seq_len * config.num_samples * config.steps
                    ranked.append((-comparable(mean), statistics.geometric_mean(ppls), tokens, config.name))
            if ranked:
                loss, *_, name = min(ranked)
                best.append(f"best accuracy {fraction(-loss)} {label + ' ' if self._several else ''}{name}")
        return "; ".join(best)

    def _text(self, running: int) -> str:
        best = self._best()
        jobs = f"prepared {self._prepared}/{self._num_jobs}, " if self._prepared < self._num_jobs else ""
        classes = f" ({failure_counts(self._failures)})" if self._failures else ""
        counts = f"[{self._done}/{self._total}] {jobs}running {running}, failed {len(self._failures)}{classes}"
        counts += f", stopped {self._stopped}" if self._stopped else ""
        return f"{counts}{', ' if best else ''}{best}{self._eta()}"

    def _eta(self) -> str:
        if self._forecast is None or self._done >= self._total:
            return ""
        return f", ETA {' to '.join(dict.fromkeys(map(_clock_text, self._forecast.seconds())))}"

    def _write(self, text: str) -> None:
        text = printable(text)
        if self._tty:
            columns = shutil.get_terminal_size().columns - 1  # a longer line would wrap and could not be rewritten
            self._stream.write("\r" + text[:columns].ljust(self._width))
            self._width = min(len(text), columns)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
        self._shown = self._clock()


def _clock_text(seconds: float) -> str:
    """05:07, or 1:05:07."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}:' if hours else ''}{minutes:02d}:{rest:02d}"
