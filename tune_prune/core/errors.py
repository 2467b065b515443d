"""Errors that a user can act on. Commands print the sentence and exit with a code, without a traceback (core/ending.py)."""

from __future__ import annotations

import argparse
import difflib
import errno
import re
from collections.abc import Callable, Iterable

_REFUSED = {  # by a file system or a limit, whatever the file is for: what to do about it
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EISDIR: "move that folder away",
    errno.EROFS: "choose a place that can be written to",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "ask its owner for permission or choose another place"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENOLCK, errno.ETIMEDOUT), "look at the disk or the mount"
    ),
}


class UserError(ValueError):
    """Something the user must change. The message names the thing, its value, the bound and the next step."""


class Infeasible(UserError):
    """A configuration that the model cannot take, such as more to remove than its layers hold."""


class NotFinite(UserError):
    """Numbers that are infinite or undefined where a decision needs finite ones."""


class MachineError(RuntimeError):
    """A failure of the machine, with nothing wrong in the command. The message says what to try."""


class NotStarted(MachineError):
    """A local Ray that does not start; the message says what to do instead."""


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return a type of a flag, for argparse: what is wrong with a value becomes part of the usage error."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def refused(error: BaseException) -> tuple[str, int] | None:
    """Say what a file system or a limit has refused, where that is behind `error`, in a sentence; return it with the exit code."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            name = str(cause.filename or "a file, or where the output goes,")
            on_network = cause.errno == errno.ETIMEDOUT and not cause.filename
            if cause.errno in _REFUSED and not on_network:
                step, code = _REFUSED[cause.errno], 2 if cause.errno == errno.EISDIR else 1
                return f"{name} cannot be used ({cause.strerror}); {step}, then run the same command again", code
            if cause.errno == errno.ENAMETOOLONG:
                return (
                    f"{name[:60]}... has {len(name):,} letters, which no file can be named by; write a shorter name",
                    2,
                )
        cause = cause.__cause__ or cause.__context__  # Ray raises its own error while it handles ours
    return None


def cause_in(*printed: str) -> str:
    """Return what a program that has failed has printed as the cause: its first exception, as what follows comes of that; else its
    first line of an error, else its last line. Lines of lower levels do not count."""
    lines = [" ".join(line.split()) for line in "\n".join(printed).splitlines() if line.strip()]
    grave = [line for line in lines if not re.search(r"\b(INFO|WARNING)\b", line)]
    for pattern in (r"\b[\w.]+(Error|Exception): .+", r".*(?i:error|fail).*"):
        for line in grave:
            if match := re.search(pattern, line):
                return match[0][:200]
    return "".join(lines[-1:])[:200] or "it said nothing"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause for an error about an unknown name: the closest known name, then all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"
