"""Are two result folders the same? `python scripts/compare_results.py BEFORE AFTER`: for changes that must not change a number.

BEFORE and AFTER are experiments, or folders that hold some (a --storage-path, an analysis's --output); what lies at the same
place in both is compared. Every value must be equal bit for bit, but those that time and machine decide (VOLATILE); older names
of hyperparameters count as their names.

    records     ledger/*.json and baseline.json: status, configuration, every metric
    plans       trials/*/pruning_plan.json: the kept groups of every layer
    items       trials/*/items.parquet: every item's log-likelihoods, judgements and slice
    views       the other JSON files of an experiment
    tables      every CSV file: columns by name, rows in order

A table row per kind; the first differences below it; exit code 1 where anything differs. Reads files with nothing but JSON,
pandas and pyarrow, so that any version of the program can have written them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
from script_tools import script_parser

from tune_prune.core import artifact_cache, store
from tune_prune.core.hyperparameters import OLDER_NAMES, renamed

VOLATILE = (
    "elapsed_time", "elapsed_time_s", "peak_memory_bytes", "started_at", "host", "stages", "resources", "versions", "git_commit",
    "command", "created_at", "updated_at", "output_dir", "search_id", "torch_version", "device_name",
    "transformers_version", "method_code",
    "checksum", "files",
)  # fmt: skip
SHOWN = 12
SKIPPED = {store.ATTEMPTS, store.PASSES, store.TUNE, store.TENSORBOARD, artifact_cache.FOLDER}  # folders


def kind(path: Path) -> str | None:
    """Return what a file is compared as; None: it is not compared."""
    if (
        path.name in (store.EXPERIMENT, store.COST, store.STATUS)
        or path.name.startswith(".")
        or SKIPPED & set(path.parts)
    ):
        return None
    if path.parent.name == store.LEDGER or path.name == store.BASELINES:
        return "records" if path.suffix == ".json" else None
    kinds = {store.PLAN: "plans", store.ITEMS: "items"}
    return kinds.get(path.name) or {".json": "views", ".csv": "tables"}.get(path.suffix)


def files(root: Path) -> dict[Path, str]:
    """Return the files to compare below `root`, by relative path."""
    paths = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
    return {path: what for path in paths if (what := kind(path)) is not None}


def volatile(name: str) -> bool:
    return name in VOLATILE or name.endswith("_duration_s")


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield every place where two JSON values differ, as a sentence; numbers by their exact value."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            place = f"{where}.{name}".lstrip(".")
            if volatile(name):
                continue
            if name not in after:
                yield f"{place} is {str(before[name])[:60]} before and missing after"
            elif name not in before:
                yield f"{place} is missing before and {str(after[name])[:60]} after"
            else:
                yield from differences(before[name], after[name], place)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif before != after or type(before) is not type(after):
        yield f"{where} is {str(before)[:60]} before and {str(after)[:60]} after"


def of_tables(before: Path, after: Path) -> Iterator[str]:
    """Return differences of two CSV files, cell by cell as text."""
    old, new = (
        pd.read_csv(path, dtype=str, keep_default_na=False).rename(columns=OLDER_NAMES) for path in (before, after)
    )
    if len(old) != len(new):
        yield f"{len(old)} rows before and {len(new)} after"
        return
    for name in dict.fromkeys([*old.columns, *new.columns]):
        if volatile(name):
            continue
        if name not in new.columns or name not in old.columns:
            yield f"column {name} is only {'before' if name in old.columns else 'after'}"
        else:
            for row in (old[name] != new[name]).to_numpy().nonzero()[0]:
                yield f"row {row + 1}, {name}: {old[name][row]!r} before and {new[name][row]!r} after"


def of_files(what: str, before: Path, after: Path) -> list[str]:
    """Return differences of two files of one kind."""
    if what == "items":
        old, new = (pyarrow.parquet.read_table(path) for path in (before, after))
        return [] if old.equals(new) else ["the items differ"]
    if what == "tables":
        return list(of_tables(before, after))
    texts = (path.read_text(encoding="utf-8") for path in (before, after))
    return list(differences(*(json.loads(text, object_hook=renamed) for text in texts)))


def compare(before: Path, after: Path) -> dict[str, dict[str, Any]]:
    """Compare all files: kind -> {"equal": files, "different": files, "only_before": files, "only_after": files, "sentences":
    [...]}."""
    old, new = files(before), files(after)
    result: dict[str, dict[str, Any]] = {}
    for path, what in sorted((old | new).items()):
        row = result.setdefault(what, {"equal": 0, "different": 0, "only_before": 0, "only_after": 0, "sentences": []})
        if path not in new or path not in old:
            side = "before" if path in old else "after"
            row[f"only_{side}"] += 1
            row["sentences"].append(f"{path} is only {side}")
            continue
        sentences = of_files(what, before / path, after / path)
        row["different" if sentences else "equal"] += 1
        row["sentences"] += [f"{path}: {sentence}" for sentence in sentences]
    return result


def main(arguments: list[str] | None = None) -> int:
    p = script_parser(__doc__, "write the differences as JSON, too")
    p.add_argument("before", type=Path)
    p.add_argument("after", type=Path)
    options = p.parse_args(arguments)
    for folder in (options.before, options.after):
        if not folder.is_dir():
            p.error(f"{folder} is not a folder; name two result folders")
    result = compare(options.before, options.after)
    if not result:
        p.error(f"{options.before} and {options.after} hold no results; name experiments")
    print(pd.DataFrame(result).T.drop(columns="sentences").to_string())
    sentences = [sentence for row in result.values() for sentence in row["sentences"]]
    print(*sentences[:SHOWN], *[f"... and {len(sentences) - SHOWN:,} more"] * (len(sentences) > SHOWN), sep="\n")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
