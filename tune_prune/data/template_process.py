"""Renders the templates of task files that nobody has vouched for: a program of its own (data/templates.py starts it), so that
one that never ends, or that fills the memory, ends this process and no other.

A line of JSON comes in, [template, values], and one goes out, {"text": ...} or {"error": ...}. Arguments: how many seconds a line
may take, and how many of CPU time all lines together; then a signal ends the process. jinja2's sandbox bounds what a template may
reach: the values, its filters and nothing behind them. It imports nothing of tune_prune, and no package but jinja2.
"""

import json
import re
import resource
import signal
import sys
from functools import cache
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 1_000_000  # characters of a prompt
MAX_MEMORY = 1 << 30  # bytes of address space; the process alone takes about 50 MB


def main() -> None:
    most = int(sys.argv[2])
    bound(resource.RLIMIT_CPU, most, most + 10)
    if sys.platform == "linux":  # elsewhere the bound is not kept, or cannot be set
        bound(resource.RLIMIT_AS, MAX_MEMORY, MAX_MEMORY)
    # As lm-eval's own environment (lm_eval.utils.env), but for the sandbox and null, which would be asked as the word None.
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, finalize=not_null
    )
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(pattern, new, text, count=count)
    compiled = cache(environment.from_string)  # compiling takes far longer than rendering
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
        try:
            template, values = json.loads(line)
            text = compiled(template).render(**values)
            if len(text) > MAX_TEXT:
                raise ValueError(f"it makes a text of {len(text):,} characters, and {MAX_TEXT:,} is the most")
            answer = {"text": text}
        except Exception as error:  # noqa: BLE001  # a template may raise anything; who asked says whose it is
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def not_null(value: Any) -> Any:
    if value is None:
        raise ValueError("a field is null, or missing")
    return value


def bound(what: int, soft: int, hard: int) -> None:
    """Limit a resource, where no lower limit is set."""
    _, most = resource.getrlimit(what)
    most = hard if most == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (min(soft, most), most))


if __name__ == "__main__":
    main()
