"""The end of a command: with an exit code, a sentence in place of a traceback, and soon where a signal asks for it.

0 done; 1 what the machine could not do, in one sentence, or a defect, with its traceback; 2 the user must change something, in one
sentence; 128 and the number of the signal that ended it: 129 its terminal went, 130 interrupted (Ctrl-C), 141 nobody reads its
output (`| head`), 143 terminated (`kill`, Slurm, Kubernetes).
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tune_prune.core import temporary
from tune_prune.core.errors import MachineError, NotStarted, UserError, refused
from tune_prune.core.terminal import printable

SIGNALS = {
    signal.SIGHUP: "its terminal went away",
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
}
PATIENCE_S = 10.0  # for what has to be put in order; Kubernetes and Slurm kill after 30


class _Ending:
    """The end of the command that runs: the signal that has asked for it, and what the user is told to do then."""

    def __init__(self, advice: str) -> None:
        self.signal: signal.Signals | None = None
        self.advice = advice
        self.timer: threading.Timer | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in the main thread at the first signal, and end the process where that takes long. A second one
        changes nothing: launchers send several."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            self.timer = threading.Timer(PATIENCE_S, lambda: _end_process(self.sentence(self.advice), self.code))
            self.timer.daemon = True
            self.timer.start()
            raise KeyboardInterrupt

    @property
    def code(self) -> int:
        return 128 + (self.signal or signal.SIGINT)

    def sentence(self, advice: str) -> str:
        return f"\n{SIGNALS[self.signal or signal.SIGINT]}" + (f": {advice}" if advice else "")


_current: _Ending | None = None


def exit_code(main: Callable[[], object], advice: str = "") -> int:
    """Call `main` and return the exit code. A signal prints its own message and `advice`, or that of `advised`."""
    ending = _Ending(advice)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that an encoding lacks is spelt out: no error after hours
            stream.reconfigure(errors="backslashreplace")
    with _signals(ending):
        try:
            main()
        except KeyboardInterrupt as interrupt:
            _say(ending.sentence(": ".join([*map(str, interrupt.args), *_notes(interrupt)]) or ending.advice))
            return ending.code
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                if ending.advice:
                    _say(f"what read the output has ended: {ending.advice}")
                return 128 + signal.SIGPIPE
            known = isinstance(error, (UserError, MachineError))
            ended = (str(error), 2 if isinstance(error, UserError) else 1) if known else refused(error)
            if ended is None:
                raise
            _say("\n".join([f"error: {ended[0]}", *_notes(error)]))
            return ended[1]
    return 0


def _output_is_closed() -> bool:
    """Return whether nobody reads standard output any more; then what is still to be written there goes nowhere."""
    output = sys.stdout.fileno()
    watch = select.poll()
    watch.register(output, 0)  # errors are told unasked
    closed = any(event & select.POLLERR for _, event in watch.poll(0))
    if closed:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), output)
    return closed


@contextmanager
def advised(advice: str) -> Iterator[None]:
    """Have whatever ends the command within followed by this advice, except what says itself what to do."""
    if _current is not None:
        _current.advice = advice
    try:
        yield
    except (UserError, NotStarted):
        raise
    except BaseException as error:
        error.add_note(advice)
        raise


def signal_in_words() -> str:
    """Return what the command that runs was told; that it was interrupted, where nothing is known of a signal."""
    return SIGNALS[(_current and _current.signal) or signal.SIGINT]


def interrupt_signal() -> signal.Signals | None:
    """Return the signal by which a thread can interrupt the main one; a shell's background jobs ignore the first of the two."""
    return next((number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))), None)


def by_force(sentence: str) -> None:
    """End the command that runs, whose main thread hangs, with that sentence, its advice and code 1."""
    if _current is not None:
        _end_process("\n".join(filter(None, (f"error: {sentence}", _current.advice))), 1)


def _end_process(sentence: str, code: int) -> None:
    _say(sentence)
    temporary.remove_all()
    os._exit(code)


@contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    """Give signals to `ending` within it, where this is the main thread; one that is ignored (nohup) stays so."""
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
        if ending.timer is not None:
            ending.timer.cancel()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(printable(text), file=sys.stderr, flush=True)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])
