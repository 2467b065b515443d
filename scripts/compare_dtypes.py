"""One search in two data types, side by side: what bfloat16 changes of a model's numbers, and what it saves.

    tune-prune search --model smollm2 --search-space SPACE --dtype float32 --name wide ...
    tune-prune search --model smollm2 --search-space SPACE --dtype bfloat16 --name narrow ...
    python scripts/compare_dtypes.py ray_results/wide ray_results/narrow --output dtypes.json

A row for the dense model and one for each configuration that both have completed: perplexity, KL to the dense model of the same
type, log-probability of right answers and accuracy in both; the share of removed KV groups and MLP channels that both remove;
the items that are judged otherwise; and the seconds of the trial's own stages. Below it the seconds of each stage over all trials
and of the passes that they share: those of one machine, which both searches should have had to themselves.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
from bench_common import table, write_json

from tune_prune.commands.flags import output_file
from tune_prune.core.config import PruningConfig
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError
from tune_prune.core.files import parse_json
from tune_prune.core.ledger import Ledger, PassLog, read_baselines
from tune_prune.core.records import TrialRecord
from tune_prune.core.store import ITEMS, PLAN, FolderStore
from tune_prune.pruning.groups import PruningPlan

MEASURES = ("ppl", "kl_text", "kl_tasks", "gold_logprob_mean", "acc_mean")


class Experiment:
    """A finished search: its dense model, and the trials that are complete by the name of their configuration."""

    def __init__(self, folder: str) -> None:
        """Raises UserError for a folder without a complete trial, and for several models."""
        self.store = FolderStore(Path(folder))
        self.ledger = Ledger(self.store)
        done = [record for record in self.ledger.records() if record.status == "complete"]
        baselines = read_baselines(self.store)
        if not done or len(baselines) != 1:
            raise UserError(
                f"{folder} has {len(done)} complete trials of {len(baselines)} models; name a search of one"
            )
        (self.dense,) = baselines.values()
        self.trials = {PruningConfig.from_dict(record.config).name: record for record in done}

    def judged(self, record: TrialRecord) -> dict[tuple[str, int], float]:
        """Whether each item was right, by task and number."""
        content = self.ledger.trial_file(record.key, ITEMS)
        assert content is not None
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
        return {(row["task"], row["doc_id"]): row["score"] for row in rows}

    def removed(self, record: TrialRecord) -> set[tuple[str, int, int]]:
        """KV groups and MLP channels that are gone: part, layer and index, below the highest that any layer keeps."""
        content = self.ledger.trial_file(record.key, PLAN)
        assert content is not None
        plan, gone = PruningPlan.from_dict(parse_json(Path(PLAN), content)), set()
        for part, kept_of_layers in (("KV groups", plan.kept_groups), ("MLP channels", plan.kept_channels)):
            count = 1 + max(max(kept, default=-1) for kept in kept_of_layers)
            gone |= {
                (part, layer, index)
                for layer, kept in enumerate(kept_of_layers)
                for index in set(range(count)).difference(kept)
            }
        return gone

    def seconds(self) -> Counter[str]:
        """Of every stage over all trials, and of shared passes."""
        found: Counter[str] = Counter()
        for cost in PassLog(self.store).read():
            found[f"{cost['stage']} (shared)"] += cost["duration_s"]
        for record in self.trials.values():
            for stage in record.stages:
                found[stage["stage"]] += stage["duration_s"]
        return found


def compared(one: Experiment, other: Experiment) -> list[dict[str, Any]]:
    """The dense model, then every configuration of both. Raises UserError where there is none."""
    names = [name for name in one.trials if name in other.trials]
    if not names:
        raise UserError("the two searches have no configuration in common")
    rows = []
    for name, *records in [("dense", one.dense, other.dense), *((n, one.trials[n], other.trials[n]) for n in names)]:
        row: dict[str, Any] = {"configuration": name}
        for measure in MEASURES:
            row[measure] = [record.metrics.get(measure) for record in records]
        row["seconds"] = [sum(stage["duration_s"] for stage in record.stages) for record in records]
        if name != "dense":
            gone = one.removed(records[0]), other.removed(records[1])
            row["removed by both"] = len(gone[0] & gone[1]) / len(gone[0] | gone[1])
            right = one.judged(records[0]), other.judged(records[1])
            row["items"], row["judged otherwise"] = len(right[0]), sum(right[0][i] != right[1][i] for i in right[0])
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("float32", metavar="FLOAT32", help="the experiment's folder")
    p.add_argument("bfloat16", metavar="BFLOAT16", help="that of the same search in the other data type")
    p.add_argument("--output", type=output_file, metavar="FILE", help="write the numbers as JSON, too")
    args = p.parse_args(argv)
    one, other = Experiment(args.float32), Experiment(args.bfloat16)
    rows = compared(one, other)
    shown: list[tuple[object, ...]] = [
        ("configuration", *MEASURES, "seconds", "removed by both", "judged otherwise"),
    ]
    for row in rows:
        pairs = [" / ".join("–" if v is None else f"{v:.4g}" for v in row[name]) for name in (*MEASURES, "seconds")]
        both = f"{row['removed by both']:.1%}" if "removed by both" in row else "–"
        items = f"{row['judged otherwise']} of {row['items']}" if "items" in row else "–"
        shown.append((row["configuration"], *pairs, both, items))
    print(table(shown))
    seconds = {stage: [one.seconds()[stage], other.seconds()[stage]] for stage in one.seconds()}
    ratios = [(stage, f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}" if b else "–") for stage, (a, b) in seconds.items()]
    print("\n" + table([("seconds", "float32", "bfloat16", "ratio"), *ratios]))
    values = {"compared": "dtypes", "rows": rows, "seconds": seconds}
    write_json(args.output, values)
    return values


if __name__ == "__main__":
    sys.exit(exit_code(main))
