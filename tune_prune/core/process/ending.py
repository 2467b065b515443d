"""How a command ends: with an exit code, a sentence in place of a traceback, and at once where a signal asks for it.

0 done; 1 what the machine could not do, in one sentence, or a defect, with its traceback; 2 the user must change something, in one
sentence; 128 and the number of the signal that ended it: 129 its terminal went, 130 interrupted (Ctrl-C), 143 terminated (`kill`,
Slurm, Kubernetes).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from tune_prune.core.errors import MachineError, UserError, refused
from tune_prune.core.process import temporary

SIGNALS = {
    signal.SIGHUP: "its terminal went away",
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
}
PATIENCE_S = 10.0  # for what has to be put in order; Kubernetes and Slurm kill after 30


class _Ending:
    """Of this process: the signal that it has heard, and what else is said of it."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self.advice = ""
        self.last: threading.Timer | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The first signal raises KeyboardInterrupt in the main thread; a second one changes nothing, as what the first has begun
        ends soon, by itself or by force."""
        if self.heard is None:
            self.heard = signal.Signals(number)
            self.last = _later(self.by_force)
            raise KeyboardInterrupt

    @property
    def code(self) -> int:
        return 128 + (self.heard or signal.SIGINT)

    def say(self, advice: str) -> None:
        what = SIGNALS[self.heard or signal.SIGINT]
        with contextlib.suppress(OSError):  # the terminal is gone
            print(": ".join(filter(None, (f"\n{what}", advice or self.advice))), file=sys.stderr, flush=True)

    def by_force(self) -> None:
        """The main thread hangs, in a library or a file system that does not answer."""
        self.say("")
        temporary.remove_all()
        os._exit(self.code)


def exit_code(main: Callable[[], None], advice: str = "") -> int:
    """Call `main` and return the exit code. A signal prints its own message and `advice`, or that of `advised`."""
    ending = _Ending()
    with _signals(ending):
        ending.advice = advice
        try:
            main()
        except (UserError, MachineError) as error:
            print(_with_advice(f"error: {error}", error), file=sys.stderr)
            return 2 if isinstance(error, UserError) else 1
        except KeyboardInterrupt as interrupt:
            ending.say(": ".join((*filter(None, map(str, interrupt.args)), *getattr(interrupt, "__notes__", ()))))
            return ending.code
        except Exception as error:
            sentence = refused(error)
            if sentence is None:
                raise
            print(_with_advice(f"error: {sentence}", error), file=sys.stderr)
            return 1
    return 0


@contextmanager
def advised(advice: str) -> Iterator[None]:
    """Whatever ends the command within, except a UserError, is followed by this advice."""
    if _current is not None:
        _current.advice = advice
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        error.add_note(advice)
        raise


def leave(code: int) -> NoReturn:
    """End this process with that exit code, in PATIENCE_S at most: what libraries do at the end may hang."""
    sys.stdout.flush()
    _later(lambda: os._exit(code))
    sys.exit(code)


_current: _Ending | None = None


@contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    """Within it signals are for `ending`, where this is the main thread; one that is ignored (nohup) stays so."""
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _current, outer = ending, _current
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, ending.hear)
    try:
        yield
    finally:
        _current = outer
        for number, handler in before.items():
            signal.signal(number, handler)
        if ending.last is not None:
            ending.last.cancel()


def _with_advice(sentence: str, error: BaseException) -> str:
    return "\n".join((sentence, *getattr(error, "__notes__", ())))


def _later(act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(PATIENCE_S, act)
    timer.daemon = True
    timer.start()
    return timer
