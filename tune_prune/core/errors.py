"""Errors that a user can act on. Command lines print the sentence and exit with a code, without a traceback.

0 done; 2 the user must change something (one sentence on stderr); 130 interrupted; 1 anything else: what the machine could
not do, in one sentence, or a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
from collections.abc import Callable, Iterable

from tune_prune.core.terminal.escapes import printable

_REFUSED = {  # by a file system or a limit, whatever the file is for: what to do about it
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EISDIR: "move that folder away",
    errno.EROFS: "choose a place that can be written to",
    errno.EACCES: "ask its owner for permission or choose another place",
    errno.EPERM: "ask its owner for permission or choose another place",
}


class UserError(ValueError):
    """Something the user must change. The message names the thing, its value, the bound and the next step."""


class MachineError(RuntimeError):
    """What the machine could not do now, though nothing in the command is wrong. The message says what to try."""


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type of a flag, for argparse: what is wrong with a value becomes part of the usage error."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def exit_code(main: Callable[[], None], advice: str = "") -> int:
    """Call `main` and return the exit code. An interrupt prints its own message, or `advice` where it has none."""
    try:
        main()
    except (UserError, MachineError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt as interrupt:
        print(": ".join(filter(None, ("\ninterrupted", str(interrupt) or advice))), file=sys.stderr)
        return 130
    except Exception as error:
        refused = _refused(error)
        if refused is None:
            raise
        sentence, code = refused
        print(printable(f"error: {sentence}"), file=sys.stderr)
        return code
    return 0


def _refused(error: BaseException) -> tuple[str, int] | None:
    """What a file system or a limit has refused, where that is behind `error`, and the exit code."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _REFUSED:
            name = cause.filename or "a file"
            return (
                f"{name} cannot be used ({cause.strerror}); {_REFUSED[cause.errno]}, then run the same command again",
                2 if cause.errno == errno.EISDIR else 1,
            )
        if isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:
            name = str(cause.filename or "a name")
            return f"{name[:60]}... has {len(name):,} letters, which no file can be named by; write a shorter name", 2
        cause = cause.__cause__ or cause.__context__  # Ray raises its own error while it handles ours
    return None


def require(name: str, value: str, known: Iterable[str]) -> None:
    """Raise UserError unless `value`, of the keyword `name`, is one of those that are known."""
    if value not in (known := tuple(known)):
        raise UserError(f"{name} is {value!r}; {did_you_mean(str(value), known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause for an error about an unknown name: the closest known name, then all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"
