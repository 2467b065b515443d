"""How often the winner of one draw of calibration samples is the winner of all: of a search that measured every configuration on
the same draws.

    tune-prune search --model tiny-llama --model tiny-qwen2 --model tiny-mistral --seeds 0,1,2 --name draws
    python scripts/winners_by_draw.py ray_results/draws

Of each model the most accurate configuration of each draw, its place among the means of all draws, the points it loses there, and
those by which its own draw flattered it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pandas as pd

from tune_prune import load_results
from tune_prune.commands.flags import output_file
from tune_prune.core.ending import exit_code
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hyperparameters import HYPERPARAMETERS


def winners(trials: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per model and draw; `trials` as `Results.trials` has them. Only configurations with all draws count."""
    rows = []
    for model, own in trials[trials["success"]].groupby("model", sort=False):
        names = [name for name in HYPERPARAMETERS if name in own and name != "seed"]
        usual = {name: "" if HYPERPARAMETERS[name].default is None else HYPERPARAMETERS[name].default for name in names}
        draw = own["seed"].fillna(-1)
        own = own.fillna(usual).assign(draw=draw)
        scores = own.pivot(index=names, columns="draw", values="acc_mean").dropna()
        means = scores.mean(axis=1).sort_values(ascending=False, kind="stable")
        for number, draw in enumerate(scores):
            best = scores[draw].idxmax()
            place = int((means > means[best]).sum()) + 1
            rows.append(
                {
                    "model": model,
                    "draw": number,
                    "winner": _name(dict(zip(scores.index.names, best, strict=True))),
                    "place": place,
                    "of": len(means),
                    "lost_points": 100 * float(means.iloc[0] - means[best]),
                    "optimistic_points": 100 * float(scores[draw].max() - means[best]),
                }
            )
    return rows


def _name(values: dict[str, Any]) -> str:
    """As in the tables of a search: taylor-s16-n128, and what is not at its default."""
    rows = {name: HYPERPARAMETERS[name] for name in values}
    return "-".join(
        row.in_name(values[name])
        for name, row in rows.items()
        if row.name_prefix is not None and values[name] not in ("", row.default)
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="its folder")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also as JSON")
    args = parser.parse_args(argv)
    rows = winners(load_results(args.experiment).trials)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False, float_format="{:.2f}".format))
    won = sum(row["place"] == 1 for row in rows)
    lost = table["lost_points"].mean()
    print(f"\n{won} of {len(rows)} winners of one draw are the winner of all; {lost:.2f} points are lost on average")
    if args.output:
        atomic_write_text(args.output, to_json(rows))


if __name__ == "__main__":
    sys.exit(exit_code(main))
