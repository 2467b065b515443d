"""Jinja templates of task files, rendered where they can do no harm (template_process.py)."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = 10.0  # that one rendering may take; an item takes microseconds
CPU_SECONDS = 300  # that all of a task set may take
_SLOW = {
    -signal.SIGALRM: "a template did not end within {0:g} s",
    -signal.SIGXCPU: "the templates did not end within {1} s of CPU time",
}
_PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateError(ValueError):
    """Says in a clause why a template cannot be rendered."""


class TemplateProcess:
    """Renders templates in a process, which starts with the first of them and ends with this object."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render `template` with `values`, plain data as JSON has it.

        Raises TemplateError, also where it does what the sandbox refuses, takes more than SECONDS, or all of them more than
        CPU_SECONDS, or fills the memory.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):  # its CPU time was over before it was asked again
            process.stdin.write(json.dumps([template, values]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            code, self._process = process.wait(), None
            raise TemplateError(_SLOW.get(code, "a template ended Python ({2})").format(SECONDS, CPU_SECONDS, code))
        answer = json.loads(line)
        if "text" in answer:
            return str(answer["text"])
        cause = " ".join(answer["error"].split()).rstrip(".")
        if cause.startswith("SecurityError"):
            cause += "; only with --trust-tasks are templates rendered without a sandbox"
        raise TemplateError(f"a template raises {cause}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            # -P: the folder of the program is no place to import from, its neighbours have names of their own.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(SECONDS), str(CPU_SECONDS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for this process, whose end closes the input
                text=True,
                encoding="utf-8",
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    """Close the input of the process, with which it ends."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.wait()
    process.stdout.close()
