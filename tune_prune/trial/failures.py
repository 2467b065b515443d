"""Which class of failure an error is."""

from __future__ import annotations

from tune_prune.core.errors import Infeasible, MachineError, NotFinite, UserError
from tune_prune.core.records import Failure
from tune_prune.models.runner.out_of_memory import OutOfMemory, is_out_of_memory


class LostWorker(MachineError):
    """The process or node that worked on a trial is gone."""


class Hung(MachineError):
    """A trial or preparation job has not ended within its time limit."""


_CLASSES: dict[type[BaseException], Failure] = {  # the first that fits
    OutOfMemory: "out_of_memory",
    Infeasible: "infeasible",
    NotFinite: "not_finite",
    UserError: "user_error",
    Hung: "hung",
    LostWorker: "lost_worker",
}


def failure_of(error: BaseException) -> Failure:
    """Return the class of failure of a trial that `error` has ended."""
    if is_out_of_memory(error):
        return "out_of_memory"
    return next((failure for kind, failure in _CLASSES.items() if isinstance(error, kind)), "error")


def is_given_up(error: BaseException) -> bool:
    """Say whether an error tells of too little memory, a lost process or the time limit: then other work, with other needs,
    may succeed."""
    return failure_of(error) in ("out_of_memory", "lost_worker", "hung")
