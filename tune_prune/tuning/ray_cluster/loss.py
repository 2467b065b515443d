"""Ray is watched from a thread while a search is on it: Ray itself would wait, for ever or a minute, and then abort the process."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tune_prune.core import ending, machine
from tune_prune.core.errors import MachineError, UserError
from tune_prune.tuning.ray_cluster import address as address_check

A_SIGNAL_S = 1.0  # in which a signal that has ended Ray reaches this process, too, and is the reason
ANSWER_S = 5.0
ASK_EVERY_S = 5.0
SILENCE_S = 40.0  # of a cluster's head; one that is started again answers sooner, and after 60 Ray aborts
_DEAD = threading.Event()  # set when the Ray of this process has died, which ray.is_initialized() does not tell


class RayLost(MachineError):
    """The Ray that a search was on has ended."""


def check_alive() -> None:
    """Raise RayLost where the Ray of this process has died: the next search would be on it, unwatched."""
    if _DEAD.is_set():
        raise RayLost(
            "the Ray of this Python process has died: restart Python; inline=True (--inline) does without Ray there"
        )


@contextmanager
def watched(wait: Callable[[threading.Event], str]) -> Iterator[None]:
    """Where `wait`, which is called in a thread, comes back and says what has ended, whatever is under way within is interrupted:
    RayLost. The event that it is given is set when nothing is under way any more."""
    lost: list[str] = []
    over = threading.Event()

    def watch() -> None:
        what = wait(over)
        if not over.wait(A_SIGNAL_S):
            lost.append(what)
            _thread.interrupt_main(ending.interrupt_signal() or signal.SIGINT)
            if not over.wait(ANSWER_S):  # Ray's client waits for what is no more, and hears no signal
                ending.by_force(str(_lost(what)))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # SystemExit: of Ray's handler, which is there while Ray is joined
        if not lost:
            raise
        _DEAD.set()
        raise _lost(lost[0]) from None
    finally:
        over.set()


def _lost(what: str) -> RayLost:
    return RayLost(f"Ray has ended: its {what} died ({machine.load()})")


def silence_of(address: str, over: threading.Event) -> str:
    """Waits until no head of a cluster has answered at `address` for SILENCE_S, or nobody wants to know any more."""
    answered = time.monotonic()
    while time.monotonic() - answered < SILENCE_S and not over.wait(ASK_EVERY_S):
        try:
            address_check.check(address)
            answered = time.monotonic()
        except UserError:
            continue
    return f"head at {address}"
