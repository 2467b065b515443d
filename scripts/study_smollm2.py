"""The study of SmolLM2-135M: the published grid on a real model that fits any machine, with what it takes to believe its numbers.

    python scripts/study_smollm2.py --data-dir DATA --limit 100      the study of docs/studies/smollm2-135m: hours on two cores
    python scripts/study_smollm2.py --data-dir DATA --dry-run        the plan of its first step, and what it will cost
    python scripts/study_smollm2.py                                  the same on the hub's whole task sets

Each step is a command of tune_prune, printed before it runs, so that any of them can be run by hand or on another machine that
shares --storage-path. The same command again goes on where it was interrupted: finished trials are never run again.

1 grid        the 45 configurations of paper_grid at 20%; those that may still be the best on two more draws of calibration samples
2 control     random removal of 20%, three draws
3 ratios      the best of the grid at 10%, 20% and 30%, three draws each
4 analysis    of all of them: CSV, report.html and figures to --output
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tune_prune import load_results
from tune_prune.core.files import atomic_write_text
from tune_prune.core.values.hyperparameters import HYPERPARAMETERS

ROOT = Path(__file__).resolve().parents[1]
DRAWS = [0, 1, 2]  # seeds of calibration samples
RATIOS = [0.1, 0.2, 0.3]
STEPS = ("grid", "control", "ratios")


class Study:
    """The steps of one study; `args` as `parser` reads them, `more`: further flags of every search."""

    def __init__(self, args: argparse.Namespace, more: list[str]) -> None:
        self.args = args
        self.results = Path(args.storage_path).absolute()
        flags: list[Any] = ["--model", args.model, "--storage-path", self.results]
        flags += ["--data-dir", args.data_dir] if args.data_dir else []
        flags += ["--limit", args.limit] if args.limit else []
        flags += ["--perplexity-tokens", args.perplexity_tokens] if args.perplexity_tokens else []
        self.flags = [*map(str, flags), *more]

    def folder(self, step: str) -> Path:
        return self.results / self.name(step)

    def name(self, step: str) -> str:
        return f"{self.args.name}-{step}"

    def run(self) -> None:
        self.search("grid", self.args.search_space, "--draws", str(len(DRAWS)))
        if "--dry-run" in self.flags:
            return
        self.search("control", self.space("control", {"method": ["random"], "seed": DRAWS}))
        self.search("ratios", self.space("ratios", self.best() | {"seed": DRAWS, "pruning_ratio": RATIOS}))
        self.analyse()

    def search(self, step: str, space: str | Path, *flags: str) -> None:
        command("search", *self.flags, *flags, "--search-space", str(space), "--name", self.name(step))

    def space(self, name: str, values: dict[str, Any]) -> Path:
        """A search space of these values alone, as a file."""
        path = self.results / f"{self.args.name}-{name}.yaml"
        usual = {"search": "grid", "seq_len": [16], "num_samples": [8]}
        listed = {key: value if isinstance(value, (list, str)) else [value] for key, value in (usual | values).items()}
        atomic_write_text(path, yaml.safe_dump(listed, sort_keys=False))
        return path

    def best(self) -> dict[str, Any]:
        """The configuration that the search of the grid has decided for."""
        found = load_results(self.folder("grid")).best.to_dict("records")[0]
        return {name: found[name] for name, row in HYPERPARAMETERS.items() if row.required}

    def analyse(self) -> None:
        output = Path(self.args.output)
        command("analysis", *(str(self.folder(step)) for step in STEPS), "--output", str(output))
        for step in STEPS:
            for file in ("all_methods_results.csv", "cost.json"):
                shutil.copyfile(self.folder(step) / file, output / f"{step}.{file}")


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


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="Further flags go to every search: --inline, --address auto, --dry-run, --gpus-per-trial 0.5, ...",
    )  # fmt: skip
    p.add_argument("--model", default="smollm2", metavar="NAME", help="default: %(default)s")
    p.add_argument("--data-dir", metavar="DIR", help="task and text files (docs/data.md; default: the hub's)")
    p.add_argument("--limit", type=int, default=0, metavar="N", help="at most this many items per task (default: all)")
    p.add_argument(
        "--perplexity-tokens", type=int, default=0, metavar="N", help="of the perplexity text, so many (default: all)"
    )
    p.add_argument("--search-space", default="paper_grid", metavar="NAME", help="of step 1 (default: %(default)s)")
    p.add_argument("--storage-path", type=folder, default="ray_results", metavar="DIR", help="default: %(default)s")
    p.add_argument("--name", default="study-smollm2", metavar="NAME", help="first part of the experiments' names")
    p.add_argument("--output", default="results/smollm2-135m", metavar="DIR", help="default: %(default)s")
    return p


if __name__ == "__main__":
    Study(*parser().parse_known_args()).run()
