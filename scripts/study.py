"""The study of a real model: what of the published grid is best on it, and what recommended.yaml gives beside that.

    python scripts/study.py smollm2 --data-dir DATA             hours on two cores
    python scripts/study.py qwen2.5-coder-1.5b --data-dir DATA --inline
    python scripts/study.py smollm2 --data-dir DATA --dry-run       the plans of its first two steps, and what they will cost

Each step is a command of tune_prune, printed before it runs, so that any of them can be run by hand or on another machine that
shares --storage-path. The same command again goes on where it was interrupted: finished trials are never run again, and what
other experiments of --storage-path have computed is taken from there.

Chosen on the first --limit items of each task, the first --perplexity-tokens of the text, and draw 0 of calibration samples:
1 grid         the 45 configurations of paper_grid, or --grid: another search space, or the CSV of an earlier search
2 recommended  those of recommended.yaml, or --recommended, and the two nearest to the dense model trained
Judged on the next --limit items, the second half of the text, and draws 1, 2 and 3:
3 judged       the best of the grid and of recommended.yaml, without and with training, by right answers and by KL; random removal;
               --judge, what other models chose
4 ratios       the best of the grid and of recommended.yaml by KL with half as much removed, and half as much again
5 analysis     of what was judged: report.html, figures, tables, a CSV of each step and what is regained, to --output
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from quality_table import markdown, rows_of
from script_tools import script_parser

from tune_prune import load_results
from tune_prune.analysis.input.reading import read_study
from tune_prune.analysis.statistics.findings import find
from tune_prune.analysis.statistics.rules import NEEDS, RULES
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import atomic_write_bytes, atomic_write_text, to_json
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import RESULTS
from tune_prune.data.perplexity_text import TEXT_FILE
from tune_prune.tuning import space as search_space

ROOT = Path(__file__).resolve().parents[1]
JUDGES = [1, 2, 3]  # seeds of calibration samples of which none has chosen
RATIOS = (0.5, 1.5)  # times the ratio
STEPS = ("grid", "recommended", "judged", "ratios")
RULES_OF_CHOICE = ("gold_logprob", "kl")
OF_MACHINE = ("output_dir", "host")  # columns that say where a trial was run: left empty in what is published


class Study:
    """The steps of one study; `args` as `parser` reads them, `more`: further flags of every search."""

    def __init__(self, args: argparse.Namespace, more: list[str]) -> None:
        self.args = args
        self.results = Path(args.storage_path).absolute()
        self.name = f"study-{args.model.replace('/', '--')}"
        self.spaces = {"grid": args.grid, "recommended": args.recommended}
        self.flags = ["--model", args.model, "--storage-path", str(self.results), *more, *as_recorded(more)]
        self.flags += ["--limit", str(args.limit), "--perplexity-tokens", str(args.perplexity_tokens)]
        if not any(word.startswith("--shape") for word in more):
            self.flags += ["--shape", "free"]

    def folder(self, step: str) -> Path:
        return self.results / f"{self.name}-{step}"

    def earlier(self, step: str) -> Path | None:
        """Return the CSV that a step's results are taken from; None: it is searched."""
        space = self.spaces.get(step, "")
        return Path(space) if space.endswith(".csv") else None

    def run(self) -> None:
        """Run all steps. Raises UserError, before anything runs, for configurations to judge that no search of the study has, and
        for tasks of fewer than twice --limit items."""
        configs = [config for name in ("paper_grid", "recommended") for config in search_space.load(name).configs()]
        known = {config.name: pd.Series(vars(config) | {"name": config.name}) for config in configs}
        if unknown := [name for name in self.args.judge if name not in known]:
            raise UserError(
                f"--judge {unknown[0]}: neither paper_grid nor recommended has it; {did_you_mean(unknown[0], list(known))}"
            )
        ratio = self.args.pruning_ratio
        judging = judging_data(Path(self.args.data_dir), self.results / f"{self.name}-judging", self.args.limit)
        for step, more in (("grid", []), ("recommended", ["--recover", "2", "--objective", "kl"])):
            if self.earlier(step) is None:
                self.search(step, self.spaces[step], "--pruning-ratio", str(ratio), *more)
        if "--dry-run" in self.flags:
            return
        grid, recommended = self.measured("grid"), self.measured("recommended")
        trained = recommended["recovery"] != "none"
        groups = {"grid": grid, "recommended": recommended[~trained], "trained": recommended[trained]}
        best = {name: {rule: self.best(rows, rule) for rule in RULES_OF_CHOICE} for name, rows in groups.items()}
        chosen = [row for by_rule in best.values() for row in by_rule.values()]
        chosen += [pd.Series({"name": "random", "method": "random"}), *(known[name] for name in self.args.judge)]
        for name, row in {row["name"]: row for row in chosen}.items():
            self.judge("judged", judging, name, row, [ratio])
        for step in ("grid", "recommended"):
            row = best[step]["kl"]
            self.judge("ratios", judging, row["name"], row, [round(ratio * times, 4) for times in RATIOS])
        self.analyse({step: {rule: row["name"] for rule, row in rows.items()} for step, rows in best.items()})

    def search(self, step: str, space: str | Path, *more: str, data: Path | None = None) -> None:
        flags = ["--data-dir", str(data or self.args.data_dir), "--search-space", str(space), *more]
        command("search", *self.flags, *flags, "--name", self.folder(step).name)

    def judge(self, step: str, data: Path, name: str, row: pd.Series, ratios: list[float]) -> None:
        """Measure one configuration on the items, the text and the draws that judge."""
        path = self.results / f"{self.name}-{step}-{name}.yaml"
        usual = {"search": "grid", "seq_len": 16, "num_samples": 128}  # of the grid, for a method that reads none
        listed = usual | values_of(row) | {"seed": JUDGES, "pruning_ratio": ratios}
        atomic_write_text(path, yaml.safe_dump(listed, sort_keys=False))
        self.search(step, path, data=data)

    def measured(self, step: str) -> pd.DataFrame:
        """Return the configurations of a step, trained ones among them. Raises UserError where none has a complete trial."""
        if earlier := self.earlier(step):
            findings = find(read_study([], [(self.args.model, earlier)]), "kl")
        else:
            findings = load_results(self.folder(step)).findings
        rows = [model.eligible for model in findings.models.values()]
        if not rows or all(part.empty for part in rows):
            raise UserError(f"the model has no complete trial in {earlier or self.folder(step)}; look into its ledger")
        return pd.concat(rows, ignore_index=True)

    @staticmethod
    def best(rows: pd.DataFrame, rule: str) -> pd.Series:
        """Return the best of these. Raises UserError where what the rule needs was not measured."""
        if not (names := RULES[rule](rows)):
            raise UserError(f"the study chooses by {NEEDS[rule]}, which no trial has; look into the ledger")
        return rows[rows["name"] == names[0]].iloc[0]

    def analyse(self, chosen: dict[str, dict[str, str]]) -> None:
        """Write to --output what was judged, and which configurations were `chosen`, by step and rule."""
        output = Path(self.args.output or f"results/{self.name}")
        folders = [str(self.folder(step)) for step in ("judged", "ratios")]
        command("analysis", *folders, "--rule", "kl", "--output", str(output))
        for step in STEPS:
            path = self.earlier(step) or self.folder(step) / RESULTS
            published = pd.read_csv(path, dtype=str, keep_default_na=False)
            published[list(OF_MACHINE)] = ""
            atomic_write_text(output / f"{step}.csv", published.to_csv(index=False, lineterminator="\n"))
        for rule, name in chosen["grid"].items():
            rows = rows_of(folders if rule == "kl" else folders[:1], name)  # ratios are of the best by KL
            atomic_write_text(output / f"regained_{rule}.json", to_json(rows))
            print(f"\nbeside the best of the grid by {rule}:\n\n{markdown(rows)}")
        model = next(iter(load_results(self.folder("judged")).findings.study.models.values()))
        atomic_write_text(output / "dense.json", to_json(dict(model.baseline)))
        atomic_write_text(output / "chosen.json", to_json(chosen))


