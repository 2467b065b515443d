"""What `search --kl-filter` would have done to finished searches: its rule, replayed in random orders of their trials.

    python scripts/replay_kl_filter.py docs/studies/smollm2-135m/grid.csv
    python scripts/replay_kl_filter.py ray_results/NAME other/results.csv --orders 1000 --output replay.json

Takes folders of experiments, and results files. A row is a model at a pruning ratio on one draw of calibration samples: within
these the filter compares. Trials without both KLs are left out. Told are the trials, how many of them it stops on average, in how
many orders it stops the best by each measure, and the share of the seconds of all trials that it saves: those that the stopped
ones spent on perplexity and items, where the records say them.

The rule is the program's own (tune_prune/tuning/stopping.py), and the order random, as in a search with the filter.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bench_common import COUNT, FROM_ZERO, table

from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.input.rows import ranked
from tune_prune.commands.flags import output_file
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hashing import seed_for
from tune_prune.core.measures import MEASURES, measured
from tune_prune.core.store import location
from tune_prune.tuning.stopping import FACTOR, FEWEST, KLS, KlGroup

WINNERS = ("accuracy", "gold_logprob", "kl")
SAVED = ("perplexity_duration_s", "zero_shot_duration_s")


def groups(paths: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """What the filter compares within, with the name that its row gets. Raises UserError for what cannot be read."""
    csvs = [path for path in paths if path.endswith(".csv")]
    folders = [location(path) for path in paths if path not in csvs]
    for label, model in read_study(folders, [(Path(path).stem, Path(path)) for path in csvs]).models.items():
        rows = model.rows.reset_index(drop=True)
        known = rows[rows[list(KLS)].notna().all(axis=1)] if {*KLS} <= {*rows} else rows.iloc[:0]
        if known.empty:
            raise UserError(f"no trial of {label} has both {' and '.join(KLS)}, so the filter has nothing to compare")
        draws = known["seed"].fillna(-1) if "seed" in known else pd.Series(-1, index=known.index)
        for draw, own in known.groupby(draws):
            yield f"{label} draw {draw:g}" if draw >= 0 else label, own.reset_index(drop=True)


def winners(trials: pd.DataFrame) -> dict[str, int]:
    """By measure, the place of the best complete trial; none where no trial has the measure."""
    found = {}
    eligible = ranked(trials)
    for name in WINNERS:
        scores = {
            int(place): measured({m: float(row[m]) for m in MEASURES[name][1] if pd.notna(row.get(m))}, name)
            for place, row in eligible.iterrows()  # the most accurate first, which decides ties
        }
        scores = {place: score for place, score in scores.items() if not math.isnan(score)}
        if scores:
            found[name] = max(scores, key=scores.__getitem__)
    return found


def replay(name: str, trials: pd.DataFrame, orders: int, seed: int = 0) -> dict[str, Any]:
    """One row: `trials` go through the rule in so many random orders."""
    kls = trials[list(KLS)].astype("float64").to_dict("records")
    best = winners(trials)
    spent = trials["elapsed_time"].to_numpy("float64", na_value=np.nan)
    saved = sum(trials[stage].to_numpy("float64", na_value=np.nan) for stage in SAVED if stage in trials)
    rng, places = random.Random(seed_for(seed, name)), list(range(len(trials)))
    times_stopped = np.zeros(len(trials))
    for _ in range(orders):
        rng.shuffle(places)
        group = KlGroup()
        times_stopped[[place for place in places if group.add(kls[place])]] += 1
    stopped = times_stopped / orders
    share = float(np.sum(stopped * saved) / np.sum(spent)) if np.size(saved) == len(trials) else math.nan
    return {
        "name": name,
        "trials": len(trials),
        "orders": orders,
        "stopped_share": float(stopped.mean()),
        "winners_stopped": {measure: int(times_stopped[place]) for measure, place in best.items()},
        "seconds_saved_share": None if math.isnan(share) else share,
    }


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("paths", nargs="+", metavar="PATH", help="folder of an experiment, or a results file (.csv)")
    p.add_argument(
        "--orders", type=COUNT, default=1000, metavar="N", help="random orders of each (default: %(default)s)"
    )
    p.add_argument("--seed", type=FROM_ZERO, default=0, metavar="S", help="of the orders (default: %(default)s)")
    p.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers as JSON, too")
    options = p.parse_args(argv)
    rows = [replay(name, trials, options.orders, options.seed) for name, trials in groups(options.paths)]
    shown: list[Sequence[object]] = [
        ("", "trials", "stopped", *(f"best by {name} stopped" for name in WINNERS), "seconds saved")
    ]
    for row in rows:
        lost = [f"{row['winners_stopped'][name]:,}" if name in row["winners_stopped"] else "-" for name in WINNERS]
        seconds = "-" if row["seconds_saved_share"] is None else f"{row['seconds_saved_share']:.1%}"
        shown.append((row["name"], row["trials"], f"{row['stopped_share']:.1%}", *lost, seconds))
    print(table(shown))
    print(
        f"\n{options.orders:,} random orders each; stopped is what has both KLs above {FACTOR:g} times their medians over at least "
        f"{FEWEST} trials before it"
    )
    if options.output is not None:
        atomic_write_text(options.output, to_json({"factor": FACTOR, "fewest": FEWEST, "replays": rows}))


if __name__ == "__main__":
    sys.exit(exit_code(main))
