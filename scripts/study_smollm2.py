"""The study of SmolLM2-135M: the published grid on a real model that fits any machine, with what it takes to believe its numbers.

    python scripts/study_smollm2.py --data-dir DATA --limit 100      the study of docs/studies/smollm2-135m: hours on two cores
    python scripts/study_smollm2.py --data-dir DATA --dry-run        the plan of its first step, and what it will cost
    python scripts/study_smollm2.py                                  the same on the hub's whole task sets

Each step is a command of tune_prune, printed before it runs, so that any of them can be run by hand or on another machine that
shares --storage-path. The same command again goes on where it was interrupted: finished trials are never run again, and what
other experiments of --storage-path have computed is taken from there.

1 grid        the 45 configurations of paper_grid at 20%, one draw of calibration samples
2 contenders  the best of each method by --rule (or --contenders) on three draws
3 control     random removal of 20%, three draws
4 ratios      the best contender by --rule (or --ratios-of) at 10%, 20% and 30%, three draws each
5 analysis    of all of them by --rule: report.html, figures and tables to --output, with a CSV of each step and the dense model
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
from script_tools import script_parser

from tune_prune import load_results
from tune_prune.analysis.statistics.rules import NEEDS, RULES
from tune_prune.core.ending import exit_code
from tune_prune.core.errors import UserError, did_you_mean
from tune_prune.core.files import atomic_write_text, to_json
from tune_prune.core.hyperparameters import HYPERPARAMETERS
from tune_prune.core.store import RESULTS
from tune_prune.tuning import space as search_space

ROOT = Path(__file__).resolve().parents[1]
DRAWS = [0, 1, 2]  # seeds of calibration samples
RATIOS = [0.1, 0.2, 0.3]
STEPS = ("grid", "contenders", "control", "ratios")
OF_MACHINE = ("output_dir", "host")  # columns that say where a trial was run: left empty in what is published


class Study:
    """The steps of one study; `args` as `parser` reads them, `more`: further flags of every search."""

    def __init__(self, args: argparse.Namespace, more: list[str]) -> None:
        self.args = args
        self.results = Path(args.storage_path).absolute()
        self.flags = ["--model", args.model, "--storage-path", str(self.results), *more, *as_recorded(more)]
        for name in ("data_dir", "limit", "perplexity_tokens"):
            if value := getattr(args, name):
                self.flags += [f"--{name.replace('_', '-')}", str(value)]

    def folder(self, step: str) -> Path:
        return self.results / f"{self.args.name}-{step}"

    def run(self) -> None:
        """Run all steps. Raises UserError for contenders that the grid does not have, before anything runs."""
        names = [config.name for config in search_space.load(self.args.search_space).configs()]
        named = self.args.contenders + self.args.ratios_of
        if unknown := [name for name in named if name not in names]:
            raise UserError(
                f"{unknown[0]!r} is none of the {len(names)} configurations of {self.args.search_space}; "
                f"{did_you_mean(unknown[0], names)}"
            )
        self.search("grid", self.args.search_space)
        if "--dry-run" in self.flags:
            return
        best = self.measured("grid", self.args.contenders)
        if not self.args.contenders:
            best = pd.concat([self.chosen(rows) for _, rows in best.groupby("method")])
        for _, row in best.iterrows():
            space = self.space(f"contenders-{row['name']}", values_of(row) | {"seed": DRAWS})
            self.search("contenders", space)
        self.search("control", self.space("control", {"method": "random", "seed": DRAWS}))
        named = self.args.ratios_of
        best = self.measured("grid", named) if named else self.chosen(self.measured("contenders"))
        for _, row in best.iterrows():
            values = values_of(row) | {"seed": DRAWS, "pruning_ratio": RATIOS}
            self.search("ratios", self.space(f"ratios-{row['name']}", values))
        self.analyse()

    def search(self, step: str, space: str | Path) -> None:
        command("search", *self.flags, "--search-space", str(space), "--name", self.folder(step).name)

    def space(self, name: str, values: dict[str, Any]) -> Path:
        """Write a search space of these values alone."""
        path = self.results / f"{self.args.name}-{name}.yaml"
        usual = {"search": "grid", "seq_len": [16], "num_samples": [128]}  # of the grid, for a method that reads none
        listed = {key: value if isinstance(value, (list, str)) else [value] for key, value in (usual | values).items()}
        atomic_write_text(path, yaml.safe_dump(listed, sort_keys=False))
        return path

    def measured(self, step: str, names: list[str] | None = None) -> pd.DataFrame:
        """Return the configurations of a step (those of `names`, in their order, where any is given), means over their draws.
        Raises UserError where one has no complete trial."""
        models = list(load_results(self.folder(step)).findings.models.values())
        rows = models[0].eligible.set_index("name", drop=False) if models else pd.DataFrame()
        lost = [name for name in names or () if name not in rows.index]
        if lost or rows.empty:
            raise UserError(
                f"{(lost or ['the model'])[0]} has no complete trial in {self.folder(step)}; look into its ledger"
            )
        return rows.loc[names] if names else rows

    def chosen(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the best of these by the rule. Raises UserError where nothing of what it needs was measured."""
        rule = self.args.rule
        if not (names := RULES[rule](rows)):
            raise UserError(f"--rule {rule} needs {NEEDS[rule]}, which no trial of the study has; use --rule accuracy")
        return rows[rows["name"] == names[0]]

    def analyse(self) -> None:
        output = Path(self.args.output)
        folders = [str(self.folder(step)) for step in STEPS]
        command("analysis", *folders, "--rule", self.args.rule, "--output", str(output))
        for step in STEPS:
            published = pd.read_csv(self.folder(step) / RESULTS, dtype=str, keep_default_na=False)
            published[list(OF_MACHINE)] = ""
            atomic_write_text(output / f"{step}.csv", published.to_csv(index=False, lineterminator="\n"))
        (model,) = load_results(self.folder("grid")).findings.study.models.values()
        atomic_write_text(output / "dense.json", to_json(dict(model.baseline)))