def judging_data(data: Path, folder: Path, limit: int) -> Path:
    """Write to `folder` what judges: of `data` each task without its first `limit` items, the second half of the lines of the
    perplexity text, and all else as it is. Returns the folder. Raises UserError where a task has not twice as many items."""
    for source in sorted(path for name in ("tasks", "text") for path in (data / name).rglob("*") if path.is_file()):
        name, content = source.relative_to(data), source.read_bytes()
        lines = content.splitlines(keepends=True)  # of bytes: at line feeds and carriage returns alone
        if source.suffix == ".jsonl":
            if len(lines) < 2 * limit:
                raise UserError(
                    f"{source} has {len(lines)} items, half of which choose; lower --limit to {len(lines) // 2}"
                )
            content = b"".join(lines[limit:])
        elif name == TEXT_FILE:
            content = b"".join(lines[len(lines) // 2 :])
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(folder / name, content)
    return folder


def values_of(row: pd.Series) -> dict[str, Any]:
    """Return a configuration as a search space says it, without its draw and its ratio."""
    values = {}
    for name, parameter in HYPERPARAMETERS.items():
        value = row.get(name)
        usual = name in ("seed", "pruning_ratio") or pd.isna(value) or value in ("", parameter.default)
        if not usual:
            values[name] = value.item() if hasattr(value, "item") else value
    return values


def as_recorded(more: list[str]) -> list[str]:
    """Return the data type of the protocol, unless the further flags name one."""
    return [] if any(word.startswith("--dtype") for word in more) else ["--dtype", "bfloat16"]


def command(name: str, *flags: str) -> None:
    """Run a command of tune_prune to its end. Exits with its code where that is not 0."""
    words = ["-m", f"tune_prune.{name}", *flags]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    code = subprocess.run([sys.executable, *words], env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if code:
        sys.exit(code)


def folder(text: str) -> str:
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is no folder, in which the study keeps files of its own; write a path"
        )
    return text


def names_of(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parser() -> argparse.ArgumentParser:
    more = "Further flags go to every search: --inline, --dtype float32, --address auto, --dry-run, --gpus-per-trial 0.5, ..."
    p = script_parser(__doc__, allow_abbrev=False, epilog=more)
    p.add_argument("model", metavar="MODEL", help="an alias, e.g. smollm2, gemma3-270m, qwen2.5-coder-1.5b")
    p.add_argument("--data-dir", required=True, type=folder, metavar="DIR", help="task and text files (docs/data.md)")
    p.add_argument("--pruning-ratio", type=float, default=0.2, metavar="R", help="default: %(default)s")
    for name, default in (("grid", "paper_grid"), ("recommended", "recommended")):
        p.add_argument(
            f"--{name}", default=default, metavar="SPACE",
            help="search space, or the CSV of a search of the same items (default: %(default)s)",
        )  # fmt: skip
    p.add_argument("--limit", type=int, default=100, metavar="N", help="items of each task (default: %(default)s)")
    p.add_argument(
        "--perplexity-tokens", type=int, default=16384, metavar="N", help="of each text (default: %(default)s)"
    )
    p.add_argument(
        "--judge", type=names_of, default=[], metavar="A,B",
        help="configurations that are judged, too, e.g. those that other models chose: taylor-s256-n128",
    )  # fmt: skip
    p.add_argument("--storage-path", type=folder, default="ray_results", metavar="DIR", help="default: %(default)s")
    p.add_argument("--output", metavar="DIR", help="default: results/study-MODEL")
    return p


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: Study(*parser().parse_known_args(argv)).run())


if __name__ == "__main__":
    sys.exit(main())
