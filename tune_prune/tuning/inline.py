"""A search without Ray: its jobs and trials one after the other in this process, by the code that Ray's workers run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tune_prune.core.errors import MachineError
from tune_prune.tuning.messages import Message, TrialMessage
from tune_prune.tuning.observers.observer import Observer
from tune_prune.tuning.observers.results import end, end_by_error
from tune_prune.tuning.queue import WorkQueue
from tune_prune.tuning.stages import StageRunner
from tune_prune.tuning.stopping import StoppingRule
from tune_prune.tuning.work import TrialSpec, Work
from tune_prune.tuning.worker import WorkerSettings


def run(
    queue: WorkQueue,
    specs: Mapping[str, TrialSpec],
    rule: StoppingRule,
    settings: WorkerSettings,
    observers: Observer,
) -> None:
    """Do everything that `queue` hands out. A trial that raises is a failed record; the next one begins on a model that is
    loaded anew."""
    threads = torch.get_num_threads()  # a runner sets them
    runner = StageRunner(specs, settings)
    observers.on_begin()
    try:
        while (work := queue.next()) is not None:
            last, error = _run_one(work, runner, queue, rule, observers)
            if error is None:
                queue.end(work, last)
                end(observers, settings, rule.reasons, work, last)
            else:
                end_by_error(queue, observers, settings, work, last, error)
                error = None  # with its frames, which hold the model
                runner.forget_model()
    finally:
        torch.set_num_threads(threads)
    observers.on_finish()


def _run_one(
    work: Work, runner: StageRunner, queue: WorkQueue, rule: StoppingRule, observers: Observer
) -> tuple[Message | None, Exception | None]:
    """Do one job or trial until it ends, is stopped or raises; return its last message, and the error that it raised. Raises
    MachineError where no other trial could run either."""
    observers.on_start(work)
    runner.begin(work)
    last: Message | None = None
    while True:
        observers.on_tick(running=1)
        try:
            last = runner.step()
        except MachineError:
            raise
        except Exception as error:  # noqa: BLE001  # the runner has recorded it
            return last, error
        ends = last.ended or (isinstance(last, TrialMessage) and rule.stops(last))
        observers.on_message(work, last)
        if ends:
            return last, None