def values_of(row: pd.Series) -> dict[str, Any]:
    """Return a configuration of the results as a search space says it, without its draw and its ratio."""
    values = {}
    for name, parameter in HYPERPARAMETERS.items():
        value = row[name]
        usual = name in ("seed", "pruning_ratio") or pd.isna(value) or value in ("", parameter.default)
        if parameter.required or not usual:
            values[name] = value.item() if hasattr(value, "item") else value
    return values


def as_recorded(more: list[str]) -> list[str]:
    """Return the data type that the records of docs/studies were made in, unless the further flags name one."""
    return [] if any(word.startswith("--dtype") for word in more) else ["--dtype", "float32"]


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
    more = "Further flags go to every search: --inline, --address auto, --dry-run, --gpus-per-trial 0.5, ..."
    p = script_parser(__doc__, allow_abbrev=False, epilog=more)
    p.add_argument("--model", default="smollm2", metavar="NAME", help="default: %(default)s")
    p.add_argument("--data-dir", metavar="DIR", help="task and text files (docs/data.md; default: the hub's)")
    p.add_argument("--limit", type=int, metavar="N", help="at most this many items per task (default: all)")
    p.add_argument("--perplexity-tokens", type=int, metavar="N", help="of the perplexity text, so many (default: all)")
    p.add_argument("--search-space", default="paper_grid", metavar="NAME", help="of step 1 (default: %(default)s)")
    p.add_argument(
        "--contenders", type=names_of, default=[], metavar="A,B",
        help="configurations that go on to three draws, e.g. taylor-s256-n128 (default: the best of each method)",
    )  # fmt: skip
    p.add_argument(
        "--ratios-of", type=names_of, default=[], metavar="A,B",
        help="configurations that are measured at 10%%, 20%% and 30%% (default: the best contender)",
    )  # fmt: skip
    p.add_argument(
        "--rule", choices=("gold_logprob", "kl", "accuracy"), default="gold_logprob",
        help="how the best is chosen: highest log-probability of right choices, lowest KL to the dense model, highest accuracy "
        "(default: %(default)s)",
    )  # fmt: skip
    p.add_argument("--storage-path", type=folder, default="ray_results", metavar="DIR", help="default: %(default)s")
    p.add_argument("--name", default="study-smollm2", metavar="NAME", help="first part of the experiments' names")
    p.add_argument("--output", default="results/smollm2-135m", metavar="DIR", help="default: %(default)s")
    return p


def main(argv: list[str] | None = None) -> int:
    return exit_code(lambda: Study(*parser().parse_known_args(argv)).run())


if __name__ == "__main__":
    sys.exit(main())
