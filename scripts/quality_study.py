"""The tables of docs/studies/quality.md and of docs/studies/embedded from nothing: their searches, the tables, and how near each is
to its record.

    python scripts/quality_study.py embedded                         three small models: two hours of one core
    python scripts/quality_study.py smollm2-135m --data-dir DATA     SmolLM2-135M: some 20 hours of one core
    python scripts/quality_study.py smollm2-135m --data-dir DATA --tables quality,quality_draws      what these tables need
    python scripts/quality_study.py smollm2-135m --data-dir DATA --dry-run                           what each search costs

The searches are those of scripts/quality_study.yaml, each a command of tune_prune that is printed before it runs, so that any of
them can be run by hand or on another machine that shares --storage-path. The same command again goes on where it was interrupted:
a finished trial is never run again, and searches share statistics of calibration samples and the dense model's measures.

Further flags go to every search: --inline, --gpus-per-trial 0.1, ... (--dtype is float32, as in the records). A table is printed,
and written to --output as JSON, as soon as its searches are done, and what its record says otherwise: another machine rounds
otherwise, and of two near-equal channels the other one goes (docs/studies/quality.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import questions_text
import yaml
from quality_table import markdown, rows_of
from script_tools import script_parser
from study import ROOT, as_recorded, command, folder, names_of

from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.data import calibration

STUDIES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RECORDS = ROOT / "docs" / "studies"
THIRDS = ("THIRD-1", "THIRD-2", "THIRD-3")
NEAR = 0.001
COMPARED = ("kl_text", "kl_tasks", "gold_logprob_mean", "ppl", "accuracy")


class Study:
    """The searches and tables of one study; `args` as `parser` reads them, `more`: further flags of every search."""

    def __init__(self, args: argparse.Namespace, more: list[str]) -> None:
        """Read the study. Raises UserError for a table that the study does not have, and for other items than its own."""
        self.args, self.more = args, [*more, *as_recorded(more)]
        self.study = STUDIES[args.study]
        self.data = ["--data-dir", args.data_dir] if args.data_dir else []
        self.results = Path(args.storage_path).absolute()
        self.flags = ["--storage-path", str(self.results), *self.study["flags"], *self.data, *self.more]
        self.spaces = self.results / "quality-spaces"
        tables = self.study["tables"]
        if unknown := [name for name in args.tables if name not in tables]:
            raise UserError(f"{unknown[0]!r} is no table of {args.study}; {did_you_mean(unknown[0], list(tables))}")
        if "--limit" in " ".join(more):
            raise UserError(
                "--limit is a setting of the study, whose questions are of the items after it; leave it out"
            )
        self.tables = {name: table for name, table in tables.items() if name in args.tables or not args.tables}

    def run(self) -> None:
        self.spaces.mkdir(parents=True, exist_ok=True)
        searched: set[str] = set()
        for name, table in self.tables.items():
            for search in table["of"]:
                if search not in searched:
                    self.search(search)
                searched.add(search)
            if "--dry-run" not in self.more:
                self.show(name, table)

    def search(self, search: str) -> None:
        """Run every space of a search with every model."""
        for number, space in enumerate(self.study["searches"][search]):
            path = self.space(f"{search}-{number + 1}", space)
            for model in self.study["models"]:
                flags = [*self.flags, "--model", model, "--name", self.experiment(search, model).name]
                command("search", *flags, "--search-space", str(path))

    def experiment(self, search: str, model: str) -> Path:
        return self.results / f"quality-{search}-{model}"

    def space(self, name: str, values: dict[str, Any]) -> Path:
        """Write a search space as a file, with its calibration texts by their paths."""
        listed = {"search": "grid"} | values
        if texts := listed.get("calibration"):
            listed["calibration"] = [self.text(text) for text in ([texts] if isinstance(texts, str) else texts)]
        path = self.spaces / f"{self.args.study}-{name}.yaml"
        atomic_write_text(path, yaml.safe_dump(listed, sort_keys=False))
        return path

    def text(self, mixture: str) -> str:
        """Return a calibration text of the study as a search takes it; questions are written where they are missing."""
        files = {name: self.spaces / f"{name.lower()}.txt" for name in ("QUESTIONS", *THIRDS)}
        names = mixture.split("+")
        if set(names) & set(files) and not files[THIRDS[-1]].is_file():
            self.write_questions(files)
        base = calibration.resolve(None, self.args.data_dir, False)
        return "+".join(base if name == "TEXT" else str(files[name]) for name in names)

    def write_questions(self, files: dict[str, Path]) -> None:
        """Write all questions and every third, of the items that the study does not measure. Exits where there are none."""
        (model,) = self.study["models"]
        limit = self.study["flags"][self.study["flags"].index("--limit") + 1]
        flags = ["--model", model, "--after", limit, "--output", str(files["QUESTIONS"]), *self.data]
        if code := questions_text.main(flags):
            sys.exit(code)
        texts = files["QUESTIONS"].read_text(encoding="utf-8").split("\n\n")
        for number, name in enumerate(THIRDS):
            atomic_write_text(files[name], "\n\n".join(texts[number::3]) + "\n")

    def show(self, name: str, table: dict[str, Any]) -> None:
        """Print a table, write it, and say how far it is from its record."""
        folders = [str(self.experiment(search, model)) for search in table["of"] for model in self.study["models"]]
        rows = rows_of(folders, table["reference"])
        self.args.output.mkdir(parents=True, exist_ok=True)
        atomic_write_text(self.args.output / f"{name}.json", to_json(rows))
        print(f"\n{name}, of what {table['reference']} loses:\n\n{markdown(rows)}\n", flush=True)
        record = RECORDS / self.args.study / f"{name}.json"
        if record.is_file():
            print(*against(rows, json.loads(record.read_text(encoding="utf-8")), record.relative_to(ROOT)), sep="\n")


def against(rows: list[dict[str, Any]], record: list[dict[str, Any]], name: Path) -> Iterator[str]:
    """Say how many rows of a record were made again and how near they are, then each that is off by 0.1% or more in a number."""

    def key(row: dict[str, Any]) -> tuple[str, str, int]:
        return row["model"], row["configuration"], row["draws"]

    made = {key(row): row for row in rows}
    off = {
        key(row): max((abs(made[key(row)][measure] / row[measure] - 1), measure) for measure in COMPARED)
        for row in record
        if key(row) in made
    }
    equal, near = (sum(share <= bound for share, _ in off.values()) for bound in (0.0, NEAR))
    yield f"{name}: {len(off)} of its {len(record)} rows; {equal} equal in every number, {near - equal} more within {NEAR:.1%}"
    for row in record:
        share, measure = off.get(key(row), (0.0, ""))
        if share > NEAR:
            yield (
                f"  {row['model']} {row['configuration']}: {measure} off by {share:.1%}, {made[key(row)][measure]:.5g} and not "
                f"{row[measure]:.5g}"
            )


def parser() -> argparse.ArgumentParser:
    p = script_parser(__doc__, allow_abbrev=False)
    p.add_argument("study", choices=list(STUDIES), help="before any flag of a search")
    p.add_argument("--data-dir", metavar="DIR", help="task and text files (docs/data.md; default: the hub's)")
    p.add_argument("--tables", type=names_of, default=[], metavar="A,B", help="these tables alone (default: all)")
    p.add_argument("--storage-path", type=folder, default="ray_results", metavar="DIR", help="default: %(default)s")
    p.add_argument("--output", type=Path, default=Path("results/quality"), metavar="DIR", help="default: %(default)s")
    return p


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: Study(*parser().parse_known_args(argv)).run())


if __name__ == "__main__":
    sys.exit(main())
