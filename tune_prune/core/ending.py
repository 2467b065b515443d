"""How a command ends: with an exit code, a sentence in place of a traceback, and at once where a signal asks for it.

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
from typing import NoReturn

from tune_prune.core import temporary
from tune_prune.core.errors import MachineError, NotStarted, UserError, refused
from tune_prune.core.terminal import printable

SIGNALS = {
    signal.SIGHUP: "its terminal went away",
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
}
PATIENCE_S = 10.0  # for what has to be put in order; Kubernetes and Slurm kill after 30


def heard() -> signal.Signals | None:
    """The signal by which a thread can interrupt the main one; a shell's background jobs ignore the first of the two."""
    return next((number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))), None)


class _Ending:
    """Of this process: the signal that it has heard, and what else is said of it."""

    def __init__(self, advice: str) -> None:
        self.heard: signal.Signals | None = None
        self.advice = advice
        self.over = threading.Event()

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The first signal raises KeyboardInterrupt in the main thread; a second one changes nothing, as what the first has begun
        ends soon, by itself or by force."""
        if self.heard is None:
            self.heard = signal.Signals(number)
            raise KeyboardInterrupt

    def code(self) -> int:
        return 128 + (self.heard or signal.SIGINT)

    def sentence(self, advice: str = "") -> str:
        return ": ".join(filter(None, (f"\n{SIGNALS[self.heard or signal.SIGINT]}", advice or self.advice)))

    def wait_for_signal(self, wakeup: int) -> None:
        """In a thread, which learns of a signal (`signal.set_wakeup_fd`) also where the main thread hangs in a library or a file
        system and cannot hear it; then that has to end in PATIENCE_S. Closes `wakeup` at its end."""
        with open(wakeup, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] in SIGNALS and not self.over.wait(PATIENCE_S):
                    self.heard = self.heard or signal.Signals(number[0])
                    self.by_force(self.sentence(), self.code())

    def by_force(self, sentence: str, code: int) -> None:
        if not self.over.is_set():
            _say(sentence)
            temporary.remove_all()
            os._exit(code)


def exit_code(main: Callable[[], object], advice: str = "") -> int:
    """Call `main` and return the exit code. A signal prints its own message and `advice`, or that of `advised`."""
    ending = _Ending(advice)
    _open_streams()
    with _signals(ending):
        try:
            main()
        except (UserError, MachineError) as error:
            _say(_with_advice(f"error: {error}", error))
            return 2 if isinstance(error, UserError) else 1
        except KeyboardInterrupt as interrupt:
            _say(
                ending.sentence(
                    ": ".join((*filter(None, map(str, interrupt.args)), *getattr(interrupt, "__notes__", ())))
                )
            )
            return ending.code()
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _output_is_closed():
                if ending.advice:
                    _say(f"what read the output has ended: {ending.advice}")
                return 128 + signal.SIGPIPE
            said = refused(error) or _no_text(error) or _nowhere(error)
            if said is None:
                raise
            sentence, code = said
            _say(_with_advice(f"error: {sentence}", error))
            return code
    return 0


def _open_streams() -> None:
    """A closed one (`>&-`, some daemons) goes nowhere, and no file that is opened later takes its place; a letter that an
    encoding lacks is spelt out, not an error after hours."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115  # for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _no_text(error: BaseException) -> tuple[str, int] | None:
    """That a name which a file system has given is no text, in a sentence; and the exit code."""
    if not isinstance(error, UnicodeEncodeError) or "surrogates" not in error.reason:
        return None
    part = error.object[max(0, error.start - 60) : error.end + 20]
    return f"{part!r} is no UTF-8 text, which names in records are; rename that file or folder", 2


def _nowhere(error: BaseException) -> tuple[str, int] | None:
    """That the current folder is gone, likewise."""
    if not isinstance(error, FileNotFoundError):
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder in which this command was started is not there any more; start it in another one", 2
    return None


def _output_is_closed() -> bool:
    """Whether nobody reads standard output any more, as behind `| head`; then what is still to be written there goes nowhere."""
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
    """Whatever ends the command within is followed by this advice, except what says itself what to do."""
    if _current is not None:
        _current.advice = advice
    try:
        yield
    except (UserError, NotStarted):
        raise
    except BaseException as error:
        error.add_note(advice)
        raise


def heard_signal() -> str:
    """In words, what the command that runs was told; that it was interrupted, where nothing is known of a signal."""
    return SIGNALS[(_current and _current.heard) or signal.SIGINT]


def by_force(sentence: str) -> None:
    """End the command that runs with that sentence, its advice and code 1: its main thread hangs. Nothing without a command."""
    if _current is not None:
        _current.by_force("\n".join(filter(None, (f"error: {sentence}", _current.advice))), 1)


def leave(main: Callable[[], int]) -> NoReturn:
    """Call `main`, which returns an exit code, and end this process with it, in PATIENCE_S at most: what libraries do at the end
    may hang. A signal that comes then changes nothing."""
    global _leaving
    _leaving = True
    code = main()
    timer = threading.Timer(PATIENCE_S, os._exit, [code])
    timer.daemon = True
    timer.start()
    sys.exit(code)


_current: _Ending | None = None
_leaving = False  # this process ends with the command


@contextmanager
def _signals(ending: _Ending) -> Iterator[None]:
    """Within it signals are for `ending`, where this is the main thread; one that is ignored (nohup) stays so."""
    global _current
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    awake, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    wakeup_before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    threading.Thread(target=ending.wait_for_signal, args=[awake], daemon=True).start()
    _current, outer = ending, _current
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, ending.hear)
    try:
        yield
    finally:
        ending.over.set()
        _current = outer
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if _leaving else handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(wakeup)  # its thread ends


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        print(printable(text), file=sys.stderr, flush=True)


def _with_advice(sentence: str, error: BaseException) -> str:
    return "\n".join((sentence, *getattr(error, "__notes__", ())))
