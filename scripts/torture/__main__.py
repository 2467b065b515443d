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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of the other scripts

from bench_common import table

from torture.attacks import ATTACKS
from torture.setting import GRID, SHORT, Setting, undisturbed
from tune_prune.commands.flags import output_file

SHORT_ATTACKS = ("workers", "damage", "drivers", "disk")


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=10, help="no search begins after so many (default: %(default)s)")
    p.add_argument("--searches", type=int, default=10**9, metavar="N", help="at most so many (default: no limit)")
    p.add_argument("--only", metavar="A,B", help=f"attacks (default: {','.join(ATTACKS)})")
    p.add_argument(
        "--short", action="store_true", help=f"searches of 3 trials, damaged twice; for {','.join(SHORT_ATTACKS)}"
    )
    p.add_argument(
        "--kills", type=int, default=10**9, metavar="N", help="of one search of `workers`, at most (default: no limit)"
    )
    p.add_argument("--seed", type=int, default=0, help="of what is killed when (default: %(default)s)")
    p.add_argument(
        "--output", type=output_file, metavar="FILE", help="a JSON line for each search, as soon as it has ended"
    )
    options = p.parse_args(arguments)
    known = SHORT_ATTACKS if options.short else tuple(ATTACKS)
    names = options.only.split(",") if options.only else list(known)
    if unknown := [name for name in names if name not in ATTACKS]:
        print(f"error: unknown attack {unknown[0]!r}; known: {', '.join(ATTACKS)}", file=sys.stderr)
        return 2
    if without := [name for name in names if name not in known]:
        print(f"error: {without[0]} has no --short form; leave it out, or name another attack", file=sys.stderr)
        return 2
    if "disk" in names and os.getuid():
        print("left out: disk, which mounts a tmpfs, as only root may")
        names = [name for name in names if name != "disk"]
    if not names:
        print("error: no attack is left to make; name another one with --only, or run this as root", file=sys.stderr)
        return 2
    searches: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    problems: Counter[str] = Counter()
    # Ray's sockets lie below it, whose paths may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="tp-"))
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
        line: dict[str, Any] = {
            "attack": name, "search": number, "flags": list(search.flags), "kills": search.kills,
            "seconds": round(time.monotonic() - began, 1), "problems": search.problems,
        }  # fmt: skip
        searches[name] += 1
        kills[name] += search.kills
        problems[name] += len(search.problems)
        print(
            f"{name} {number}: {search.kills} kills in {line['seconds']:.0f} s, {len(search.problems)} problems",
            flush=True,
        )
        for problem in search.problems:
            print(f"    {problem}", flush=True)
        if options.output:
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
