"""Searches that are killed at random moments until nothing more can go wrong.

    python scripts/torture --minutes 120                       all attacks in turn; `make torture` does ten minutes
    python scripts/torture --minutes 5 --only workers --seed 3

A line per search: what was done to it, and what was found. The table at the end, with --output also as JSON, counts searches,
kills and problems: records that were lost or written again, numbers that are not those of an undisturbed search, processes and
temporary files that outlive it, wrong exit codes, tracebacks. Exit code 1 where there is any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from itertools import count, cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the other scripts

from script_tools import COUNT, script_parser, table

from torture.attacked import GRID, SHORT, Setting, undisturbed
from torture.attacks import ATTACKS
from tune_prune.core.errors import UserError

SHORT_ATTACKS = ("workers", "hostile", "damage", "drivers", "disk")


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the attacks that are asked for and can be made here. Raises UserError where there is none."""
    known = SHORT_ATTACKS if options.short else tuple(ATTACKS)
    names = options.only.split(",") if options.only else list(known)
    for name in names:
        if name not in ATTACKS:
            raise UserError(f"unknown attack {name!r}; known: {', '.join(ATTACKS)}")
        if name not in known:
            raise UserError(f"{name} has no --short form; leave it out, or name another attack")
    if "disk" in names and os.getuid():
        print("left out: disk, which mounts a tmpfs, as only root may")
        names.remove("disk")
    if not names:
        raise UserError("no attack is left to make; name another one with --only, or run this as root")
    return names


def main(arguments: list[str] | None = None) -> int:
    p = script_parser(__doc__, "a JSON line for each search, as soon as it has ended")
    p.add_argument("--minutes", type=float, default=10, help="no search begins after so many (default: %(default)s)")
    p.add_argument("--searches", type=COUNT, default=10**9, metavar="N", help="at most so many (default: no limit)")
    p.add_argument("--only", metavar="A,B", help=f"attacks (default: {','.join(ATTACKS)})")
    p.add_argument(
        "--short", action="store_true", help=f"searches of 3 trials, damaged twice; for {','.join(SHORT_ATTACKS)}"
    )
    p.add_argument(
        "--kills",
        type=COUNT,
        default=10**9,
        metavar="N",
        help="of one search of `workers`, at most (default: no limit)",
    )
    p.add_argument("--seed", type=int, default=0, help="of what is killed when (default: %(default)s)")
    options = p.parse_args(arguments)
    try:
        names = chosen(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    searches, kills, problems = Counter[str](), Counter[str](), Counter[str]()
    # Ray's sockets lie below it, whose paths may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="t"))
    grid, rounds = (SHORT, 2) if options.short else (GRID, 12)
    reference, seconds = undisturbed(folder, grid)
    kill_s = min(8.0, seconds / 2)  # a fast machine would have come to the end before the first kill
    setting = Setting(folder, reference, random.Random(options.seed), grid, kill_s, options.kills, rounds)
    until = time.monotonic() + 60 * options.minutes
    for number, name in zip(count(), cycle(names)):
        if time.monotonic() > until or number == options.searches:
            break
        began = time.monotonic()
        search = ATTACKS[name](setting, number)
        seconds = time.monotonic() - began
        searches[name] += 1
        kills[name] += search.kills
        problems[name] += len(search.problems)
        print(f"{name} {number}: {search.kills} kills in {seconds:.0f} s, {len(search.problems)} problems")
        print(*(f"    {problem}\n" for problem in search.problems), sep="", end="", flush=True)
        if options.output:
            line = {"attack": name, "search": number, "flags": search.flags, "kills": search.kills}
            line |= {"seconds": round(seconds, 1), "problems": search.problems}
            with options.output.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        if not search.problems:
            shutil.rmtree(search.folder)  # what went wrong stays, to be looked at
    rows: list[tuple[object, ...]] = [("attack", "searches", "kills", "problems")]
    rows += [(name, searches[name], kills[name], problems[name]) for name in dict.fromkeys(names)]
    print(f"\nseed {options.seed}, {options.minutes:g} minutes\n{table(rows)}")
    if problems.total():
        print(f"what went wrong is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
